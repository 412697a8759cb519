"""Files of configuration, and an environment that says nothing of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Write = Callable[[str], Path]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONFIG", "LOG", "SECRET", "API_KEY", "ADMIN_KEY"):
        monkeypatch.delenv(f"HEADRACE_{name}", raising=False)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        path = tmp_path / "f.toml"
        path.write_text(text)
        return path

    return write
