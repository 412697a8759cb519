"""What the clients ask: requests of every kind, decided by a seed. Pure."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

BLOCK_TOKENS = 16
CHUNK_TOKENS = 128  # of a worker's step; longer prompts take several
SEEDS_APART = 8  # choice i of a request samples with its seed + i
FIRST_ID, LAST_ID = 3, 258  # the byte tokens of the tiny tokenizer
WORDS = ("the", "head", "race", "brings", "water", "to", "wheel", "and", "grinds", "corn", "you")

KINDS = (
    "greedy",
    "seeded",
    "penalties",
    "two",
    "stop",
    "logprobs",
    "one token",
    "bias",
    "chat",
    "several chunks",
    "shared prefix",
)


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request. Its seed is its own, so that it also names the request on the workers."""

    seed: int
    kind: str
    path: str
    body: Mapping[str, Any]

    @property
    def choices(self) -> int:
        return self.body.get("n", 1)

    @property
    def seeds(self) -> range:
        """Of its choices, as workers see them."""
        return range(self.seed, self.seed + self.choices)

    def stopping_at(self, text: str) -> Request:
        """The same request with a stop string."""
        return dataclasses.replace(self, body={**self.body, "stop": [text]})

    def uncached(self, salt: str) -> Request:
        """The same request, its prompt shared with no request that has another salt."""
        return dataclasses.replace(self, body={**self.body, "cache_salt": salt})


def of_seed(seed: int) -> int:
    """The seed of the request that a choice with this one belongs to."""
    return seed - seed % SEEDS_APART


def requests(seed: int, count: int) -> list[Request]:
    """`count` requests, all kinds in turn."""
    rng = random.Random(f"requests {seed}")
    shared = [_ids(rng, BLOCK_TOKENS * blocks) for blocks in (2, 9, 20)]
    return [
        _request(rng, KINDS[i % len(KINDS)], (i + 1) * SEEDS_APART, shared) for i in range(count)
    ]


def _request(rng: random.Random, kind: str, seed: int, shared: list[list[int]]) -> Request:
    body: dict[str, Any] = {
        "seed": seed,
        "temperature": rng.choice([0, 0.7, 1.0]),
        "max_tokens": rng.choice([2, 9, 16, 24, 33, 48, 64]),
        "ignore_eos": rng.random() < 0.8,
    }
    path = "/v1/completions"
    prompt = _ids(rng, rng.choice([1, 7, 15, 16, 17, 31, 32, 33, 50, 80, 127, 128, 129]))
    match kind:
        case "greedy":
            body["temperature"] = 0
        case "seeded":
            body |= {"temperature": 1.2, "top_p": 0.95, "top_k": 40}
        case "penalties":
            body |= {"presence_penalty": 0.8, "frequency_penalty": 0.6, "repetition_penalty": 1.2}
        case "two":
            body |= {"n": 2, "temperature": 0.9}
        case "stop":
            body["max_tokens"] = 48
        case "logprobs":
            body["logprobs"] = 2
        case "one token":
            body["max_tokens"] = 1
        case "bias":
            chosen = rng.sample(range(FIRST_ID, LAST_ID), 6)
            body["logit_bias"] = {str(token): rng.choice([-100, 2.5, 5]) for token in chosen}
        case "chat":
            path = "/v1/chat/completions"
            body |= {"logprobs": rng.random() < 0.5}
        case "several chunks":
            prompt = _ids(rng, rng.choice([255, 256, 257, 300, 449, 640]))
        case _:
            assert kind == "shared prefix"
            prompt = [*rng.choice(shared), *_ids(rng, rng.randint(1, 40))]
    if path == "/v1/completions":
        body["prompt"] = prompt
    else:
        text = " ".join(rng.choices(WORDS, k=rng.randint(3, 60)))
        body["messages"] = [{"role": "user", "content": text}]
    return Request(seed, kind, path, body)


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randint(FIRST_ID, LAST_ID) for _ in range(count)]


def stop_text(answer: str) -> str | None:
    """A stop string that ends this answer about its middle, if one can: it occurs for the first time there."""
    for start in range(len(answer) // 2, len(answer) - 1):
        for length in (2, 1, 3):
            text = answer[start : start + length]
            if text.isascii() and text.isprintable() and answer.find(text) == start:
                return text
    return None


def endless(requests: list[Request], seed: int) -> Iterator[Request]:
    """All of them over and over, each time in another order.

    Those of several chunks are computed anew each time: from a cache, which soon has them all, they would take one.
    """
    rng = random.Random(f"order {seed}")
    for turn in itertools.count():
        for request in rng.sample(requests, len(requests)):
            yield (
                request.uncached(f"{seed} {turn}") if request.kind == "several chunks" else request
            )
