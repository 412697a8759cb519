"""The documents name files, functions and headings that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
STOP = re.compile(r"`([\w./-]+\.(?:rs|py)):(\w+)`")
SKELETON = re.compile(r"^\| ● `([\w./-]+):\w+`", re.MULTILINE)
PATH = re.compile(r"`((?:router|pyworkers|kernels|bench|bindings|tests|docs)/[\w./-]+)`")


def prose(document: Path) -> str:
    """The text without its blocks of code."""
    return FENCE.sub("", document.read_text())


def anchors(document: Path) -> set[str]:
    """The names that a Git host gives to headings."""
    headings = re.findall(r"^#+ (.+)$", prose(document), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in plain}


def missing_links(document: Path) -> list[str]:
    missing: list[str] = []
    for target in LINK.findall(prose(document)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path) if path else document
        known = file.exists() and (not anchor or anchor in anchors(file))
        missing += [] if known else [target]
    return missing


def defines(file: Path, name: str) -> bool:
    word = "def|class" if file.suffix == ".py" else "fn|struct|enum|trait"
    return re.search(rf"\b(?:{word}) {name}\b", file.read_text()) is not None


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    assert missing_links(document) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_paths_exist(document: Path) -> None:
    named = [path for path, _ in STOP.findall(document.read_text())]
    named += PATH.findall(prose(document))
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_tour_stops_at_functions_that_exist() -> None:
    stops = STOP.findall((ROOT / "docs/one-request.md").read_text())
    assert len(stops) > 50
    assert [f"{path}:{name}" for path, name in stops if not defines(ROOT / path, name)] == []


def test_the_skeleton_of_a_request_is_read_in_an_afternoon() -> None:
    files = set(SKELETON.findall((ROOT / "docs/one-request.md").read_text()))
    assert 20 <= len(files) <= 28
    assert sum(len((ROOT / path).read_text().splitlines()) for path in files) <= 6_520


@pytest.mark.parametrize(("name", "lines"), [("README.md", 150), ("ARCHITECTURE.md", 200)])
def test_the_first_documents_stay_short(name: str, lines: int) -> None:
    assert len((ROOT / name).read_text().splitlines()) <= lines
