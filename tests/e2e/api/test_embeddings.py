"""Prompts as vectors over HTTP: those of the model's hidden states, in every form, and how alike texts are."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from headrace.models import load_model
from headrace.models.load.checkpoint import Checkpoint, SafetensorsCheckpoint
from headrace.models.load.default_model import ensure_default_model
from headrace.models.load.source import resolve
from helpers.models.stepping import Stepper
from helpers.serving.server import Server

PATH = "/v1/embeddings"
TEXTS = ["A cat sat on the mat.", "a", "ž 🐎", "The river turns the wheel. " * 40]
Vector = NDArray[np.float32]


def post(server: Server, path: str, **body: Any) -> Any:
    reply = server.post(path, {"model": server.model, **body})
    assert reply.status == 200, reply.body
    return reply.json


def vectors(server: Server, **body: Any) -> list[Vector]:
    data = post(server, PATH, **body)["data"]
    assert [item["index"] for item in data] == list(range(len(data)))
    return [np.array(item["embedding"], dtype=np.float32) for item in data]


def tokens_of(server: Server, text: str) -> list[int]:
    return post(server, "/tokenize", prompt=text)["tokens"]


def hidden(checkpoint: Checkpoint, *prompts: list[int]) -> list[Vector]:
    """By the same kernels without engine, router and wire: a prompt alone, in one pass."""
    model = load_model(checkpoint, dtype="auto", device="cpu", block_tokens=16)
    steps = Stepper(model, 16, blocks=512)
    steps.pools = True
    found: list[Vector] = []
    for tokens in prompts:
        steps.whole(tokens)
        found.append(steps.hidden[0].numpy())
    return found


def mean(rows: Vector) -> Vector:
    total = np.zeros(rows.shape[1])
    for row in rows:
        total += row
    return (total / len(rows)).astype(np.float32)


def normal(vector: Vector) -> Vector:
    return (vector / np.linalg.norm(vector.astype(np.float64))).astype(np.float32)


@pytest.mark.real_model
def test_vectors_are_the_hidden_states_of_the_default_model(real: Server) -> None:
    """To the bit those of its kernels, and close to those of transformers: the weights are rounded to 8 bits."""
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    prompts = [tokens_of(real, text) for text in TEXTS]
    rows = hidden(resolve(None), *prompts)
    for pooling in ("last", "mean"):
        wanted = [row[-1] if pooling == "last" else mean(row) for row in rows]
        raw = vectors(real, input=TEXTS, pooling=pooling, normalize=False)
        assert all((got == want).all() for got, want in zip(raw, wanted, strict=True))
        unit = vectors(real, input=TEXTS, pooling=pooling)
        for got, want in zip(unit, wanted, strict=True):
            assert abs(np.linalg.norm(got) - 1) < 1e-5
            np.testing.assert_allclose(got, normal(want), rtol=0, atol=1e-6)
    oracle = LlamaForCausalLM.from_pretrained(ensure_default_model(), dtype=torch.float32)
    assert isinstance(oracle, LlamaForCausalLM)
    for tokens, row in zip(prompts, rows, strict=True):
        with torch.inference_mode():
            states = oracle.eval().model(torch.tensor([tokens])).last_hidden_state
        assert states is not None
        assert float(normal(states[0, -1].numpy()) @ normal(row[-1])) > 0.98


@pytest.mark.real_model
def test_sentences_that_mean_alike_have_means_that_are_alike(real: Server) -> None:
    groups = [
        ["A cat is sleeping on the sofa.", "A kitten naps on the couch."],
        ["The stock market fell sharply today.", "Shares dropped a lot on the exchange this morning."],
        ["She bakes bread every Sunday.", "On Sundays she makes loaves in her oven."],
    ]  # fmt: skip
    flat = [text for group in groups for text in group]
    found = np.stack(vectors(real, input=flat, pooling="mean"))
    alike = found @ found.T
    for i in range(0, len(flat), 2):
        others = [j for j in range(len(flat)) if j not in {i, i + 1}]
        assert alike[i, i + 1] > max(alike[i, j] for j in others), (flat[i], alike[i])


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_batch_chunks_and_cache_change_no_bit(
    tiny: Server, tiny_folder: Path, pooling: str
) -> None:
    """The long prompt takes several steps, and the second time its prefix is in the cache."""
    long = [100 + i % 150 for i in range(2_500)]
    prompts = [long, [7], *([n] * (3 * n + 1) for n in range(60, 75))]
    together = vectors(tiny, input=prompts, pooling=pooling, normalize=False)
    again = [vectors(tiny, input=prompt, pooling=pooling, normalize=False)[0] for prompt in prompts]
    rows = hidden(SafetensorsCheckpoint(tiny_folder), *prompts)
    for one, two, row in zip(together, again, rows, strict=True):
        want = row[-1] if pooling == "last" else mean(row)
        assert (one == want).all() and (two == want).all()


def test_base64_holds_the_same_values_and_dimensions_are_those_of_the_beginning(
    tiny: Server,
) -> None:
    (whole,) = vectors(tiny, input="a text")
    (item,) = post(tiny, PATH, input="a text", encoding_format="base64")["data"]
    assert (np.frombuffer(base64.b64decode(item["embedding"]), "<f4") == whole).all()
    (short,) = vectors(tiny, input="a text", dimensions=10)
    assert short.shape == (10,)
    np.testing.assert_allclose(short, normal(whole[:10]), rtol=0, atol=1e-6)
    (all_of_it,) = vectors(tiny, input="a text", dimensions=len(whole))
    assert (all_of_it == whole).all()
    wide = tiny.post(PATH, {"model": tiny.model, "input": "a", "dimensions": len(whole) + 1})
    assert (wide.status, wide.error["param"]) == (400, "dimensions")


def test_the_openai_client_gets_vectors_in_either_encoding(tiny: Server) -> None:
    """Without `encoding_format` the client asks for base64 by itself."""
    answer = tiny.client.embeddings.create(model=tiny.model, input=["one", "two"])
    floats = tiny.client.embeddings.create(
        model=tiny.model, input=["one", "two"], encoding_format="float"
    )
    for one, two in zip(answer.data, floats.data, strict=True):
        in_base64, in_numbers = (np.array(item.embedding, np.float32) for item in (one, two))
        assert (in_base64 == in_numbers).all()
    tokens = sum(len(tokens_of(tiny, text)) for text in ("one", "two"))
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (tokens, tokens)


def test_a_long_list_is_answered_in_order(tiny: Server) -> None:
    inputs = [[n % 200 + 3, n // 200 + 3] for n in range(2_048)]
    found = vectors(tiny, input=inputs)
    assert len(found) == 2_048
    for place in (0, 777, 2_047):
        assert (found[place] == vectors(tiny, input=inputs[place])[0]).all()
    more = tiny.post(PATH, {"model": tiny.model, "input": [*inputs, [1]]})
    assert (more.status, more.error["param"]) == (400, "input")


def test_what_is_cut_is_the_beginning(tiny: Server) -> None:
    tokens = list(range(100, 160))
    (cut,) = vectors(tiny, input=tokens, truncate_prompt_tokens=16)
    assert (cut == vectors(tiny, input=tokens[-16:])[0]).all()
    long = tiny.post(PATH, {"model": tiny.model, "input": [5] * 9_000})
    assert (long.status, long.error["code"]) == (400, "context_length_exceeded")
    (fits,) = vectors(tiny, input=[5] * 9_000, truncate_prompt_tokens=-1)
    assert np.isfinite(fits).all()


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"input": "a", "model": "nobody"}, 404, "model"),
        ({"input": "a", "model": None}, 400, "model"),
        ({"model": "tiny"}, 404, "model"),
        ({}, 400, "input"),
        ({"input": {"a": 1}}, 400, "input"),
        ({"input": "a", "stream": True}, 400, "stream"),
    ],
)
def test_what_is_wrong_is_named(tiny: Server, body: Any, status: int, param: str) -> None:
    reply = tiny.post(PATH, {"model": tiny.model, **body})
    assert (reply.status, reply.error["param"]) == (status, param)


def test_ranking_and_scores_are_the_cosines_of_the_vectors(tiny: Server) -> None:
    query, documents = (
        "what turns the wheel",
        ["a cat", "the wheel turns", "water", "the wheel turns"],
    )
    unit = vectors(tiny, input=[query, *documents], pooling="mean")
    wanted = [float(unit[0].astype(np.float64) @ vector) for vector in unit[1:]]
    scores = post(tiny, "/v1/score", text_1=query, text_2=documents, pooling="mean")
    assert scores["object"] == "list"
    np.testing.assert_allclose([one["score"] for one in scores["data"]], wanted, atol=1e-6)
    body = {"query": query, "documents": [documents[0], *({"text": d} for d in documents[1:])]}
    ranked = post(tiny, "/v1/rerank", **body, pooling="mean")["results"]
    order = sorted(range(4), key=lambda i: (-wanted[i], i))
    assert [one["index"] for one in ranked] == order
    assert [one["document"]["text"] for one in ranked] == [documents[i] for i in order]
    np.testing.assert_allclose(
        [one["relevance_score"] for one in ranked], [wanted[i] for i in order], atol=1e-6
    )
    for path in ("/rerank", "/v2/rerank"):
        few = post(tiny, path, **body, pooling="mean", top_n=2, return_documents=False)["results"]
        assert few == [{k: v for k, v in one.items() if k != "document"} for one in ranked[:2]]
    pairs = post(tiny, "/score", text_1=["one", "two"], text_2=["one", "three"])["data"]
    assert pairs[0]["score"] == pytest.approx(1.0) and pairs[1]["score"] < 1


def test_headers_and_metrics_are_those_of_other_answers(tiny: Server) -> None:
    reply = tiny.post(PATH, {"model": tiny.model, "input": "a"})
    headers = {name.lower() for name in reply.headers}
    assert {"x-request-id", "server-timing", "x-headrace-worker"} <= headers
    metrics = tiny.get("/metrics").body.decode()
    assert 'headrace_http_requests_total{route="/v1/embeddings",status="200"' in metrics
