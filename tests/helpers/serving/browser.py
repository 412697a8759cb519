"""A headless Chromium, driven over a pipe by its own protocol: no driver, no port, no package."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FIRST_FREE_FD = 10  # above those that the browser is given, which are 3 and 4
ANSWER_S = 60.0
# Puts the two ends where `--remote-debugging-pipe` has them.
LAUNCHER = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); "
    "os.execv(sys.argv[3], sys.argv[3:])"
)
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # root has none
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)

Message = dict[str, Any]


class Page:
    """One page, with all that it asked for and complained of."""

    def __init__(self, program: Path, profile: str) -> None:
        to_browser, from_browser = os.pipe(), os.pipe()
        theirs = [
            fcntl.fcntl(fd, fcntl.F_DUPFD, FIRST_FREE_FD) for fd in (to_browser[0], from_browser[1])
        ]
        self._out, self._in = to_browser[1], from_browser[0]
        launch = [sys.executable, "-c", LAUNCHER, *map(str, theirs), str(program)]
        self._process = subprocess.Popen(
            [*launch, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=theirs,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (*theirs, to_browser[0], from_browser[1]):
            os.close(fd)
        self._numbers = itertools.count(1)
        self._rest = b""
        self._session: str | None = None
        self.complaints: list[str] = []  # errors of scripts, and what the page's policy forbade
        self.asked: list[str] = []  # URLs
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Message:
        """The result of a command of the protocol."""
        number = next(self._numbers)
        message: Message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + ANSWER_S
        while True:
            answer = self._message(deadline)
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression, once it is there if it is a promise."""
        told = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in told, f"{expression}: {told['exceptionDetails']}"
        return told["result"].get("value")

    def until(self, condition: str) -> Any:
        """The first value of an expression that is true."""
        look = (
            "new Promise(done => { const look = () => { let found; try { found = (%s); } catch { found = null; } "
            "if (found) done(found); else setTimeout(look, 20); }; look(); })"
        )
        return self.evaluate(look % condition)

    def text(self, selector: str) -> str:
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent")

    def screen(self, width: int, height: int, scheme: str = "light", scale: float = 1) -> None:
        """How large the window is, and whether the system is dark."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        os.close(self._out)  # it ends with its pipe
        os.close(self._in)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _message(self, deadline: float) -> Message:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(deadline - time.monotonic(), 0))
            assert ready, "the browser does not answer"
            more = os.read(self._in, 1 << 20)
            assert more, "the browser ended"
            self._rest += more
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def _note(self, event: Message) -> None:
        told = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(told["exceptionDetails"]))
            case "Log.entryAdded" if told["entry"]["level"] == "error":
                entry = told["entry"]
                self.complaints.append(f"{entry['text']} {entry.get('url', '')}")
            case "Network.requestWillBeSent":
                self.asked.append(told["request"]["url"])
            case _:
                pass


@contextmanager
def page(program: Path) -> Generator[Page]:
    """A page in a browser of its own."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        opened = Page(program, profile)
        try:
            yield opened
        finally:
            opened.close()
