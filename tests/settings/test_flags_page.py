"""docs/flags.md is what the tables say."""

from __future__ import annotations

from pathlib import Path

from helpers.flags_page import page


def test_the_page_of_flags_is_current() -> None:
    written = (Path(__file__).parents[2] / "docs/flags.md").read_text()
    command = "cd tests && python -m helpers.flags_page > ../docs/flags.md"
    assert written == page(), f"write it again: {command}"
