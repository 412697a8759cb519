"""The text in the documents is one of `headrace top`, and the command that writes it shows a load."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.helpers import page as documents
from screenshots.__main__ import COMMAND, MOST_BYTES, PICTURE, TEXT, WORKERS, fitted, show


def test_the_document_has_the_text_between_its_marks() -> None:
    text = documents.split(TEXT.read_text(), COMMAND)[1]
    assert text.startswith("```text\nup ") and text.endswith("\n```")
    assert f"{WORKERS} of {WORKERS} workers ready" in text
    assert PICTURE.stat().st_size < MOST_BYTES


def test_lines_that_do_not_fit_are_counted() -> None:
    lines = [str(number) for number in range(5)]
    assert fitted(lines, 5) == lines
    assert fitted(lines, 4) == ["0", "1", "2", "... 2 more lines"]


@pytest.mark.thorough
def test_it_shows_a_load(tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    text = show(picture, curve_s=3, answers=50)
    assert f"{WORKERS} of {WORKERS} workers ready" in text and ", 0 failed" in text
    assert picture.read_bytes().startswith(b"\x89PNG")
