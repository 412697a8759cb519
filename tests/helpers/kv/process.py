"""A source or a puller as a process of its own, on uvloop: `python -m helpers.kv.process source|pull ...`.

It says what happens, a word a line, and a source does what it is told on its standard input.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

import uvloop

from headrace.kv_transfer.backends.base import TransferError
from headrace.kv_transfer.peers.client import TransferClient
from headrace.kv_transfer.peers.server import TransferServer
from helpers.kv.peers import LAYOUT, MEMBERS, PATIENT
from helpers.kv.pools import FakeSource, make_pool
from helpers.kv.pull_keys import PULL_KEY, bound


def say(*words: object) -> None:
    print(*words, flush=True)


class TalkingSource(FakeSource):
    """Says when it is asked for the first time, and how the pull ended."""

    def ready(self, place: int, group: int) -> bool:
        if not self.asked:
            say("asked")
        return super().ready(place, group)


async def source(backend: str, seed: int, layer_bytes: int) -> None:
    """Blocks 0 to 7; `all` on its input makes them ready, before that only the first group of the first is."""
    pool = make_pool(seed=seed, layer_bytes=layer_bytes)
    server = TransferServer(pool, LAYOUT, members=MEMBERS, backends=[backend], limits=PATIENT)
    await server.start()
    blocks = TalkingSource(blocks=range(8), done={(0, 0)})
    ended = asyncio.Event()

    def end(word: str) -> None:
        say(word)
        ended.set()

    ticket = server.offer(blocks, PULL_KEY, lambda: end("released"), lambda: end("failed"))
    say(ticket.hex(), *server.endpoints)
    loop = asyncio.get_running_loop()
    if await loop.run_in_executor(None, sys.stdin.readline) == "all\n":
        blocks.done = None
        server.wake()
    await ended.wait()
    await server.close()


async def pull(endpoint: str, ticket: bytes, seed: int) -> None:
    """Blocks 0 to 7 to where they are there, and whether they are those of the seed."""
    ours = make_pool()
    client = TransferClient(ours, LAYOUT, members=MEMBERS, limits=PATIENT)
    try:
        await client.pull([endpoint], bound(ticket), [(n, n) for n in range(8)], timeout_s=30)
    except TransferError as error:
        say(error.kind)
    else:
        half = 8 * ours.block_bytes
        theirs = make_pool(seed=seed).groups[0][0].memory
        say("equal" if ours.groups[0][0].memory[:half] == theirs[:half] else "different")
    await client.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    a_source = commands.add_parser("source")
    a_source.add_argument("backend")
    a_source.add_argument("seed", type=int)
    a_source.add_argument("layer_bytes", type=int)
    a_pull = commands.add_parser("pull")
    a_pull.add_argument("endpoint")
    a_pull.add_argument("ticket")
    a_pull.add_argument("seed", type=int)
    args = parser.parse_args()
    if args.command == "source":
        uvloop.run(source(args.backend, args.seed, args.layer_bytes))
    else:
        uvloop.run(pull(args.endpoint, bytes.fromhex(args.ticket), args.seed))


if __name__ == "__main__":
    main()
