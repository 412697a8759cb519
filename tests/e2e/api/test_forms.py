"""Each way to write tool calls and reasoning, over HTTP: streamed and whole alike, however steps cut the text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.serving.scripted import MODEL, scripted
from helpers.serving.server import Server

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
OF_FORM = {"harmony": "harmony", "mistral": "mistral", "gemma": "gemma"}
STEPS: list[int | str] = [1, 2, 7, "all", "every-cut"]
SEEDS = 12  # cuts of `every-cut` that are tried; more of them are the reader's own tests

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


def body(prompt: str, seed: int, *, stream: bool) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
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


def whole(server: Server, prompt: str, seed: int) -> tuple[dict[str, Any], str, dict[str, Any]]:
    reply = server.post("/v1/chat/completions", body(prompt, seed, stream=False))
    assert reply.status == 200, reply.body
    choice = reply.json["choices"][0]
    return parts(choice["message"]), choice["finish_reason"], reply.json["usage"]


def streamed(server: Server, prompt: str, seed: int) -> tuple[dict[str, Any], str, dict[str, Any]]:
    reply = server.post("/v1/chat/completions", body(prompt, seed, stream=True))
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


@pytest.mark.matrix(cases=4)
@pytest.mark.parametrize("form", FORMS)
def test_an_answer_is_read_alike_however_it_is_cut(tmp_path: Path, form: str) -> None:
    thought = OF_FORM.get(form, "think")
    text = THOUGHTS[thought].format(THOUGHT) + FORMS[form]
    answers = [
        {"text": text, "when": f"by {step}!", "tokens_per_step": step, "pieces": "characters"}
        for step in STEPS
    ]
    flags = (f"--tool-parser={form}", f"--reasoning-parser={thought}")
    with scripted(tmp_path, answers, *flags) as server:
        first = whole(server, "by 1!", 0)
        want = expected(form)
        assert first[0] == want, form
        assert first[1] == "tool_calls"
        for step in STEPS:
            for seed in range(SEEDS if step == "every-cut" else 1):
                prompt = f"by {step}!"
                answer, same = streamed(server, prompt, seed), whole(server, prompt, seed)
                assert answer[:2] == same[:2] == first[:2], f"{form} {prompt} {seed}"
                for usage in (answer[2], same[2]):
                    assert reasoned(usage) == reasoned(first[2]), f"{form} {prompt} {seed}"
