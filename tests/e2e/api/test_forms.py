"""Each way to write tool calls and reasoning, over HTTP: streamed and whole alike, however steps cut the text."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

import pytest

from helpers.serving.scripted import MODEL, scripted
from helpers.serving.server import Server
from helpers.slices import places

CITY = 'Zü"rich {1} </x>'
ARGUMENTS = json.dumps({"city": CITY, "days": 3}, ensure_ascii=False)
INTO = "Let me see.\n"
AFTER = "\nThere you are."


def of_deepseek(text: str) -> str:
    """With its own bars in the markers."""
    return text.replace("<|", "<\uff5ctool▁").replace("|>", "\uff5c>")


# Two calls in the form, with text before and after where the form has room for it.
FORMS: dict[str, str] = {
    "hermes": f'{INTO}<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>{"name": "now", "arguments": ""}</tool_call>' + AFTER,
    "qwen3-coder": f"{INTO}<tool_call>\n<function=weather>\n<parameter=city>\n{CITY}\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=now>\n</function>\n</tool_call>" + AFTER,
    "llama3-json": f'{{"name": "weather", "parameters": {ARGUMENTS}}}; {{"name": "now"}}',
    "pythonic": f"[weather(city={CITY!r}, days=3), now()]",
    "mistral": f"{INTO}[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]now[ARGS]{{}}{AFTER}",
    "deepseek-v3": INTO
    + of_deepseek(
        f"<|calls▁begin|><|call▁begin|>function<|sep|>weather\n```json\n{ARGUMENTS}\n```<|call▁end|>\n"
        "<|call▁begin|>function<|sep|>now\n```json\n\n```<|call▁end|><|calls▁end|>"
    )
    + AFTER,
    "deepseek-v3.1": INTO
    + of_deepseek(
        f"<|calls▁begin|><|call▁begin|>weather<|sep|>{ARGUMENTS}<|call▁end|>"
        "<|call▁begin|>now<|sep|>{}<|call▁end|><|calls▁end|>"
    )
    + AFTER,
    "glm-4.5": f"{INTO}<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>{CITY}</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now</tool_call>"
    + AFTER,
    "kimi-k2": f"{INTO}<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_call_begin|>functions.now:1"
    f"<|tool_call_argument_begin|><|tool_call_end|><|tool_calls_section_end|>{AFTER}",
    "harmony": "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary "
    f"to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}<|call|><|start|>assistant"
    "<|channel|>commentary to=functions.now<|message|>{}<|call|><|start|>assistant<|channel|>final"
    "<|message|>There you are.",
    "gemma": f'{INTO}<|tool_call>call:weather{{city:<|"|>{CITY}<|"|>,days:3}}<tool_call|>'
    f"<|tool_call>call:now{{}}<tool_call|>{AFTER}",
}
ALONE = {"llama3-json", "pythonic"}  # calls are all of the answer
WHITE = {"hermes", "qwen3-coder", "deepseek-v3", "glm-4.5"}  # a line break stands between the calls
# What stands around a thought; all forms but harmony's go with each of them.
THOUGHTS = {
    "think": "<think>\n{}\n</think>\n\n",
    "mistral": "[THINK]{}[/THINK]",
    "gemma": "<|channel>thought\n{}<channel|>",
    "harmony": "<|channel|>analysis<|message|>{}<|end|><|start|>assistant",
}
THOUGHT = "Is <it> [so]? é"
PAIRS = [
    (form, thought)
    for form in FORMS
    for thought in THOUGHTS
    if (form == "harmony") == (thought == "harmony")
]
STEPS: list[int | str] = [1, 2, 7, "all", "every-cut"]
CUTS = 12  # of `every-cut`, unless all of them are tried

# What a chat template has in it by which the form is known.
SHOWN = {
    "hermes": "<tool_call>",
    "qwen3-coder": "<tool_call><function=<parameter=",
    "llama3-json": "<|python_tag|>",
    "pythonic": "<|python_start|>",
    "mistral": "[TOOL_CALLS][ARGS]",
    "deepseek-v3": of_deepseek("<|call▁begin|>```json"),
    "deepseek-v3.1": of_deepseek("<|call▁begin|>"),
    "glm-4.5": "<tool_call><arg_key>",
    "kimi-k2": "<|tool_call_begin|>",
    "harmony": "<|channel|><|constrain|>",
    "gemma": "<|tool_call>",
}
SHOWN_OF_THOUGHTS = {
    "think": "</think>",
    "mistral": "[THINK]",
    "gemma": "<|channel>thought",
    "harmony": "<|channel|>analysis",
}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    """One for all forms: the chat template of a request shows which of them its answer is read by."""
    answers = [
        {
            "text": THOUGHTS[thought].format(THOUGHT) + FORMS[form],
            "when": prompt(form, thought, step),
            "tokens_per_step": step,
            "pieces": "characters",
        }
        for form, thought in PAIRS
        for step in STEPS
    ]
    folder = tmp_path_factory.mktemp("forms")
    with scripted(folder, answers, "--allow-request-templates") as server:
        yield server


def prompt(form: str, thought: str, step: int | str) -> str:
    return f"{form} behind {thought} by {step}!"


def body(form: str, thought: str, step: int | str, seed: int, *, stream: bool) -> dict[str, Any]:
    shown = SHOWN[form] + SHOWN_OF_THOUGHTS[thought]
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt(form, thought, step)}],
        "chat_template": "{{ messages[0].content }}{% if tools and false %}"
        f"{shown}{{% endif %}}",
        "tools": TOOLS,
        "seed": seed,
        "stream": stream,
        "stream_options": {"include_usage": True} if stream else None,
    }


def parts(message: dict[str, Any]) -> dict[str, Any]:
    """What does not differ from answer to answer."""
    calls = message.get("tool_calls") or []
    return {
        "content": message.get("content"),
        "reasoning": message.get("reasoning_content"),
        "calls": [(call["function"]["name"], call["function"]["arguments"]) for call in calls],
    }


Answer = tuple[dict[str, Any], str, dict[str, Any]]  # parts, finish reason, usage


def whole(server: Server, asked: dict[str, Any]) -> Answer:
    reply = server.post("/v1/chat/completions", asked)
    assert reply.status == 200, reply.body
    choice = reply.json["choices"][0]
    return parts(choice["message"]), choice["finish_reason"], reply.json["usage"]


def streamed(server: Server, asked: dict[str, Any]) -> Answer:
    reply = server.post("/v1/chat/completions", asked)
    assert reply.status == 200, reply.body
    lines = reply.body.decode().splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    finish, usage = "", {}
    message: dict[str, Any] = {"content": None, "reasoning_content": None, "tool_calls": []}
    for event in events:
        usage = event["usage"] or usage
        for choice in event["choices"]:
            delta, finish = choice["delta"], choice["finish_reason"] or finish
            for name in ("content", "reasoning_content"):
                if delta.get(name):
                    message[name] = (message[name] or "") + delta[name]
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    assert call["index"] == len(message["tool_calls"])
                    message["tool_calls"].append({"function": dict(call["function"])})
                else:
                    function = message["tool_calls"][call["index"]]["function"]
                    function["arguments"] += call["function"]["arguments"]
    return parts(message), finish, usage


def reasoned(usage: dict[str, Any]) -> int:
    return usage["completion_tokens_details"]["reasoning_tokens"]


def expected(form: str) -> dict[str, Any]:
    content = None if form in ALONE else "Let me see.\n" + "\n" * (form in WHITE) + AFTER
    if form == "harmony":
        content = "Let me see.\nThere you are."
    return {
        "content": content,
        "reasoning": THOUGHT,
        "calls": [("weather", ARGUMENTS), ("now", "{}")],
    }


@pytest.mark.matrix
@pytest.mark.parametrize(("form", "thought"), PAIRS)
def test_an_answer_is_read_alike_however_it_is_cut(
    server: Server, pytestconfig: pytest.Config, form: str, thought: str
) -> None:
    first = whole(server, body(form, thought, 1, 0, stream=False))
    assert first[0] == expected(form)
    assert first[1] == "tool_calls"
    cuts = first[2]["completion_tokens"] - 1
    assert cuts > len(FORMS[form]) // 2, "a character is a token"
    for step in STEPS:
        for seed in places(pytestconfig, cuts, CUTS) if step == "every-cut" else [0]:
            asked = [body(form, thought, step, seed, stream=stream) for stream in (True, False)]
            answers = [streamed(server, asked[0]), whole(server, asked[1])]
            for answer in answers:
                assert answer[:2] == first[:2], f"by {step}, cut {seed}"
                assert reasoned(answer[2]) == reasoned(first[2]), f"by {step}, cut {seed}"
