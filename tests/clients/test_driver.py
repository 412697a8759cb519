"""The driver of the clients, without any client: what stands in the table, and that each client has its script."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from clients.__main__ import BEGIN, END, FEATURES, KINDS, PAGE, SCRIPTS, Outcome, table, write
from clients.answers import ANSWERS

CLIENTS = json.loads((Path(__file__).parent / "clients.json").read_text())


def test_a_row_says_what_passed_failed_or_was_not_tried() -> None:
    row = {"feature": "chat", "result": "pass", "detail": ""}
    tried = Outcome("a", ["a==1"], {"chat": row, "tools": row | {"result": "fail"}})
    absent = Outcome("b", ["b@2"], problem="Node is not on this machine")
    lines = table([tried, absent]).splitlines()
    assert lines[0].split(" | ")[1:3] == ["chat", "stream"]
    assert lines[2].startswith("| a (a==1) | yes |  | **no** |")
    assert lines[3].startswith("| b (b@2) | not run: Node is not on this machine |")
    assert {line.count("|") for line in lines} == {len(FEATURES) + 2}
    assert tried.failed() == ["tools"]
    assert not tried.passed()
    assert not absent.passed(), "what was not run did not pass"
    assert not Outcome("c", ["c==3"]).passed(), "nor did what tried nothing"
    assert Outcome("d", ["d==4"], {"chat": row}).passed()


def test_the_table_takes_the_place_of_the_last_one(tmp_path: Path) -> None:
    page = tmp_path / "api.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write(page, "new")
    assert page.read_text() == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    page.write_text("no markers")
    with pytest.raises(AssertionError, match="has no"):
        write(page, "new")
    assert PAGE.read_text().count(BEGIN) == PAGE.read_text().count(END) == 1


@pytest.mark.parametrize("name", CLIENTS)
def test_every_client_is_pinned_and_has_a_script(name: str) -> None:
    client = CLIENTS[name]
    assert all(re.search(r"(==|@)\d", package) for package in client["packages"])
    assert set(client) <= {"packages", "node", *KINDS}
    scripts = [SCRIPTS / kind / client[kind] for kind in KINDS if kind in client]
    assert scripts
    for script in scripts:
        named = re.findall(r'feature\("([a-z ]+)"', script.read_text())
        assert named
        assert set(named) <= set(FEATURES)


def test_only_the_last_answer_has_no_condition() -> None:
    assert ["when" in answer for answer in ANSWERS] == [True] * (len(ANSWERS) - 1) + [False]


def test_every_script_is_run_and_structured_answers_come_from_a_model() -> None:
    """A mock answers with an object whatever the request says."""
    for kind in KINDS:
        run = {client[kind] for client in CLIENTS.values() if kind in client}
        assert {script.name for script in (SCRIPTS / kind).iterdir() if script.is_file()} == run
        says = [(SCRIPTS / kind / script).read_text() for script in run]
        structured = [text for text in says if 'feature("structured"' in text]
        assert bool(structured) == (kind == "model")
