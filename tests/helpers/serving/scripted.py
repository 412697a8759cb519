"""A real router whose worker is a mock that answers with given texts."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from helpers.serving.server import Running, Server, eventually

MODEL = "mock"
STEP_COSTS = "0.2,0,0,0,0"  # ms, as --cost takes them: answers come at once


@contextmanager
def scripted(
    folder: Path,
    answers: Sequence[dict[str, Any]],
    *flags: str,
    program: Sequence[str] = (sys.executable, "-m", "headrace"),
) -> Generator[Server]:
    """A router with these flags, and a mock worker with these lines of a script; `folder` is its own."""
    script, socket = folder / "script.jsonl", folder / "workers.sock"
    script.write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    router = Server(
        "router", "--port", "0", "--worker-listen", f"unix:{socket}", *flags, program=program
    )
    mock: Running | None = None
    try:
        router.set_url(router.wait_line(r"headrace-router: (http:\S+) for clients")[1])
        mock = Running(
            *("mock", "--router", f"unix:{socket}", "--workers", "1", "--model", MODEL),
            *("--cost", STEP_COSTS, "--script", str(script)),
            program=(sys.executable, "-m", "headrace"),
        )
        eventually(
            lambda: router.get("/ready").status == 200,
            lambda: f"no worker is ready:\n{router.tail()}\n{mock.tail() if mock else ''}",
            60,
        )
        yield router
    finally:
        if mock is not None:
            mock.close()
        router.close()
