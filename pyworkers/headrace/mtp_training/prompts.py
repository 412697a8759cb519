"""Prompts by the thousand: topics x forms, an endless stream in which prompt `i` depends on `i` alone.

The topics of the held-out stream are others than those of the training stream. Files of prompts may be mixed in.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Kind = Literal["chat", "prose"]
Split = Literal["training", "held-out"]

JSON_FIELDS = ("question", "prompt", "text")  # of a line of a .jsonl file, the first that is there
MAX_PROMPT_FILE_BYTES = 64 << 20


class PromptFileError(ValueError):
    """A file of prompts that cannot be used; the text says which, and why."""


@dataclass(frozen=True, slots=True)
class Prompt:
    kind: Kind  # prose is continued as it is, without a chat template
    text: str


# One line, one list; topics are nouns that fit "about {}".
TOPICS = """
volcanoes|the water cycle|black holes|photosynthesis|vaccines|the human heart|DNA|plate tectonics
electric cars|solar panels|the French Revolution|ancient Egypt|the Silk Road|the Renaissance
the Roman army|the Cold War|the printing press|the moon landing|democracy|inflation
supply and demand|compound interest|taxes|insurance|the stock market|budgeting|small businesses
marketing|jazz|classical music|abstract painting|photography|poetry|theatre|film noir|architecture
pottery|comic books|football|swimming|chess|marathon running|yoga|rock climbing|cycling|tennis
hiking|meditation|bread baking|pasta|coffee|chocolate|vegetable soup|street food|cheese
fermentation|spices|salads|dogs|cats|whales|honeybees|penguins|spiders|horses|octopuses
butterflies|migrating birds|Python programming|databases|operating systems|computer networks
encryption|machine learning|web design|open source|robots|video games|job interviews
time management|teamwork|public speaking|remote work|leadership|negotiation|learning a language
note taking|resumes|sleep|stress|a healthy diet|back pain|allergies|hand washing|first aid
eye care|headaches|exercise|Japan|Brazil|Iceland|Kenya|Canada|Morocco|India|Norway|Peru|Australia
friendship|honesty|courage|jealousy|gratitude|loneliness|curiosity|patience|hope|forgiveness
rain forests|deserts|coral reefs|rivers|glaciers|recycling|wind energy|air pollution|farming
climate change|trains|airplanes|bicycles|lighthouses|bridges|subways|sailing ships|maps|clocks
telescopes
"""
HELD_OUT_TOPICS = """
earthquakes|the immune system|comets|magnets|dinosaurs|batteries|the Industrial Revolution
the Aztecs|the Olympic Games|the Black Death|mortgages|unemployment|e-commerce|opera|sculpture
ballet|basketball|skiing|gymnastics|sushi|pancakes|olive oil|owls|elephants|sharks|compilers
smartphones|artificial intelligence|career changes|mentoring|dental health|vitamins|Greece
Thailand|Mexico|kindness|ambition|wetlands|composting|elevators|submarines|calendars|libraries
toys|gardening|sewing
"""
FORMS = """
What is the most important thing to know about {}?|Explain {} to a ten-year-old.
Write a short poem about {}.|Tell me about {}.|Write a short story about {}.
List five facts about {}.|What are the advantages and disadvantages of {}?
Give me three tips about {}.|Write an email to a colleague about {}.
How did {} change over the last century?|Why do people care about {}?
Summarize what you know about {}.|What are common misconceptions about {}?
Write a product description that has to do with {}.|Compare {} and {}.
Write a dialogue between two friends about {}.|What would the world be like without {}?
Suggest a title and an outline for an essay on {}.|Describe {} in one paragraph.
Describe {} in two sentences.|Write a quiz with four questions about {}, with answers.
What questions should I ask an expert on {}?|Make a table of key terms about {}.
Write a blog post about {}.|How can a beginner get started with {}?|What is the history of {}?
Write a letter to the editor about {}.|I have to give a talk about {}. Help me plan it.
Tell me a joke about {}.|What does science say about {}?|How does {} relate to {}?
Write a haiku about {}.|Write a speech about {}.|Give a step-by-step guide to {}.
What should parents teach children about {}?|Write a news report about {}.
Write a children's story that involves {} and {}.|Is it true that {} matters less than it used to?
Write three discussion questions on {}.|Create a one-week plan to learn about {}.|Define {}.
Write a motivational quote about {}.|What are the biggest problems with {} today?
Who are famous people connected with {}?|Write song lyrics about {}.
Write an advertisement that mentions {}.|What comes to mind when you hear "{}"?
Rewrite this so that it sounds formal: I really like {} and I think you should too.
What is the difference between {} and {}?|Write a diary entry of somebody who loves {}.
How do I explain {} in a job interview?|Translate into French: I am reading a book about {}.
Correct the grammar: He dont know nothing about {}, but he like it.
Write a JSON object with three fields that describes {}.|What is the future of {}?
Pros and cons of {}, please.|You are a teacher. Introduce {} to your class.
You are a travel guide. Say something about {}.|Act as a critic and review a book about {}.
Brainstorm ten ideas that combine {} and {}.
"""
TASKS = """
reverses a string|checks whether a number is prime|sorts a list of tuples by the second item
counts the words of a text|computes the factorial of a number|finds the largest number of a list
removes duplicates from a list|reads a CSV file and prints the first row|merges two dictionaries
converts Celsius to Fahrenheit|checks whether a word is a palindrome|computes Fibonacci numbers
finds the common items of two lists|flattens a nested list|prints a multiplication table
"""
HELD_OUT_TASKS = """
computes the greatest common divisor of two numbers|counts the vowels of a string
finds the second largest number of a list|rotates a list by k places
"""
CODE_FORMS = """
Write a Python function that {}.|Write a program in Python that {} and explain it.
How do I write JavaScript code that {}?|Write a unit test for a function that {}.
Show me a short example of code that {}.|Write a C function that {}.
What is the fastest way to write a function that {}?
"""
COUNTRIES = """
France|Germany|Spain|Italy|Japan|Egypt|Canada|Australia|India|China|Brazil|Argentina|Russia|Turkey
Sweden|Poland|Portugal|Cuba|Chile|Nigeria
"""
HELD_OUT_COUNTRIES = "Austria|Finland|Vietnam|Colombia|Ireland|Ghana"
FACTS = """
What is the capital of {}?|What language do people speak in {}?|Tell me three things to see in {}.
What food is {} known for?|Where is {}?|Plan a three-day trip to {}.
What is the climate of {} like?|Who was a famous leader of {}?|How do you say hello in {}?
"""
NAMES = "Anna|Ben|Carla|David|Emma|Frank|Grace|Henry|Isabel|Jack|Kate|Leo|Maria|Nina|Oscar|Paul|Rosa|Sam|Tina|Victor"
THINGS = "apples|books|marbles|stamps|pencils|cookies|tickets|shells|stickers|eggs"
SUMS = """
{name} has {a} {thing} and buys {b} more. How many {thing} does {name} have now?
{name} had {c} {thing} and gave {a} to a friend. How many are left?
A box holds {a} {thing}. How many {thing} are in {b} boxes?
{name} reads {a} pages a day. How many days does a book of {c} pages take?|What is {a} plus {b}?
What is {a} times {b}?|Solve for x: {a}x + {b} = {c}.
A train goes {a} kilometres an hour. How far does it go in {b} hours?
{name} earns ${a} an hour and works {b} hours a week. How much does {name} earn in four weeks? Explain each step.
"""
OPENERS = """
Once upon a time, in a village near the sea, there lived|The old man closed the door and
It was raining when {name} arrived at|The history of {topic} begins|{topic}, as most people know,
In recent years, {topic}|Scientists have long wondered about {topic}.|Chapter 1. {name}
Dear {name},|I am writing to you because|The following is an introduction to {topic}.
Last summer we went to|In a small laboratory,|# {topic}|The first rule is|{name} looked out of the window
There are many reasons to care about {topic}.|"I never thought about {topic} before," said {name}.
The city council met on Tuesday to discuss|One of the most common questions about {topic} is
When {name} was a child,|The purpose of this report is to|A study published this week
My grandmother always said that|The recipe is simple:
"""


def _items(text: str) -> list[str]:
    return [item.strip() for line in text.strip().splitlines() for item in line.split("|")]


class Prompts:
    """The stream of one split. `extra` prompts, each with its share of the stream, come from files."""

    def __init__(
        self, split: Split, *, seed: int, extra: Sequence[tuple[float, Sequence[Prompt]]] = ()
    ) -> None:
        held_out = split == "held-out"
        self._split = split
        self._seed = seed
        self._extra = [(share, prompts) for share, prompts in extra if prompts]
        self._topics = _items(HELD_OUT_TOPICS if held_out else TOPICS)
        self._tasks = _items(HELD_OUT_TASKS if held_out else TASKS)
        self._countries = _items(HELD_OUT_COUNTRIES if held_out else COUNTRIES)

    def __getitem__(self, i: int) -> Prompt:
        rng = random.Random(f"{self._seed} {self._split} {i}")
        at = rng.random()
        for share, prompts in self._extra:
            if at < share:
                return prompts[rng.randrange(len(prompts))]
            at -= share
        return self._built(rng)

    def _built(self, rng: random.Random) -> Prompt:
        kind = rng.choices(("form", "code", "fact", "sum", "opener"), (62, 7, 9, 10, 12))[0]
        name = rng.choice(_items(NAMES))
        if kind == "opener":
            topic = rng.choice(self._topics)
            text = rng.choice(_items(OPENERS))
            if text.startswith("{topic}"):
                topic = topic[0].upper() + topic[1:]
            return Prompt("prose", text.format(topic=topic, name=name))
        if kind == "code":
            text = rng.choice(_items(CODE_FORMS)).format(rng.choice(self._tasks))
        elif kind == "fact":
            text = rng.choice(_items(FACTS)).format(rng.choice(self._countries))
        elif kind == "sum":
            a, b = rng.randint(2, 60), rng.randint(2, 30)
            text = rng.choice(_items(SUMS)).format(
                name=name, thing=rng.choice(_items(THINGS)), a=a, b=b, c=a + b + rng.randint(1, 90)
            )
        else:
            form = rng.choice(_items(FORMS))
            text = form.format(*rng.sample(self._topics, form.count("{}")))
            if rng.random() < 0.1:
                text += rng.choice((" Be brief.", " Answer in detail.", " Use simple words."))
        return Prompt("chat", text)


def read_prompts(path: Path, kind: Kind) -> list[Prompt]:
    """The prompts of a file: .txt with blank lines between them, or .jsonl, either also as .gz.

    A line of a .jsonl file is an object with a text as `question`, `prompt` or `text`, or a list of texts as
    `turns`, of which the first counts. Raises `PromptFileError`.
    """
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                data = file.read(MAX_PROMPT_FILE_BYTES + 1)
        if len(data) > MAX_PROMPT_FILE_BYTES:
            raise PromptFileError(f"{path}: more than {MAX_PROMPT_FILE_BYTES >> 20} MB")
        text = data.decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise PromptFileError(f"{path}: not a readable text file: {error}") from error
    if ".jsonl" in path.suffixes:
        texts = [
            _text_of(line, f"{path}, line {n}")
            for n, line in enumerate(text.rstrip().split("\n"), 1)
        ]
    else:
        texts = [part.strip() for part in text.split("\n\n") if part.strip()]
    if not texts:
        raise PromptFileError(f"{path}: holds no prompt")
    return [Prompt(kind, each) for each in texts]


def _text_of(line: str, where: str) -> str:
    try:
        value: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptFileError(f"{where}: not JSON: {error}") from error
    if isinstance(value, dict):
        found = next((value[name] for name in JSON_FIELDS if name in value), None)
        turns = value.get("turns")
        if found is None and isinstance(turns, list) and turns:
            found = turns[0]
        if isinstance(found, str) and found:
            return found
    raise PromptFileError(
        f"{where}: expected an object with a text as one of {', '.join(JSON_FIELDS)}, or as turns"
    )
