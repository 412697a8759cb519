"""Vectors do not depend on the worker: neither on one that dies, nor on how many ranks share the model."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from helpers.models.tiny_deepseek import tiny_deepseek
from helpers.serving.server import Server, eventually, serving

TEXTS = [
    f"{i}. The river turns the wheel, and the wheel turns the stone. " * (8 + i) for i in range(12)
]


def vectors(server: Server, texts: list[str], **more: Any) -> NDArray[np.float32]:
    reply = server.post("/v1/embeddings", {"model": server.model, "input": texts} | more)
    assert reply.status == 200, reply.body
    data = reply.json["data"]
    assert [item["index"] for item in data] == list(range(len(texts)))
    return np.array([item["embedding"] for item in data], dtype=np.float32)


@pytest.mark.real_model
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_worker_that_dies_takes_no_vector_with_it(pooling: str) -> None:
    # a slow machine may compute all of it on one worker: nobody gives up meanwhile
    with serving(None, "--workers", "2", "--queue-timeout-ms", "120000") as server:
        expected = vectors(server, TEXTS, pooling=pooling)
        found: list[NDArray[np.float32]] = []
        salt = {"cache_salt": "computed anew"}
        asking = threading.Thread(
            target=lambda: found.append(vectors(server, TEXTS, pooling=pooling, **salt))
        )
        asking.start()
        eventually(lambda: all(w["running"] for w in server.workers().values()), server.tail)
        server.worker_process("worker-0").kill()
        asking.join()
        assert (found[0] == expected).all()
        server.wait_line(r"worker-0 +\| was killed by SIGKILL")


def test_ranks_of_a_group_give_the_vectors_of_one_rank(tmp_path: Path) -> None:
    folder = str(tiny_deepseek(tmp_path / "tiny", mtp=True))
    texts = [text[:60] for text in TEXTS[:8]]
    found: list[NDArray[np.float32]] = []
    for flags in ((), ("--ep", "2", "--policy", "round-robin")):
        with serving(folder, *flags) as server:
            found += [vectors(server, texts, pooling=pooling) for pooling in ("last", "mean")]
    assert (found[0] == found[2]).all()
    assert (found[1] == found[3]).all()
    assert (found[0] != found[1]).any()
