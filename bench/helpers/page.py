"""Parts of documents that a command makes: they stand between two marks, of which the first one names the command."""

from __future__ import annotations

from pathlib import Path

from bench.helpers.report import ROOT

PAGE = ROOT / "docs/benchmarks.md"
END = "<!-- end -->"
NOTHING = "Not measured yet: there is no result."


def begin(command: str) -> str:
    """The first mark."""
    return f"<!-- begin: python -m {command} -->"


def put(page: str, command: str, text: str) -> str:
    """The page with `text` between the marks of a command."""
    before, _, after = split(page, command)
    return f"{before}{begin(command)}\n\n{text.strip()}\n\n{END}{after}"


def split(page: str, command: str) -> tuple[str, str, str]:
    """What stands before the marks of a command, between them, and after them."""
    before, mark, rest = page.partition(begin(command))
    text, end, after = rest.partition(END)
    if not mark or not end:
        raise SystemExit(f"{PAGE.name} has not both marks, {begin(command)} and {END}")
    return before, text.strip(), after


def write(command: str, text: str, page: Path = PAGE) -> None:
    """The same in the file."""
    page.write_text(put(page.read_text(), command, text))
