"""The dashboard in a real browser, before a real router with mock workers of every kind; and `headrace top`."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from pathlib import Path

import pytest

from headrace.cli import main
from helpers.serving import browser
from helpers.serving.browser import Page
from helpers.serving.fleet import ADMIN_KEY, CLIENT_KEY, Fleet, fleet_of_every_kind
from helpers.serving.server import eventually
from helpers.tools import chromium

WORKERS = 6  # of the fleet, ranks counted each


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Generator[Fleet]:
    with fleet_of_every_kind(tmp_path_factory.mktemp("fleet")) as running:
        yield running


@pytest.fixture
def page() -> Generator[Page]:
    with browser.page(chromium()) as opened:
        opened.screen(1440, 1000)
        yield opened


def opened_with_key(page: Page, fleet: Fleet) -> None:
    """The page, once it shows the fleet."""
    page.open(f"{fleet.router.url}/")
    page.until("!document.getElementById('key-form').hidden")
    page.evaluate(
        f"document.getElementById('key').value = '{ADMIN_KEY}', document.getElementById('key-form').requestSubmit(), 1"
    )
    page.until(f"document.querySelectorAll('.tile').length === {WORKERS}")


def test_it_asks_for_a_key_and_then_shows_the_fleet_and_asks_nobody_else(
    page: Page, fleet: Fleet
) -> None:
    page.open(f"{fleet.router.url}/")
    page.until("!document.getElementById('key-form').hidden")
    assert page.evaluate("document.querySelectorAll('.tile').length") == 0
    page.evaluate(
        "document.getElementById('key').value = 'wrong', document.getElementById('key-form').requestSubmit(), 1"
    )
    page.until("document.getElementById('key-wrong').textContent.includes('does not open')")
    opened_with_key(page, fleet)
    assert page.text("#state") == "live"
    assert re.fullmatch(r"\d of 6 workers ready", page.text("#workers"))
    names = page.evaluate("[...document.querySelectorAll('.tile h3')].map(one => one.title)")
    assert {"alone-0", "alone-1"} <= set(names)
    assert "2 of 2 ranks" in page.text("#groups")
    page.until("document.querySelectorAll('#decisions tr').length >= 3")
    page.until("document.querySelector('#tokens .first').getAttribute('d').length > 10")
    foreign = [url for url in page.asked if not url.startswith((fleet.router.url, "data:"))]
    assert foreign == []
    refused = [said for said in page.complaints if "401" not in said and "404" not in said]
    assert refused == [], "nor did its policy forbid anything"


def test_a_click_on_a_placement_explains_it(page: Page, fleet: Fleet) -> None:
    opened_with_key(page, fleet)
    name = "explained-<b>by-a-click</b>"
    assert fleet.complete("alone", {"X-Request-ID": name}) == 200
    page.until(
        f"[...document.querySelectorAll('#decisions button')].some(one => one.title === '{name}')"
    )
    page.evaluate(
        f"[...document.querySelectorAll('#decisions button')].find(one => one.title === '{name}').click(), 1"
    )
    page.until("document.querySelectorAll('.candidates tbody tr').length >= 2")
    assert page.evaluate("document.querySelectorAll('.candidates .winner').length") == 1
    assert page.text("#explanation-title") == name, "a name is text, whatever it looks like"
    assert page.evaluate("document.querySelectorAll('#explanation b').length") == 0
    assert "chose alone-" in page.text("#explanation-body")
    page.evaluate("document.getElementById('explanation-close').click(), 1")
    assert page.evaluate("document.getElementById('explanation').open") is False


def test_the_chat_streams_an_answer_with_the_key_that_was_typed(page: Page, fleet: Fleet) -> None:
    opened_with_key(page, fleet)
    page.until("document.querySelectorAll('#chat-model option').length === 3")
    say = (
        "document.getElementById('chat-model').value = 'alone',"
        "document.getElementById('chat-text').value = 'How high?',"
        "document.getElementById('chat-form').requestSubmit(), 1"
    )
    page.evaluate(say)
    page.until("document.querySelector('.message.failed .note')?.textContent.includes('API key')")
    page.evaluate(f"document.getElementById('chat-key').value = '{CLIENT_KEY}', 1")
    page.evaluate(say)
    page.until(
        "[...document.querySelectorAll('.message .note')].at(-1).textContent.includes('first token after')"
    )
    assert (
        page.evaluate("[...document.querySelectorAll('.message .words')].at(-1).textContent.length")
        > 0
    )


def test_light_and_dark_differ_and_a_phone_scrolls_in_one_direction(
    page: Page, fleet: Fleet
) -> None:
    opened_with_key(page, fleet)
    colour = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(colour)
    page.screen(1440, 1000, scheme="dark")
    assert page.evaluate(colour) != light
    page.evaluate("document.getElementById('theme').click(), 1")  # light, whatever the system is
    assert page.evaluate(colour) == light
    page.screen(390, 844)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
        "tables scroll by themselves"
    )


def test_top_shows_the_same_once_and_as_json(
    fleet: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "admin.key"
    key.write_text(ADMIN_KEY)
    words = ["top", "--once", "--url", fleet.router.url, "--admin-key-file", str(key)]
    assert fleet.complete("apart", {"X-Request-ID": "seen-by-top"}) == 200
    shown: list[str] = []

    def seen() -> bool:  # a document may be a second old
        assert main.main(words) == 0
        shown.append(capsys.readouterr().out)
        return "seen-by-top" in shown[-1]

    eventually(seen, lambda: shown[-1])
    text = shown[-1]
    assert "alone-0" in text and "\x1b" not in text
    assert re.search(r"group .*: 2 of 2 ranks", text)
    assert main.main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["workers_total"] == WORKERS
    assert main.main(["top", "--once", "--url", fleet.router.url]) == 1
    assert "the key comes from --admin-key-file" in capsys.readouterr().err
