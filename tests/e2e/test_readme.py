"""The examples of the README and of docs/api.md work as printed, but for the port."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from helpers.require import needs
from helpers.serving.server import ROOT, Server

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


DOCUMENTS = ("README.md", "docs/api.md")


def blocks(language: str, containing: str, documents: Sequence[str] = DOCUMENTS) -> list[str]:
    found = [pair for name in documents for pair in BLOCK.findall((ROOT / name).read_text())]
    return [text for lang, text in found if lang == language and containing in text]


def curl_blocks() -> list[str]:
    return blocks("bash", "curl ") + blocks("sh", "curl ")


def test_there_are_examples() -> None:
    assert blocks("bash", "chat/completions", ["README.md"])
    assert blocks("python", "openai", ["docs/api.md"])


@needs("curl", "there is no curl", here=shutil.which("curl") is not None)
@pytest.mark.parametrize("script", curl_blocks())
def test_curl_examples_work(real: Server, script: str) -> None:
    here = re.sub(r"(127\.0\.0\.1|localhost):8000", f"{real.host}:{real.port}", script)
    assert str(real.port) in here, "the example names no port 8000"
    done = subprocess.run(
        ["bash", "-c", here], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert '"error":{' not in done.stdout


@pytest.mark.parametrize("code", blocks("python", "openai"))
def test_python_examples_work(real: Server, code: str, tmp_path: Path) -> None:
    here = re.sub(r"(127\.0\.0\.1|localhost):8000", f"{real.host}:{real.port}", code)
    (tmp_path / "example.py").write_text(here)
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
