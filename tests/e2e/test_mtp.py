"""`headrace serve --mtp`: the same answers over HTTP, and what usage, metrics and /workers say of drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.models.tiny_deepseek import tiny_deepseek
from helpers.models.tiny_model import tiny_llama
from helpers.serving.server import Running, Server, serving

ASKED: list[dict[str, Any]] = [
    # Drafts know of the bias, so all are right.
    {"temperature": 0, "logit_bias": {"9": 100}},
    {"temperature": 0},
    {"temperature": 0, "frequency_penalty": 1, "logprobs": 2},
    {"temperature": 0.9, "seed": 5, "n": 2},
    {"temperature": 1, "seed": 7, "top_p": 0.8, "presence_penalty": 0.5},
]


@pytest.fixture(scope="module")
def drafting_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_deepseek(tmp_path_factory.mktemp("deepseek") / "tiny", mtp=True)


def answers(server: Server) -> list[Any]:
    found: list[Any] = []
    for asked in ASKED:
        body = {
            "model": server.model,
            "prompt": "Water flows down the hill and",
            "max_tokens": 40,
            "ignore_eos": True,
            **asked,
        }
        reply = server.post("/v1/completions", body)
        assert reply.status == 200, reply.body
        found.append((reply.json["choices"], reply.json["usage"]))
    return found


def metric(server: Server, name: str) -> float:
    lines = server.get("/metrics").body.decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name + " "))


@pytest.fixture(scope="module")
def plain(drafting_folder: Path) -> list[Any]:
    """The answers of one worker that does not draft."""
    with serving(str(drafting_folder)) as server:
        found = answers(server)
        assert metric(server, "headrace_drafted_tokens_total") == 0
    return found


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize(
    ("flags", "at_least"),
    [
        ([], 2),  # how many pay, the clock says; but the first steps try some
        (["--mtp-fixed"], 20),
        (["--mtp-fixed", "--prefill", "1", "--decode", "1"], 20),
    ],
    ids=["one worker", "fixed", "split"],
)
def test_answers_are_the_same_with_and_without(
    drafting_folder: Path, plain: list[Any], flags: list[str], at_least: int
) -> None:
    with serving(str(drafting_folder), "--mtp", "2", *flags) as server:
        drafted = answers(server)
        for (choices, _), (wanted, _) in zip(drafted, plain, strict=True):
            assert choices == wanted
        details = [usage["completion_tokens_details"] for _, usage in drafted]
        assert details[0]["accepted_prediction_tokens"] >= at_least
        assert details[0]["rejected_prediction_tokens"] == 0
        accepted = sum(detail["accepted_prediction_tokens"] for detail in details)
        rejected = sum(detail["rejected_prediction_tokens"] for detail in details)
        assert metric(server, "headrace_accepted_tokens_total") == accepted
        assert metric(server, "headrace_drafted_tokens_total") == accepted + rejected
        body = {
            "model": server.model,
            "prompt": "x",
            "max_tokens": 20,
            "logit_bias": {"9": 100},
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
        with server.stream("/v1/completions", body) as events:
            last = [json.loads(event) for event in events if event != "[DONE]"][-1]
        assert last["usage"]["completion_tokens"] == 20
        assert last["usage"]["completion_tokens_details"].keys() == details[0].keys()
        if "--mtp-fixed" in flags:
            assert any(worker["accepted_tokens"] > 1 for worker in server.workers().values())


def test_a_model_without_the_layer_does_not_start(tmp_path: Path) -> None:
    running = Running("serve", str(tiny_llama(tmp_path / "tiny")), "--mtp", "1", "--port", "0")
    try:
        assert running.wait(90) != 0
        assert "llama has no layer for multi-token prediction" in running.tail(200)
    finally:
        running.close()
