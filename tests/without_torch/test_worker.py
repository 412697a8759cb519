"""A whole worker where torch cannot be imported: it answers as the workers did that sampled with torch, byte by byte.

`answers.json` was written by a worker that took its weights through torch and sampled with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.exit_status import EXIT_CONFIG
from headrace.models.load.checkpoint import SafetensorsCheckpoint
from headrace.models.r1_demo.deepseek_folder import plan
from helpers.models.tiny_model import tiny_llama, tiny_mtp_head
from helpers.serving.answers import answers
from helpers.serving.server import ROOT, serving

GOLDEN = json.loads((Path(__file__).parent / "answers.json").read_text())
# What Python imports by itself at its start, in every process of a server.
NO_TORCH = """
import importlib.abc
import sys


class Refused(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Refused())
"""


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of the environment of a process that cannot import torch, whether or not it is installed."""
    folder = tmp_path_factory.mktemp("no-torch")
    (folder / "sitecustomize.py").write_text(NO_TORCH)
    paths = [folder, *(ROOT / part for part in ("pyworkers", "kernels", "tests"))]
    return {"PYTHONPATH": os.pathsep.join(map(str, paths))}


def drafting(path: Path) -> Path:
    """The tiny model as a deepseek_v3, with a layer that drafts."""
    llama = tiny_llama(path / "llama", intermediate_size=1088)
    head = tiny_mtp_head(path / "head.safetensors", llama, ffn=640)
    out = path / "deepseek"
    out.mkdir()
    plan(SafetensorsCheckpoint(llama), head=head).write(out, lambda *_: None)
    return out


SERVED: dict[str, tuple[Callable[[Path], Path], list[str]]] = {
    "llama": (tiny_llama, []),
    "llama in float32": (tiny_llama, ["--dtype", "float32"]),
    "llama in bfloat16": (tiny_llama, ["--dtype", "bfloat16"]),
    "deepseek": (drafting, []),
    "deepseek that drafts": (drafting, ["--mtp", "2"]),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SERVED)
def test_it_answers_as_with_torch(name: str, without_torch: dict[str, str], tmp_path: Path) -> None:
    make, flags = SERVED[name]
    with serving(str(make(tmp_path / "model")), *flags, env=without_torch) as server:
        found = answers(server)
    assert found == GOLDEN[name]


def run(*arguments: str, env: dict[str, str]) -> Any:
    return subprocess.run(
        [sys.executable, "-m", "headrace", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | env,
    )


@pytest.mark.parametrize(
    ("command", "what_for"),
    [
        ("worker --device cuda", "--device cuda"),
        ("fetch --for=serve --device=cuda", "--device cuda"),
        ("serve --device cuda", "--device cuda"),
    ],
)
def test_what_needs_torch_names_the_extra(
    command: str, what_for: str, without_torch: dict[str, str], tmp_path: Path
) -> None:
    ended = run(*command.split(), str(tiny_llama(tmp_path / "tiny")), env=without_torch)
    assert ended.returncode == EXIT_CONFIG
    assert (
        f"{what_for}: torch is not installed; run: pip install 'headrace[worker]'" in ended.stderr
    )
