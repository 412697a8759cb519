"""How fast KV blocks move between two processes of this machine, beside memcpy and a plain Python socket.

    python -m bench.transfer.bandwidth --out bench/results/transfer.json

A source process has a pool and computed blocks in it; this process pulls them into its own pool, in an order in which
blocks lie as in a pool that has been used for a while. Ways take turns, so that a busy machine is busy for all; what is
reported is the best turn. `memcpy` copies as many bytes between two such pools
inside this process. `socket` sends them over loopback TCP with `sendall`, receives with `recv_into`, in pieces as large
as ours, from one buffer into another, without checksum or protocol. CPU seconds are those of both processes.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import mmap
import os
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import uvloop

from bench.helpers.report import ROOT, write
from headrace.kv_transfer.backends.base import BoundTicket
from headrace.kv_transfer.backends.nixl import find_nixl
from headrace.kv_transfer.peers.client import TransferClient
from headrace.kv_transfer.peers.members import Members
from headrace.kv_transfer.peers.server import TransferServer
from headrace.kv_transfer.peers.server_link import FRAME_BYTES
from headrace.wire.frames import PULL_KEY_BYTES
from headrace_kernels.ops import KvPool, KvRegion

MIB = 1 << 20
POOL_SHARE = 1.25  # a pool has a quarter more blocks than the largest pull takes
GROUPS = 4
LAYOUT = "bench-1"
PULL_KEY = bytes(PULL_KEY_BYTES)
MEMBERS = Members([bytes(32)])
TURNS = {1: 10, 16: 6, 256: 1}  # MiB: in one round, so that each size has about as much time
BLOCKS = (64 << 10, 1 << 20)  # bytes
SMALL_BLOCK = 64 << 10
SMALL_PULLS = 50


def make_pool(pool_bytes: int, block_bytes: int, fill: int) -> KvPool:
    """Blocks one after the other, all of whose memory has been touched."""
    memfd = os.memfd_create("bench-pool")
    os.ftruncate(memfd, pool_bytes)
    memory = memoryview(mmap.mmap(memfd, pool_bytes))
    np.frombuffer(memory, np.uint8)[:] = fill
    part = block_bytes // GROUPS
    return KvPool(
        num_blocks=pool_bytes // block_bytes,
        block_bytes=block_bytes,
        groups=[
            [KvRegion(memory=memory, stride=block_bytes, offset=group * part, nbytes=part)]
            for group in range(GROUPS)
        ],
        device="cpu",
        memfd=memfd,
    )


def memory_of(pool: KvPool) -> memoryview:
    return cast(memoryview, pool.groups[0][0].memory)


def shuffled(num_blocks: int, seed: int) -> list[int]:
    blocks = list(range(num_blocks))
    random.Random(seed).shuffle(blocks)
    return blocks


# --- the source process ---


@dataclass(frozen=True, slots=True)
class Computed:
    """Blocks that are ready."""

    blocks: list[int]
    revoked: bool = False

    def ready(self, place: int, group: int) -> bool:  # noqa: ARG002
        return True


def send_plain(listener: socket.socket, memory: memoryview) -> None:
    """As many bytes as each request names, again and again."""
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while request := sock.recv(8):
        size = int.from_bytes(request, "little")
        for start in range(0, size, FRAME_BYTES):
            sock.sendall(memory[start : min(size, start + FRAME_BYTES)])


async def source(pool_bytes: int, block_bytes: int, backends: list[str]) -> None:
    """Answers each line on its input, a number of blocks, with a ticket for as many."""
    pool = make_pool(pool_bytes, block_bytes, fill=7)
    servers = [
        TransferServer(pool, LAYOUT, members=MEMBERS, backends=[backend]) for backend in backends
    ]
    for server in servers:
        await server.start()
    listener = socket.create_server(("127.0.0.1", 0))
    memory = memory_of(pool)
    threading.Thread(target=send_plain, args=(listener, memory), daemon=True).start()
    print(listener.getsockname()[1], *(server.endpoints[0] for server in servers), flush=True)
    blocks = shuffled(pool.num_blocks, seed=1)
    loop = asyncio.get_running_loop()
    while text := await loop.run_in_executor(None, sys.stdin.readline):
        which, count = map(int, text.split())
        ticket = servers[which].offer(Computed(blocks[:count]), PULL_KEY, lambda: None)
        print(ticket.hex(), flush=True)
    for server in servers:
        await server.close()


# --- the measuring process ---


class Ways:
    """Every way to move bytes, and what a run of it takes."""

    def __init__(self, pool_bytes: int, block_bytes: int, backends: list[str]) -> None:
        self.block_bytes = block_bytes
        self.backends = backends
        self.pool = make_pool(pool_bytes, block_bytes, fill=1)
        self.other = make_pool(pool_bytes, block_bytes, fill=2)
        self.targets = shuffled(self.pool.num_blocks, seed=2)
        self.client = TransferClient(self.pool, LAYOUT, members=MEMBERS)
        sizes = (str(pool_bytes), str(block_bytes))
        self.child = subprocess.Popen(
            [sys.executable, "-m", "bench.transfer.bandwidth", "--source", *sizes, *backends],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        port, *self.endpoints = self._answer().split()
        self.plain = socket.create_connection(("127.0.0.1", int(port)))

    def _answer(self) -> str:
        assert self.child.stdout is not None
        return self.child.stdout.readline()

    async def close(self) -> None:
        await self.client.close()
        self.plain.close()
        assert self.child.stdin is not None
        self.child.stdin.close()
        self.child.wait()

    def ticket(self, backend: str, count: int) -> bytes:
        assert self.child.stdin is not None
        self.child.stdin.write(f"{self.backends.index(backend)} {count}\n")
        self.child.stdin.flush()
        return bytes.fromhex(self._answer())

    def cpu_s(self) -> float:
        """Of both processes; Linux has a clock for each."""
        return time.process_time() + time.clock_gettime((~self.child.pid << 3) | 2)

    async def timed(self, move: Callable[[], Awaitable[None] | None]) -> tuple[float, float]:
        """Seconds, and CPU seconds."""
        cpu_s, began_s = self.cpu_s(), time.perf_counter()
        done = move()
        if done is not None:
            await done
        return time.perf_counter() - began_s, self.cpu_s() - cpu_s

    async def run(self, way: str, size: int) -> tuple[float, float]:
        if way == "memcpy":
            theirs, ours = (np.frombuffer(memory_of(p), np.uint8) for p in (self.other, self.pool))
            return await self.timed(lambda: np.copyto(ours[:size], theirs[:size]))
        if way == "socket":
            return await self.timed(lambda: self._receive_plain(size))
        count = size // self.block_bytes
        ticket = self.ticket(way, count)
        wanted = list(enumerate(self.targets[:count]))
        endpoint = self.endpoints[self.backends.index(way)]

        async def pull() -> None:
            pulled = await self.client.pull(
                [endpoint], BoundTicket(ticket, PULL_KEY), wanted, timeout_s=60
            )
            assert (pulled.backend, pulled.bytes) == (way, size)

        return await self.timed(pull)

    def _receive_plain(self, size: int) -> None:
        memory = memory_of(self.pool)
        self.plain.sendall(size.to_bytes(8, "little"))
        rest = memory[:size]
        while rest:
            rest = rest[self.plain.recv_into(rest[:FRAME_BYTES]) :]


def best(way: str, runs: list[tuple[float, float]], size: int) -> dict[str, Any]:
    seconds = min(seconds for seconds, _ in runs)
    cpu_s = min(cpu_s for _, cpu_s in runs)
    return {
        "way": way,
        "gb_per_s": round(size / seconds / 1e9, 3),
        "ms": round(seconds * 1e3, 3),
        "median_ms": round(statistics.median(seconds for seconds, _ in runs) * 1e3, 3),
        "cpu_s_per_gb": round(cpu_s / size * 1e9, 3),
    }


async def take_turns(
    bench: Ways, ways: list[str], sizes: list[int], rounds: int
) -> dict[tuple[str, int], list[tuple[float, float]]]:
    runs: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for number in range(rounds + 1):  # the first connects and touches, and does not count
        for size in sizes:
            for _ in range(TURNS[size // MIB]):
                for way in ways:
                    took = await bench.run(way, size)
                    if number:
                        runs.setdefault((way, size), []).append(took)
    return runs


async def take_small_turns(bench: Ways, way: str) -> dict[str, Any]:
    pulls = sorted([(await bench.run(way, SMALL_BLOCK))[0] for _ in range(SMALL_PULLS)])
    best_us, median_us = pulls[0] * 1e6, pulls[SMALL_PULLS // 2] * 1e6
    return {"way": way, "best_us": round(best_us, 1), "median_us": round(median_us, 1)}


async def measure(sizes_mib: list[int], rounds: int, with_nixl: bool) -> dict[str, Any]:
    """NIXL comes after the others, in processes of its own: its threads poll, and would cost the others a core."""
    phases = [["shm", "tcp"], ["nixl"]] if with_nixl else [["shm", "tcp"]]
    ways = ["memcpy", "socket", *(way for phase in phases for way in phase)]
    cases: list[dict[str, Any]] = []
    small: list[dict[str, Any]] = []
    sizes = [size * MIB for size in sizes_mib]
    pool_bytes = math.ceil(max(sizes) * POOL_SHARE / max(BLOCKS)) * max(BLOCKS)
    for block_bytes in BLOCKS:
        runs: dict[tuple[str, int], list[tuple[float, float]]] = {}
        for phase in phases:
            bench = Ways(pool_bytes, block_bytes, phase)
            beside = ["memcpy", "socket"] if phase is phases[0] else []
            runs |= await take_turns(bench, [*beside, *phase], sizes, rounds)
            if block_bytes == SMALL_BLOCK:
                small += [await take_small_turns(bench, way) for way in [*beside[1:], *phase]]
            await bench.close()
        for size in sizes:
            figures = [best(way, runs[way, size], size) for way in ways]
            speed = {figure["way"]: figure["gb_per_s"] for figure in figures}
            for figure in figures:
                figure["of_memcpy"] = round(figure["gb_per_s"] / speed["memcpy"], 3)
                figure["of_socket"] = round(figure["gb_per_s"] / speed["socket"], 3)
            cases.append({"mib": size // MIB, "block_kib": block_bytes >> 10, "ways": figures})
    return {"rounds": rounds, "groups": GROUPS, "cases": cases, "one_block_of_64_kib": small}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, nargs="+", choices=list(TURNS), default=list(TURNS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--source", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.source:
        pool_bytes, block_bytes, *backends = args.source
        uvloop.run(source(int(pool_bytes), int(block_bytes), backends))
        return
    with_nixl = find_nixl() is not None
    if not with_nixl:
        print("NIXL is not installed: its rows are left out", file=sys.stderr)
    figures = uvloop.run(measure(args.mib, args.rounds, with_nixl))
    write(args.out, figures)


if __name__ == "__main__":
    main()
