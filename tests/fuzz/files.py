"""What Python reads of others' making: headers of checkpoints, events of a server. Read, or refused by name."""

from __future__ import annotations

import io
import json
import random
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import gguf

from fuzz.mutate import mutated
from headrace.cli.client.chat import Answer, Chat, ChatError
from headrace.models.config import ModelFileError
from headrace.models.load.gguf import GgufCheckpoint
from headrace.models.load.safetensors_file import SafetensorsFile
from helpers.models.tiny_gguf import tiny_gguf
from helpers.models.tiny_model import tiny_llama

# A header of some kilobytes may take this much, whatever lengths it names.
MEMORY_BYTES = 1 << 30
ONE_S = 5.0


@dataclass(frozen=True, slots=True)
class Target:
    """`read` gets one input; exceptions other than `errors` are faults, and so are 5 s or 1 GiB."""

    name: str
    seeds: Sequence[bytes]
    read: Callable[[bytes], None]
    errors: tuple[type[Exception], ...]


class TooSlow(Exception):
    """One input took longer than ONE_S."""


class Fault(Exception):
    """An input that a target stumbles over; the input is in `data`."""

    def __init__(self, target: str, number: int, data: bytes, error: BaseException) -> None:
        super().__init__(f"{target}, input {number}: {type(error).__name__}: {error}")
        self.data = data


@contextmanager
def targets() -> Generator[list[Target]]:
    """All of them. Their files are in a folder that lives as long."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = tiny_llama(folder / "tiny")
        kinds = gguf.GGMLQuantizationType
        ggufs = [
            tiny_gguf(folder / f"{kind.name}.gguf", source, kind).read_bytes()
            for kind in (kinds.F32, kinds.Q8_0)
        ]
        file = folder / "input"

        def safetensors(data: bytes) -> None:
            file.write_bytes(data)
            read = SafetensorsFile(file)
            for entry in read.entries:
                read.tensor(entry)
                read.sample(entry)

        def gguf_file(data: bytes) -> None:
            named = file.with_suffix(".gguf")
            named.write_bytes(data)
            checkpoint = GgufCheckpoint(named)
            for tensor in checkpoint.names():
                checkpoint.sample(tensor)
            _ = checkpoint.doc

        weights = sorted(source.glob("*.safetensors"))
        yield [
            Target(
                "safetensors", [w.read_bytes() for w in weights], safetensors, (ModelFileError,)
            ),
            Target("gguf", ggufs, gguf_file, (ModelFileError,)),
            Target("events", _events(), _say, (ChatError,)),
        ]


def _events() -> list[bytes]:
    """Streams as the router writes them: a whole answer, and one that fails."""
    first = {"choices": [{"index": 0, "delta": {"content": "Hi"}, "finish_reason": None}]}
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    details = {"cached_tokens": 1}
    counts = {"completion_tokens": 1, "prompt_tokens": 2, "prompt_tokens_details": details}
    usage = {"choices": [], "usage": counts}
    error = {"error": {"message": "no", "code": "x"}}
    whole = [json.dumps(event) for event in (first, last, usage)] + ["[DONE]"]
    failed = [json.dumps(event) for event in (first, error)]
    return ["".join(f"data: {line}\n\n" for line in lines).encode() for lines in (whole, failed)]


def _say(data: bytes) -> None:
    class Server:
        def request(self, *_: Any) -> io.BytesIO:
            return io.BytesIO(data)

    chat = Chat(cast(Any, Server()), "m")
    for _ in chat.say("Hello", Answer()):
        pass


@contextmanager
def bounded() -> Generator[None]:
    """This process may take MEMORY_BYTES more than it has, and `signal.setitimer` ends what takes too long."""

    def late(*_: object) -> None:
        raise TooSlow

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES, hard))
    before = signal.signal(signal.SIGALRM, late)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def run(target: Target, *, seed: int, seconds: float, inputs: int | None = None) -> tuple[int, int]:
    """Inputs until the time or their number is used up: how many there were, and how many were refused.

    Raises Fault for the first one that was neither read nor refused.
    """
    rng = random.Random(f"{seed} {target.name}")
    count = refused = 0
    until = time.monotonic() + seconds
    with bounded():
        while time.monotonic() < until and (inputs is None or count < inputs):
            data = mutated(target.seeds, rng)
            count += 1
            signal.setitimer(signal.ITIMER_REAL, ONE_S)
            try:
                target.read(data)
            except target.errors:
                refused += 1
            except (Exception, MemoryError) as error:
                raise Fault(target.name, count, data, error) from error
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    return count, refused
