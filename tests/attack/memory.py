"""Requests that cost more than their bytes: JSON, texts, token lists, log-probabilities."""

from __future__ import annotations

import asyncio
import json

from attack.attack import Attack, Outcome, Scale
from attack.stack import Stack
from attack.wire import Reply, ask, post, send, tally

MIB = 1 << 20
WORDS = b"the quick brown fox jumps over the lazy dog and runs away from all of them "


def chat(model: str, kwargs: bytes) -> bytes:
    """A chat whose template variables are `kwargs`, as JSON."""
    head = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    return json.dumps(head).encode()[:-1] + b', "chat_template_kwargs": {"x": ' + kwargs + b"}}"


def filled(part: bytes, size: int) -> bytes:
    """A JSON array of at most `size` bytes, full of `part`."""
    count = max((size - 300) // (len(part) + 1), 1)
    return b"[" + b",".join([part] * count) + b"]"


def refused(reply: Reply) -> bool:
    return reply.status in {"400", "413", "429", "503"}


def json_of(part: bytes, at_once: int) -> Attack:
    """16 MiB of one JSON value after another, `at_once` times."""

    async def run(stack: Stack, scale: Scale) -> Outcome:
        body = chat(stack.model, filled(part, scale.of(16 * MIB)))
        request = post(stack.router, "/v1/chat/completions", body)
        replies = await asyncio.gather(*(send(stack.router, request) for _ in range(at_once)))
        # a small one may be fine: what it costs is what counts
        fine = {"200"} if scale.share < 1 else set[str]()
        return Outcome(tally(replies), all(refused(r) or r.status in fine for r in replies))

    times = f", {at_once} at once" if at_once > 1 else ""
    # half a MiB of lists in lists is let in, and takes up to 70 times as much
    slice_mb = max(96.0, at_once * 40.0)
    name = f"16 MiB of JSON, `{part.decode()}`{times}"
    return Attack(name=name, run=run, most_mb=512, slice_mb=slice_mb, control=run)


async def token_ids(stack: Stack, scale: Scale) -> Outcome:
    """A prompt of 16 MiB of token ids."""
    ids = filled(b"1", scale.of(16 * MIB))
    body = b'{"model": "%b", "max_tokens": 1, "prompt": %b}' % (stack.model.encode(), ids)
    reply = await ask(stack.router, "/v1/completions", body)
    return Outcome(tally([reply]), refused(reply))


def text_of(unit: bytes, at_once: int, name: str) -> Attack:
    """15 MB of text for a model with a context of 8,192 tokens."""

    async def run(stack: Stack, scale: Scale) -> Outcome:
        size = scale.of(15_000_000)
        text = (unit * (size // len(unit) + 1))[:size].decode()
        body = json.dumps({"model": stack.model, "prompt": text, "max_tokens": 1}).encode()
        request = post(stack.router, "/v1/completions", body)
        replies = await asyncio.gather(*(send(stack.router, request) for _ in range(at_once)))
        return Outcome(tally(replies), all(reply.status == "400" for reply in replies))

    times = f", {at_once} at once" if at_once > 1 else ""
    return Attack(name=f"15 MB of {name} in one prompt{times}", run=run, most_mb=512)


async def long_prompts(stack: Stack, scale: Scale) -> Outcome:
    """Texts that fit a request's body and no context, eight at once and again."""
    text = (WORDS * (scale.of(300_000) // len(WORDS) + 1)).decode()
    replies: list[Reply] = []
    for round_ in range(3):
        bodies = [
            {"model": stack.model, "prompt": f"{round_} {i} {text}", "max_tokens": 1}
            for i in range(8)
        ]
        replies += await asyncio.gather(
            *(ask(stack.router, "/v1/completions", body) for body in bodies)
        )
    fine = {"400", "429"} | ({"200"} if scale.share < 1 else set[str]())
    return Outcome(tally(replies), all(reply.status in fine for reply in replies))


async def tokenize(stack: Stack, scale: Scale) -> Outcome:
    """15 MB to `/tokenize`, with the text of each token."""
    size = scale.of(15_000_000)
    text = ("a " * (size // 2))[:size]
    body = {"model": stack.model, "prompt": text, "return_token_strs": True}
    reply = await ask(stack.router, "/tokenize", body)
    return Outcome(tally([reply]), reply.status in {"200", "400"})


async def logprobs(stack: Stack, scale: Scale) -> Outcome:
    """128 choices of 1,000 tokens with 20 alternatives each, in one answer."""
    body = {
        "model": stack.model,
        "messages": [{"role": "user", "content": "hi"}],
        "n": scale.of(128, 4),
        "max_tokens": 1_000,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 20,
    }
    reply = await ask(stack.router, "/v1/chat/completions", body, patience_s=120)
    return Outcome(
        f"{tally([reply])}, {len(reply.body) / MIB:.0f} MiB", reply.status in {"200", "400", "429"}
    )


async def unique_prefixes(stack: Stack, scale: Scale) -> Outcome:
    """Chats whose prefixes nobody has sent before, to fill what remembers them."""
    total = scale.of(6_000, 100)
    gate = asyncio.Semaphore(16)
    words = "some words that make this system prompt as long as those that people write " * 8

    async def one(i: int) -> Reply:
        messages = [
            {"role": "system", "content": f"{i} {words}"},
            {"role": "user", "content": f"{i} {words}"},
        ]
        body = {"model": stack.model, "messages": messages, "max_tokens": 1}
        async with gate:
            return await ask(stack.router, "/v1/chat/completions", body)

    replies = await asyncio.gather(*(one(i) for i in range(total)))
    return Outcome(tally(replies), all(reply.status == "200" for reply in replies))


ATTACKS = [
    json_of(b"1", 1),
    json_of(b"[0]", 1),
    json_of(b"[[0]]", 1),
    json_of(b'{"":0}', 1),
    json_of(b"[[0]]", 8),
    Attack(name="16 MiB of token ids", run=token_ids, most_mb=256),
    text_of(b"1234567890", 1, "digits"),
    text_of(WORDS, 1, "English"),
    text_of(WORDS, 4, "English"),
    Attack(name="eight prompts of 300 kB at once, three times", run=long_prompts, most_mb=512),
    Attack(name="15 MB to /tokenize, with texts", run=tokenize, most_mb=512),
    Attack(
        name="log-probabilities: n 128 x 1,000 tokens x 20",
        run=logprobs,
        most_mb=288,  # one answer: 256 MiB
    ),
    Attack(name="6,000 chats with unique prefixes", run=unique_prefixes, most_mb=160),
]
