"""What the ranks of a group pay to agree on a round, beside gloo and beside the bare sockets.

    python -m bench.ranks.agreement --out bench/results/ranks_agreement.json

agree        `RankGroup.agree`, on Unix sockets as on one machine and on TCP over loopback, with its signs of life
all_gather   gloo's collective for as many bytes
bare         as many bytes by `send` and `recv`, to rank 0 and back: the floor

Ranks are processes and come to each round together; ways take turns. A time is that of the rank whose median of the
turn is longest: `best` is the quietest turn, `p50` and `p99` are of the rounds of all turns. CPU time is that of all
ranks together, a round.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.helpers import report
from headrace.engine.step.lockstep import RankLoad
from headrace.worker.parallel import messages
from headrace.worker.parallel.control import ControlLink
from headrace.worker.parallel.group import RankGroup

WAYS = ("agree, Unix sockets", "agree, TCP", "all_gather, gloo", "bare, Unix sockets", "bare, TCP")
LOAD = RankLoad(rows=3, prompt_tokens=2, context_tokens=70)
LOAD_BYTES = len(messages.load(1, LOAD).packed())
TIMEOUT_S = 60.0

Links = Mapping[int, socket.socket]
"""By rank: rank 0 has one to each other rank, these have one to rank 0."""


@dataclass(frozen=True, slots=True)
class Sockets:
    """What one rank dials or is dialled by."""

    unix: Links
    tcp: Links
    bare_unix: Links
    bare_tcp: Links


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    for end in (near, far):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return near, far


def star(ranks: int, pair: Callable[[], tuple[socket.socket, socket.socket]]) -> list[Links]:
    pairs = {rank: pair() for rank in range(1, ranks)}
    of_rank_0: Links = {rank: near for rank, (near, _) in pairs.items()}
    return [of_rank_0, *({0: far} for _, far in pairs.values())]


def agree_on(rank: int, ranks: int, links: Links) -> Callable[[], None]:
    group = RankGroup(
        rank,
        ranks,
        {other: ControlLink(one) for other, one in links.items()},
        timeout_s=TIMEOUT_S,
    )
    group.show_life()
    return lambda: _agree(group)


def _agree(group: RankGroup) -> None:
    group.agree(LOAD)


def gather(rank: int, ranks: int, ports: Connection) -> Callable[[], None]:
    """`ports` brings the port of the store that rank 0 keeps, and takes it from rank 0."""
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        ports.send(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", ports.recv(), None, is_master=False)
    group: Any = dist.ProcessGroupGloo(store, rank, ranks)
    mine = torch.zeros(LOAD_BYTES, dtype=torch.uint8)
    everyones = [[torch.zeros_like(mine) for _ in range(ranks)]]

    def run() -> None:
        group.allgather(everyones, [mine]).wait()

    return run


def bare(ranks: int, links: Links) -> Callable[[], None]:
    load, loads = bytes(LOAD_BYTES), bytes(LOAD_BYTES * ranks)
    if 0 in links:
        to_0 = links[0]

        def follow() -> None:
            to_0.sendall(load)
            to_0.recv(len(loads), socket.MSG_WAITALL)

        return follow

    def lead() -> None:
        for one in links.values():
            one.recv(len(load), socket.MSG_WAITALL)
        for one in links.values():
            one.sendall(loads)

    return lead


def serve(rank: int, ranks: int, sockets: Sockets, pipe: Connection) -> None:
    """One rank: the microseconds of each round of a turn, and its CPU time, again and again."""
    torch.set_num_threads(1)
    runs = {
        "all_gather, gloo": gather(rank, ranks, pipe),
        "agree, Unix sockets": agree_on(rank, ranks, sockets.unix),
        "agree, TCP": agree_on(rank, ranks, sockets.tcp),
        "bare, Unix sockets": bare(ranks, sockets.bare_unix),
        "bare, TCP": bare(ranks, sockets.bare_tcp),
    }
    pipe.send("ready")
    while (task := pipe.recv()) is not None:
        way, rounds = task
        run = runs[way]
        run()  # the ranks meet
        times: list[float] = []
        cpu_s = time.process_time()
        for _ in range(rounds):
            began = time.perf_counter()
            run()
            times.append((time.perf_counter() - began) * 1e6)
        pipe.send((times, (time.process_time() - cpu_s) / rounds * 1e6))


class Ranks:
    """A group of processes. They inherit their sockets, so nothing of torch may run in this process before."""

    def __init__(self, ranks: int) -> None:
        context = multiprocessing.get_context("fork")
        stars = [star(ranks, pair) for pair in (socket.socketpair, tcp_pair) * 2]
        self._processes: list[tuple[Any, Connection]] = []
        for rank in range(ranks):
            unix, tcp, bare_unix, bare_tcp = (links[rank] for links in stars)
            sockets = Sockets(unix=unix, tcp=tcp, bare_unix=bare_unix, bare_tcp=bare_tcp)
            ours, theirs = context.Pipe()
            arguments = (rank, ranks, sockets, theirs)
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            self._processes.append((process, ours))
        port = self._processes[0][1].recv()
        for _, pipe in self._processes[1:]:
            pipe.send(port)
        assert {pipe.recv() for _, pipe in self._processes} == {"ready"}

    def turn(self, way: str, rounds: int) -> tuple[list[float], float]:
        """The microseconds of each round on the rank whose median is longest, and the CPU time of all ranks."""
        for _, pipe in self._processes:
            pipe.send((way, rounds))
        answers = [pipe.recv() for _, pipe in self._processes]
        slowest = max((times for times, _ in answers), key=statistics.median)
        return slowest, sum(cpu_us for _, cpu_us in answers)

    def close(self) -> None:
        for process, pipe in self._processes:
            pipe.send(None)
            process.join(TIMEOUT_S)
            process.kill()  # one that waits for a rank which is gone


def measure(ranks: int, turns: int, rounds: int) -> dict[str, Any]:
    group = Ranks(ranks)
    took: dict[str, list[tuple[list[float], float]]] = {way: [] for way in WAYS}
    for number in range(turns):
        for way in WAYS if number % 2 else WAYS[::-1]:
            took[way].append(group.turn(way, rounds if "gloo" not in way else rounds // 10))
    group.close()
    figures: dict[str, Any] = {}
    for way, of_turns in took.items():
        of_rounds = sorted(us for times, _ in of_turns for us in times)
        figures[way] = {
            "us": {
                "best": min(statistics.median(times) for times, _ in of_turns),
                "p50": statistics.median(of_rounds),
                "p99": of_rounds[int(0.99 * len(of_rounds))],
            },
            "cpu_us": statistics.median(cpu_us for _, cpu_us in of_turns),
        }
        print(f"{ranks} ranks, {way}: {figures[way]}")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--rounds", type=int, default=500, help="of a turn; of gloo a tenth")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = {str(ranks): measure(ranks, args.turns, args.rounds) for ranks in (2, 4, 8)}
    figures = {"turns": args.turns, "rounds": args.rounds, "ranks": found}
    report.write(args.out, report.rounded(figures))


if __name__ == "__main__":
    main()
