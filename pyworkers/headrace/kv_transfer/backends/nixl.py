"""NIXL between hosts (`pip install "headrace[nixl]"`): the client reads the source's registered memory over RDMA, or
over what UCX finds instead.

Readiness, release and signs of life stay on our own connection; NIXL moves bytes and nothing else. Where a machine has
several networks, `UCX_NET_DEVICES` must name the one to use, or a transfer may hang until the pull's time is over.

A read in flight cannot be called back: after `release_xfer_handle` and `remove_remote_agent`, a peer that had stood
still went on to fill our memory (nixl 1.5.1, UCX over TCP). Only the end of the agent ends its reads. So each
connection has an agent of its own, and a read that has to stop, and does not end by itself at once, takes its
connection with it. The other way round, a source that stood still meanwhile may be ended by UCX itself once it goes on
("Fatal: unexpected error: Endpoint timeout"): to everybody else it was dead by then. Over shared memory and CMA, where
the source has no part in a read, neither was seen.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from headrace.errors import WireError
from headrace.kv_transfer.backends.base import LinkBroken, Move, StopWriting
from headrace.kv_transfer.backends.memory import check_sizes, runs
from headrace.kv_transfer.backends.shm import settled
from headrace.kv_transfer.peers.messages import MAX_HANDSHAKE_BYTES
from headrace.wire.schema import U32, U64, Schema

if TYPE_CHECKING:
    from headrace_kernels.ops import KvPool, KvRegion

log = logging.getLogger(__name__)

NAME: Final = "nixl"
POLL_S: Final = 0.0001  # NIXL tells nobody that a read is done
GRACE_S: Final = 0.25  # for a read that is not wanted any more: a living peer needs less


@dataclass(frozen=True, slots=True)
class NixlPart:
    """A region of the source's pool, in its own address space."""

    address: U64  # of block 0
    stride: U64
    nbytes: U64


@dataclass(frozen=True, slots=True)
class NixlPool:
    """The source's pool, and how its agent is reached."""

    agent: bytes
    memory: str  # DRAM or VRAM
    device: U32
    num_blocks: U32
    groups: list[list[NixlPart]]


SCHEMA: Final = Schema({1: ("pool", NixlPool)}, MAX_HANDSHAKE_BYTES)


def find_nixl() -> Any | None:
    """NIXL's Python interface, if it is installed and fits this machine."""
    try:
        nixl = importlib.import_module("nixl._api")
    except ImportError as error:
        if importlib.util.find_spec("nixl") is not None:
            log.warning("transfer: nixl is installed and does not work here: %s", error)
        return None
    # It writes to standard output; what it has to say goes where our own log goes.
    noisy = logging.getLogger("nixl")
    noisy.handlers.clear()
    noisy.propagate = True
    return nixl


def _agent(nixl: Any) -> Any:
    config = nixl.nixl_agent_config(backends=["UCX"])
    return nixl.nixl_agent(f"headrace-{secrets.token_hex(8)}", config)


class NixlExporter:
    """Registers the pool, for as long as it lives."""

    name = NAME
    in_band = False

    def __init__(self, nixl: Any, pool: KvPool) -> None:
        """Raises ValueError where NIXL cannot work with this memory."""
        kind, device, _ = _where(pool)
        try:
            self._agent = _agent(nixl)
            self._registered = _register(self._agent, pool)
        except Exception as error:  # NIXL's own have no closer base
            raise ValueError(f"NIXL cannot register {kind} memory here: {error}") from error
        groups = [
            [NixlPart(_address(r) + r.offset, r.stride, r.nbytes) for r in group]
            for group in pool.groups
        ]
        metadata = self._agent.get_agent_metadata()
        self._about = SCHEMA.encode(NixlPool(metadata, kind, device, pool.num_blocks, groups))

    def describe(self) -> tuple[bytes, list[int]]:
        return self._about, []

    def close(self) -> None:
        self._agent = self._registered = None


class NixlMover:
    """Reads segments from one source, one batch at a time, on a thread that may wait for it."""

    def __init__(self, nixl: Any, pool: KvPool, about: bytes) -> None:
        """Raises LinkBroken."""
        try:
            theirs: NixlPool = SCHEMA.decode(about)
        except WireError as error:
            raise LinkBroken(f"its pool: {error}") from error
        check_sizes([[part.nbytes for part in group] for group in theirs.groups], pool)
        self.num_blocks = theirs.num_blocks
        self._theirs = theirs
        self._kind, self._device, self._ours = _where(pool)
        self.broken: str | None = None
        self._agent: Any = None
        self._peer: Any = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="nixl")
        self._opening = self._thread.submit(self._open, nixl, pool)

    def _open(self, nixl: Any, pool: KvPool) -> None:
        """Takes half a second, so it is done off the event loop. What fails shows as an agent that has ended."""
        try:
            agent = _agent(nixl)
            _register(agent, pool)
            self._peer = agent.add_remote_agent(self._theirs.agent)
            self._agent = agent
        except Exception as error:  # NIXL's own have no closer base
            log.warning("transfer: no NIXL agent: %s", error)

    async def move(self, moves: list[Move], stop: StopWriting) -> None:
        await asyncio.shield(asyncio.wrap_future(self._opening))  # nothing is written yet
        reading = asyncio.get_running_loop().run_in_executor(self._thread, self._read, moves, stop)
        try:
            problem = await asyncio.shield(reading)
        finally:
            if not reading.done():
                stop.asked = True
                await settled(reading)
        if problem is not None:
            raise LinkBroken(problem)

    def _read(self, moves: list[Move], stop: StopWriting) -> str | None:
        """What went wrong. In that case the agent has ended: nothing may refer to it, such as a traceback."""
        if stop.asked:
            return None
        problem = self._try(moves, stop)
        if problem is not None:
            self.broken = problem
            self._agent = None
        return problem

    def _try(self, moves: list[Move], stop: StopWriting) -> str | None:
        if self._agent is None:
            return "its NIXL agent has ended"
        try:
            ours, theirs = self._descriptors(moves)
            handle = self._agent.initialize_xfer("READ", ours, theirs, self._peer)
            state = self._wait(handle, self._agent.transfer(handle), stop)
            if state != "DONE":
                return f"the NIXL read ended as {state}"
            self._agent.release_xfer_handle(handle)
        except Exception as error:  # NIXL's own have no closer base
            return f"NIXL: {str(error) or type(error).__name__}"
        return None

    def _wait(self, handle: Any, state: str, stop: StopWriting) -> str:
        give_up_s: float | None = None
        while state == "PROC":
            if stop.asked:
                now_s = time.monotonic()
                give_up_s = give_up_s or now_s + GRACE_S
                if now_s > give_up_s:
                    return "stopped"
            time.sleep(POLL_S)
            state = self._agent.check_xfer_state(handle)
        return state

    def _descriptors(self, moves: list[Move]) -> tuple[Any, Any]:
        ours: list[NDArray[np.uint64]] = []
        theirs: list[NDArray[np.uint64]] = []
        for move in moves:
            parts = zip(self._ours[move.group], self._theirs.groups[move.group], strict=True)
            for our, their in parts:
                ours.append(_rows(our, their, move.ours, move.theirs, move.ours, self._device))
                device = self._theirs.device
                theirs.append(_rows(their, our, move.theirs, move.theirs, move.ours, device))
        describe = self._agent.get_xfer_descs
        return (
            describe(np.concatenate(ours), self._kind),
            describe(np.concatenate(theirs), self._theirs.memory),
        )

    def close(self) -> None:
        self._thread.submit(self._end)
        self._thread.shutdown(wait=False)

    def _end(self) -> None:
        self._agent = None


def _rows(
    part: NixlPart, other: NixlPart, blocks: Any, theirs: Any, ours: Any, device: int
) -> NDArray[np.uint64]:
    """Descriptors (address, bytes, device); blocks side by side on both sides are one."""
    if part.stride == part.nbytes and other.stride == other.nbytes:
        spans = [(blocks[at], count) for at, count in runs(theirs, ours)]
    else:
        spans = [(block, 1) for block in blocks]
    rows = np.empty((len(spans), 3), np.uint64)
    firsts = np.array([first for first, _ in spans], np.uint64)
    counts = np.array([count for _, count in spans], np.uint64)
    rows[:, 0] = np.uint64(part.address) + firsts * np.uint64(part.stride)
    rows[:, 1] = counts * np.uint64(part.nbytes)
    rows[:, 2] = device
    return rows


def _where(pool: KvPool) -> tuple[str, int, list[list[NixlPart]]]:
    """Kind of memory, device, and the regions by address."""
    parts = [
        [NixlPart(_address(r) + r.offset, r.stride, r.nbytes) for r in group]
        for group in pool.groups
    ]
    memory = pool.groups[0][0].memory
    if pool.device == "cpu" or isinstance(memory, memoryview):
        return "DRAM", 0, parts
    return "VRAM", memory.device.index or 0, parts


def _address(region: KvRegion) -> int:
    """Of the first byte of its memory."""
    if isinstance(region.memory, memoryview):
        return np.frombuffer(region.memory, np.uint8).ctypes.data
    return region.memory.data_ptr()


def _register(agent: Any, pool: KvPool) -> Any:
    kind, device, _ = _where(pool)
    spans = {
        (_address(r), _size(r)): None for group in pool.groups for r in group
    }  # each memory once
    return agent.register_memory([(start, size, device, "") for start, size in spans], kind)


def _size(region: KvRegion) -> int:
    if isinstance(region.memory, memoryview):
        return region.memory.nbytes
    return region.memory.numel()
