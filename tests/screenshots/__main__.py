"""`make screenshots`: mock workers under a mixed load, as the router's page and `headrace top` show them.

PYTHONPATH=tests python -m screenshots

The page goes to docs/dashboard.png, the text between two marks of docs/operations.md. That takes some 70 s, as the
curves of the page have a point a second.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.helpers import page as documents
from helpers.serving import browser
from helpers.serving.browser import Page
from helpers.serving.server import ROOT, Running, Server, eventually
from helpers.tools import chromium

COMMAND = "screenshots"
PICTURE, TEXT = ROOT / "docs/dashboard.png", ROOT / "docs/operations.md"
WIDTH, HEIGHT = 1440, 1330
MOST_BYTES = 300_000
TERMINAL_LINES = 40
CURVE_S = 60  # of the five minutes that a curve has room for
ANSWERS = 1024  # as many as percentiles are of
GIVE_UP_S = 300.0

ROUTER = "router --port 0 --worker-listen 127.0.0.1:0 --worker-queue-ms 500"
# By the name of its model: its workers. The costs of the small one are a guess.
FLEET = {
    "DeepSeek-R1": "--name r1- --prefill 2 --decode 3 --accepted 1.7",
    "DeepSeek-R1-ep": "--name ep- --workers 4 --ep 4",
    "SmolLM2-135M-Instruct": "--name small- --workers 1 --cost 8,0.2,0,0.3,0",
}
WORKERS = 10
# Streams: long prompts that share their beginnings, and longer ones of the class low, some of which wait in the router;
# short answers of a group of ranks; small chats, which end while their placement is still among the last ones.
LOADS = (
    "--model DeepSeek-R1 --rate 6 --prompt-tokens 4200 --shared-prefix 3000 --prefixes 12 --max-tokens 320",
    "--model DeepSeek-R1 -c 10 --prompt-tokens 9000 --shared-prefix 6000 --prefixes 4 --max-tokens 100 --priority 10",
    "--model DeepSeek-R1-ep -c 24 --prompt-tokens 900 --shared-prefix 600 --prefixes 8 --max-tokens 96",
    "--model SmolLM2-135M-Instruct --rate 12 --prompt-words 30 --max-tokens 16 --chat",
)
UNTIL_ENDED = "--seed 1 --requests 1000000"
# Whether the page shows all of it: workers, curves, percentiles, a queue, placements that are over and some that are
# not; and stands still, as bars take a moment to grow.
SHOWS = """(() => {
  const number = (node) => Number(node.textContent.replace(/\\D/g, ""));
  const all = (selector) => document.querySelectorAll(selector).length;
  const outcomes = (which) => all(`#decisions tr:nth-child(-n+9) .outcome.${which}`);
  return all(".tile.ready") === %d
    && document.querySelector("#tokens .first").getAttribute("d").split("L").length >= %d
    && number(document.getElementById("finished")) >= %d
    && number(document.getElementById("classes").lastChild) > 0
    && outcomes("finished") > 1 && outcomes("running") > 1
    && document.getAnimations().length === 0;
})()"""


def main() -> int:
    try:
        text = show(PICTURE)
    except pytest.skip.Exception as lacking:  # said as to a test
        print(f"screenshots: {lacking}", file=sys.stderr)
        return 1
    documents.write(COMMAND, f"```text\n{text}\n```", TEXT)
    print(f"{text}\n\n{PICTURE.relative_to(ROOT)}: {PICTURE.stat().st_size:,} bytes")
    return 0


def show(picture: Path, *, curve_s: int = CURVE_S, answers: int = ANSWERS) -> str:
    """Write the picture as soon as the page shows the load; what `headrace top` prints then.

    Raises AssertionError where a process ends before its time, a request fails, the page complains or never shows all.
    """
    program = chromium()
    with ExitStack() as ended:
        running = loaded_fleet(ended)
        router = running[0]
        page = ended.enter_context(browser.page(program))
        page.screen(WIDTH, HEIGHT)
        page.open(f"{router.url}/")
        wait_until(page, SHOWS % (WORKERS, curve_s, answers), running)
        page.screenshot(picture)
        text = top(router.url)  # while the page looks, so that rates are of the last second
        assert page.text("#failed") == "0", router.tail()
        assert page.complaints == []
    size = picture.stat().st_size
    assert size < MOST_BYTES, f"{picture} has {size:,} bytes"
    return text


def loaded_fleet(ended: ExitStack) -> tuple[Server, *tuple[Running, ...]]:
    """The router, its workers and those who ask it; all of them end with `ended`."""
    router = Server(*ROUTER.split())
    ended.callback(router.close)
    line = router.wait_line(r"headrace-router: (http:\S+) for clients, (\S+) for workers")
    router.set_url(line[1])
    commands = [
        f"mock --router {line[2]} --model {model} {flags}" for model, flags in FLEET.items()
    ]
    commands += [f"bench load --target {router.url} {flags} {UNTIL_ENDED}" for flags in LOADS]
    others: list[Running] = []
    for command in commands:
        others.append(Running(*command.split()))
        ended.callback(others[-1].close)
    return router, *others


def wait_until(page: Page, condition: str, running: Sequence[Running]) -> None:
    """Return as soon as the page meets the condition."""

    def met() -> bool:
        for one in running:
            assert one.process.poll() is None, one.tail()
        return page.evaluate(condition)

    eventually(met, lambda: f"the page shows {page.text('main')!r}", GIVE_UP_S)


def top(url: str) -> str:
    """One look, as much of it as a terminal has room for."""
    once = Running("top", "--once", "--url", url)
    try:
        assert once.wait() == 0, once.tail()
        return "\n".join(fitted([line.rstrip() for line in once.lines[:-1]], TERMINAL_LINES))
    finally:
        once.close()


def fitted(lines: list[str], height: int) -> list[str]:
    """What does not fit is counted in the last line, as on a terminal."""
    if len(lines) <= height:
        return lines
    return [*lines[: height - 1], f"... {len(lines) - height + 1} more lines"]


if __name__ == "__main__":
    sys.exit(main())
