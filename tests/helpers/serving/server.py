"""Real servers for end-to-end tests: start `headrace`, wait for what it says, talk to it, stop it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from headrace.worker.device import choose_device

if TYPE_CHECKING:
    import openai

ROOT = Path(__file__).parents[3]
START_S = 240.0  # 8 s on a quiet machine; others may use it too
T = TypeVar("T")


class Running:
    """A `headrace` process and the lines it printed so far."""

    def __init__(
        self,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        program: Sequence[str] = (sys.executable, "-m", "headrace"),
        stderr: int = subprocess.STDOUT,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Lines of `stderr` are read only where it goes the way of standard output."""
        paths = [str(ROOT / part) for part in ("pyworkers", "kernels", "tests")]
        paths += filter(None, [os.environ.get("PYTHONPATH")])
        self.process = subprocess.Popen(
            [*program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
            pass_fds=pass_fds,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | dict(env or {}),
        )
        self.lines: list[str] = []
        self._more = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._more:
                self.lines.append(line.rstrip("\n"))
                self._more.notify_all()
        with self._more:
            self.lines.append("<end of output>")
            self._more.notify_all()

    def wait_line(self, pattern: str, *, times: int = 1, timeout: float = START_S) -> re.Match[str]:
        """The `times`-th line that matches, as soon as it is printed."""

        def found() -> re.Match[str] | None:
            matches = (re.search(pattern, line) for line in self.lines)
            hits = [match for match in matches if match is not None]
            return hits[times - 1] if len(hits) >= times else None

        with self._more:
            self._more.wait_for(
                lambda: found() is not None or self.lines[-1:] == ["<end of output>"], timeout
            )
            match = found()
        assert match is not None, f"no line matches {pattern!r}:\n{self.tail()}"
        return match

    def tail(self, count: int = 60) -> str:
        return "\n".join(self.lines[-count:])

    def wait(self, timeout: float = 60.0) -> int:
        """Exit status, once the process has ended."""
        try:
            status = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end:\n{self.tail()}") from None
        self._reader.join(timeout)
        return status

    def close(self) -> None:
        """End it and everything below it, whatever state it is in."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                for child in psutil.Process(self.process.pid).children(recursive=True):
                    child.kill()
                self.process.kill()
        self.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole HTTP answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]


class Server(Running):
    """`headrace serve` or `headrace router`, reachable at `url`."""

    def __init__(
        self,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        program: Sequence[str] = (sys.executable, "-m", "headrace"),
        stderr: int = subprocess.STDOUT,
    ) -> None:
        super().__init__(*arguments, env=env, program=program, stderr=stderr)
        self.host, self.port, self.url = "127.0.0.1", 0, ""
        self._client: openai.OpenAI | None = None

    def wait_ready(self) -> None:
        self.set_url(self.wait_line(r"Headrace is ready after .* s: (\S+)")[1])

    def set_url(self, url: str) -> None:
        self.url = url
        self.port = int(url.rsplit(":", 1)[1])

    @property
    def client(self) -> openai.OpenAI:
        """One for all tests: a client that nobody closes warns whenever the garbage collector finds its sockets."""
        if self._client is None:
            import openai  # takes a second, and few tests talk through it

            self._client = openai.OpenAI(
                base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=120
            )
        return self._client

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        super().close()

    @property
    def async_client(self) -> openai.AsyncOpenAI:
        import openai

        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=120
        )

    @property
    def model(self) -> str:
        return self.get("/v1/models").json["data"][0]["id"]

    def get(self, path: str) -> Reply:
        return self.send("GET", path)

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Reply:
        """`body` is sent as it is when it is bytes, otherwise as JSON."""
        return self.send("POST", path, body, headers)

    def send(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=120)
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            head = {"Content-Type": "application/json"} | dict(headers or {})
            connection.request(method, path, data, head)
            answer = connection.getresponse()
            names = {name.lower(): value for name, value in answer.getheaders()}
            return Reply(answer.status, names, answer.read())
        finally:
            connection.close()

    @contextmanager
    def stream(self, path: str, body: dict[str, Any]) -> Generator[Iterator[str]]:
        """The `data:` of each server-sent event, as text, until the server closes or we leave."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=120)
        try:
            connection.request(
                "POST",
                path,
                json.dumps({"stream": True} | body),
                {"Content-Type": "application/json", "Connection": "close"},
            )
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            with answer:
                yield (line[5:].strip().decode() for line in answer if line.startswith(b"data:"))
        finally:
            connection.close()

    def workers(self) -> dict[str, dict[str, Any]]:
        return {worker["id"]: worker for worker in self.get("/workers").json["workers"]}

    def children(self) -> list[psutil.Process]:
        """Router and workers, and whatever they started."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def worker_process(self, name: str) -> psutil.Process:
        """The process of a supervised worker."""
        for child in self.children():
            if f"--name={name}" in child.cmdline():
                return child
        raise AssertionError(f"no process is {name}:\n{self.tail()}")

    @contextmanager
    def frozen(self, name: str) -> Generator[psutil.Process]:
        """A worker that takes frames and answers none, until the block ends."""
        process = self.worker_process(name)
        process.suspend()
        try:
            yield process
        finally:
            with suppress(psutil.NoSuchProcess):
                process.resume()

    @contextmanager
    def stopped(self) -> Generator[None]:
        """The process itself stands still, not what it started, until the block ends."""
        process = psutil.Process(self.process.pid)
        process.suspend()
        try:
            yield
        finally:
            with suppress(psutil.NoSuchProcess):
                process.resume()

    def wait_idle(self, timeout: float = 60.0) -> None:
        """Wait until no worker holds a request or a block for one."""
        eventually(
            lambda: all(
                (w["running"], w["waiting"], w["blocks_used"]) == (0, 0, 0)
                for w in self.workers().values()
            ),
            lambda: f"not idle: {self.workers()}",
            timeout,
        )


@contextmanager
def serving(
    model: str | None, *flags: str, env: Mapping[str, str] | None = None
) -> Generator[Server]:
    """`headrace serve` on a free port, ready."""
    if "--kv-memory" not in flags and choose_device("auto") == "cuda":
        flags += (
            "--kv-memory",
            "4GiB",
        )  # the first of several servers would take the GPU for itself
    server = Server("serve", *([] if model is None else [model]), "--port", "0", *flags, env=env)
    try:
        server.wait_ready()
        yield server
    finally:
        server.close()


def eventually(
    condition: Callable[[], T], otherwise: Callable[[], str], timeout: float = 60.0
) -> T:
    """Poll for what no event tells, and return the first true value."""
    give_up_at = time.monotonic() + timeout
    pause = threading.Event()
    while not (value := condition()):
        assert time.monotonic() < give_up_at, otherwise()
        pause.wait(0.02)
    return value
