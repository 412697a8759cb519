"""A router under attack: the process and its memory, workers without a model behind it, the probe beside it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attack.wire import Reply

ROOT = Path(__file__).resolve().parents[2]
START_S = 60.0
STEP_MS = 20.0
RSS_EVERY_S = 0.02
GONE = "gone"


@dataclass(frozen=True, slots=True)
class Programs:
    """What is attacked and what stands beside it: how their commands begin."""

    router: tuple[str, ...]
    bench: tuple[str, ...]

    @classmethod
    def built(cls, folder: Path) -> Programs:
        """The standalone binaries."""
        return cls((str(folder / "headrace-router"),), (str(folder / "headrace-bench"),))

    @classmethod
    def installed(cls) -> Programs:
        """The commands of the installed package."""
        headrace = (sys.executable, "-m", "headrace")
        return cls((*headrace, "router"), headrace)


@dataclass(slots=True)
class Router:
    """A router process. `peak_mb` is the most memory that it held since `forget_peak`."""

    process: subprocess.Popen[str]
    host: str
    port: int
    socket: str
    peak_mb: float = 0.0

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def rss_mb(self) -> float:
        """Resident memory now, and as a side effect the peak."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
            now = pages * os.sysconf("SC_PAGESIZE") / 2**20
            self.peak_mb = max(self.peak_mb, now)
            return now
        return 0.0

    @property
    def kernel_peak_mb(self) -> float:
        """The highest resident memory since the start, as the kernel counted it."""
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{self.pid}/status").read_text()
            if found := re.search(r"VmHWM:\s+(\d+) kB", status):
                return int(found[1]) / 1024
        return 0.0

    def cpu_s(self) -> float:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return 0.0

    def end(self, within_s: float = 15.0) -> float | None:
        """Seconds from SIGTERM to the end; None if it had to be killed."""
        began = time.monotonic()
        if self.alive:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(within_s)
            return time.monotonic() - began
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.close()

    def close(self) -> None:
        """Gone, whatever it is at."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def start_router(
    programs: Programs,
    folder: Path,
    flags: Sequence[str] = (),
    *,
    stderr: int | None = None,
    wrapper: Sequence[str] = (),
    env: dict[str, str] | None = None,
) -> Router:
    """A router that listens on a free port and on a Unix socket for its workers. Its log goes to `stderr` or a file."""
    socket = str(folder / "workers.sock")
    own = (
        []
        if any(flag.startswith("--worker-listen") for flag in flags)
        else [f"--worker-listen=unix:{socket}"]
    )
    with (folder / "router.log").open("a") as log:
        process = subprocess.Popen(
            [*wrapper, *programs.router, "--port=0", *own, *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log if stderr is None else stderr,
            text=True,
            env=os.environ | (env or {}),
        )
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"http://([^ ]+):(\d+) for clients, (\S+) for workers", line)
    if found is None:
        process.kill()
        process.wait()
        process.stdout.close()
        raise RuntimeError(f"the router did not start: {line!r}; see {folder}/router.log")
    return Router(process, found[1], int(found[2]), found[3])


def start_workers(
    programs: Programs,
    router: Router,
    doc: Path | None,
    *,
    count: int = 2,
    step_ms: float = STEP_MS,
    prefill_ms: float = 0.0,
    name: str = "w",
    flags: Sequence[str] = (),
) -> subprocess.Popen[bytes]:
    """Workers without a model: real protocol, steps of `step_ms` and more for each prompt token, room for everybody."""
    cost = ["--cost", f"{step_ms},{prefill_ms},0,0,0", "--noise", "0"]
    room = ["--sequences", "8192", "--batched-tokens", "65536", "--waiting", "65536"]
    pool = ["--block-tokens", "16", "--blocks", "262144"]
    return subprocess.Popen(
        [
            *(*programs.bench, "mock", "--router", router.socket, "--workers", str(count)),
            "--step-prior",  # so that what is predicted does not change from request to request
            *("--name", name, *cost, *room, *pool),
            *([] if doc is None else ["--doc", str(doc)]),
            *flags,
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@contextlib.contextmanager
def sink(folder: Path) -> Generator[Router]:
    """A program that only reads, at addresses like those of a router."""
    path = folder / "sink.sock"
    process = subprocess.Popen(
        [sys.executable, "-m", "helpers.serving.sink", str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT / "tests",
    )
    assert process.stdout is not None
    reads = Router(process, "127.0.0.1", 0, f"unix:{path}")
    try:
        reads.port = int(process.stdout.readline())
        yield reads
    finally:
        reads.close()
        path.unlink(missing_ok=True)


async def until_ready(router: Router) -> None:
    """Wait until a worker takes work."""
    give_up = time.monotonic() + START_S
    while time.monotonic() < give_up:
        status = await asyncio.to_thread(status_of, router, "/ready")
        if status == "200":
            return
        if not router.alive:
            break
        await asyncio.sleep(0.05)
    raise RuntimeError("the router did not become ready")


def status_of(router: Router, path: str, timeout_s: float = 5.0) -> str:
    """Status of a GET, or why there is none."""
    import http.client

    connection = http.client.HTTPConnection(router.host, router.port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        with connection.getresponse() as answer:
            return str(answer.status)
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__
    finally:
        connection.close()


def with_template(doc: Path, template: str) -> Path:
    """The description of the same model with another chat template."""
    described = json.loads(doc.read_bytes()) | {"chat_template": template}
    other = doc.with_name(f"template-{hashlib.sha256(template.encode()).hexdigest()[:8]}.json")
    other.write_text(json.dumps(described))
    return other


@dataclass(slots=True)
class Others:
    """What the probe saw between two moments."""

    gaps_ms: list[float] = field(default_factory=list[float])
    firsts_ms: list[float] = field(default_factory=list[float])
    failures: list[str] = field(default_factory=list[str])


@dataclass(slots=True)
class Stack:
    """All of it."""

    router: Router
    programs: Programs
    model: str
    folder: Path
    doc: Path
    _probe: subprocess.Popen[str] | None = None

    def begin_probe(self) -> None:
        self._probe = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "attack.probe",
                f"{self.router.host}:{self.router.port}",
                self.model,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT / "tests",
        )

    async def newcomer(self, tenant: str = "somebody-else") -> tuple[Reply, float]:
        """A short request that the probe sends as this tenant, and its seconds."""
        assert (
            self._probe is not None
            and self._probe.stdin is not None
            and self._probe.stdout is not None
        )
        print(tenant, file=self._probe.stdin, flush=True)
        line = await asyncio.to_thread(self._probe.stdout.readline)
        status, body, took = json.loads(line)
        return Reply(status, body.encode()), took

    def end_probe(self) -> dict[str, Any]:
        assert self._probe is not None
        text, _ = self._probe.communicate(timeout=30)
        return json.loads(text)


def others_between(seen: dict[str, Any], times: Sequence[tuple[float, float]]) -> Others:
    """Requests that began, and tokens that came, in one of these times; and the wait for what came after it."""
    others = Others()
    for begin, end in times:
        others.gaps_ms += [ms for at, ms in seen["gaps"] if at >= begin and at - ms / 1e3 < end]
        others.firsts_ms += [ms for at, ms in seen["firsts"] if begin <= at < end]
        others.failures += [why for at, why in seen["failures"] if begin <= at < end]
    return others


@contextlib.asynccontextmanager
async def stack(
    programs: Programs,
    model: str,
    doc: Path,
    flags: Sequence[str] = (),
    **options: Any,
) -> AsyncGenerator[Stack]:
    """Router and two workers, ready; gone at the end."""
    with tempfile.TemporaryDirectory(prefix="attack-") as name:
        folder = Path(name)
        router = start_router(programs, folder, flags, **options)
        watch = asyncio.create_task(_watch(router))
        workers = start_workers(programs, router, doc, flags=["--model", model])
        try:
            await until_ready(router)
            yield Stack(router, programs, model, folder, doc)
        finally:
            watch.cancel()
            router.end()
            workers.terminate()
            workers.wait(10)


async def _watch(router: Router) -> None:
    while True:
        _ = router.rss_mb
        await asyncio.sleep(RSS_EVERY_S)
