"""The named steps in the life of a request inside a real worker.

The product has no hooks: its functions are wrapped here, from outside, before the worker starts. A function that is not
there any more stops the worker at once with its name.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import struct
from collections.abc import Callable
from typing import Any

from chaos.inside.seams import Seams


def install(seams: Seams) -> None:
    """Wrap engine, links and transfer. Before the worker is made."""
    _install_intake(seams)
    _install_compute(seams)
    _install_links(seams)
    _install_prefill(seams)
    _install_decode(seams)


def wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    """Replace `owner.name` by `around(original, self, ...)`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, wrapped)


def _install_intake(seams: Seams) -> None:
    """A request comes, gets its blocks, and gives them back."""
    from headrace.engine.admission import Admission
    from headrace.engine.cache.kv_import import KvImports
    from headrace.engine.engine import Engine
    from headrace.engine.requests import Requests

    reach, tell = seams.reach, seams.control.send

    def init(original: Any, engine: Any, *args: Any, **kwargs: Any) -> None:
        original(engine, *args, **kwargs)
        seams.engine = engine

    def submit(original: Any, engine: Any, submit: Any, **kwargs: Any) -> None:
        seed = submit.sampling.seed
        resumed = 0 if submit.resume is None else len(submit.resume.generated) // 4
        reach("submit", seed)
        if resumed:
            reach("resumed", seed)
        original(engine, submit, **kwargs)
        tell(event="leg", seed=seed, resumed=resumed)
        if resumed:
            seams.to_begin.add(seed)

    def take_blocks(original: Any, admission: Any, sequence: Any, *args: Any) -> Any:
        result = original(admission, sequence, *args)
        reach("admitted", _seed(sequence))
        return result

    def ended(sequence: Any) -> None:
        tell(event="end", seed=_seed(sequence), generated=len(sequence.generated))

    def end(original: Any, requests: Any, sequence: Any) -> Any:
        blocks = original(requests, sequence)
        if blocks is not None:
            ended(sequence)
        return blocks

    def moved(original: Any, imports: Any, key: Any, **kwargs: Any) -> Any:
        """The mover has stopped: only now blocks of a request that ended are free."""
        sequence = imports._pulls[key]
        leaving = sequence in imports.leaving
        if not leaving:
            reach("released", _seed(sequence))
        blocks = original(imports, key, **kwargs)
        if leaving:
            ended(sequence)
        return blocks

    wrap(Engine, "__init__", init)
    wrap(Engine, "submit", submit)
    wrap(Admission, "_take_blocks", take_blocks)
    wrap(Requests, "end", end)
    wrap(KvImports, "ended", moved)


def _install_compute(seams: Seams) -> None:
    """Prompts are computed chunk by chunk, tokens one by one, or several where they were drafted."""
    from headrace.engine.outputs import OutputBuilder
    from headrace.engine.step.forward import Forward

    reach = seams.reach

    def launch(original: Any, forward: Any, order: Any) -> Any:
        for item in order.work:
            seed, generated = _seed(item.sequence), item.start + 1 - item.sequence.prompt_len
            if item.count > 1 or generated < 1:
                reach("computing", seed)
            elif generated == 1:
                reach("first decode step", seed)
            else:
                reach("decode", seed)
        read = original(forward, order)
        for item in order.work:
            if not item.chooses:
                reach("chunk", _seed(item.sequence))
        return read

    def tokens(original: Any, outputs: Any, chosen: Any, sits: Any, result: Any) -> None:
        here = outputs._requests.get
        rows = [row for row in chosen if here(row.sequence.key) is row.sequence]
        for row in rows:
            if row.sequence.total >= row.sequence.limit:
                reach("last step", _seed(row.sequence))
        original(outputs, chosen, sits, result)
        for row in rows:
            seed = _seed(row.sequence)
            if seed in seams.to_begin:
                seams.to_begin.discard(seed)
                seams.control.send(event="began", seed=seed)
            generated = len(row.sequence.generated)
            for number in range(generated - len(row.ids) + 1, generated + 1):
                if number == 1:
                    reach("first token", seed)
                reach(f"token {number}", seed)

    wrap(Forward, "launch", launch)
    wrap(OutputBuilder, "tokens", tokens)


def _install_links(seams: Seams) -> None:
    """What goes to the routers, and the connections there."""
    from headrace.wire.connection import Connection
    from headrace.wire.frames import Step
    from headrace.wire.link import Session

    connections: list[tuple[Any, asyncio.AbstractEventLoop]] = []

    def made(original: Any, connection: Any, transport: Any) -> None:
        original(connection, transport)
        open_ones = [pair for pair in connections if not pair[0].is_closing()]
        connections[:] = [*open_ones, (transport, asyncio.get_running_loop())]

    def cut() -> None:
        for transport, loop in connections:
            loop.call_soon_threadsafe(_reset, transport)

    async def send(original: Any, session: Any, *frames: Any) -> None:
        await original(session, *frames)
        for frame in frames:
            if isinstance(frame, Step) and frame.outputs:
                seams.reach("token sent", None)
                if any(output.cached_tokens is not None for output in frame.outputs):
                    seams.reach("first token sent", None)

    seams.cut = cut
    wrap(Connection, "connection_made", made)
    wrap(Session, "send", send)


def _install_prefill(seams: Seams) -> None:
    """KV that others pull from here."""
    from headrace.engine.engine import Engine
    from headrace.kv_transfer.peers.offers import Serving
    from headrace.kv_transfer.peers.server import TransferServer

    def offer(original: Any, server: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        if (seed := _seed_of(seams, getattr(source, "key", None))) is not None:
            seams.reach("before ticket", seed)
        return original(server, source, *args, **kwargs)

    def next_extent(original: Any, serving: Any, *args: Any) -> Any:
        extent = original(serving, *args)
        if extent is not None:
            seams.reach(
                "segment served", _seed_of(seams, getattr(serving.offer.source, "key", None))
            )
        return extent

    def released(original: Any, engine: Any, key: Any) -> Any:
        if (seed := _seed_of(seams, key)) is not None:
            seams.reach("before freed", seed)
        return original(engine, key)

    wrap(TransferServer, "offer", offer)
    wrap(Serving, "next_extent", next_extent)
    wrap(Engine, "released", released)


def _install_decode(seams: Seams) -> None:
    """KV that comes from elsewhere, and the first token."""
    from headrace.engine.cache.kv_import import KvImports
    from headrace.engine.engine import Engine
    from headrace.kv_transfer.peers.client_link import ClientLink, Pulling
    from headrace.kv_transfer.peers.messages import Release

    def ticket(original: Any, kv_imports: Any, key: Any, ticket: bytes) -> None:
        seams.reach("ticket", _seed_of(seams, key))
        original(kv_imports, key, ticket)

    def take_pulls(original: Any, kv_imports: Any) -> Any:
        pulls = original(kv_imports)
        for pull in pulls:
            seams.reach("pull", _seed_of(seams, pull.key))
        return pulls

    def announce(original: Any, pulling: Any, message: Any) -> None:
        original(pulling, message)
        seams.reach("segment", _seed_of_blocks(seams, pulling.targets))

    def say(original: Any, link: Any, message: Any) -> None:
        if isinstance(message, Release) and (pulling := link._pulls.get(message.pull)):
            seams.reach("pulled", _seed_of_blocks(seams, pulling.targets))
        original(link, message)

    def go_on(original: Any, engine: Any, key: Any, *args: Any, **kwargs: Any) -> None:
        seams.reach("continue", _seed_of(seams, key))
        original(engine, key, *args, **kwargs)

    wrap(KvImports, "ticket", ticket)
    wrap(KvImports, "take_pulls", take_pulls)
    wrap(Pulling, "announce", announce)
    wrap(ClientLink, "_say", say)
    wrap(Engine, "go_on", go_on)


def _reset(transport: Any) -> None:
    if not transport.is_closing():
        linger = struct.pack("ii", 1, 0)  # an abort is a reset then
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        transport.abort()


def _seed(sequence: Any) -> int:
    return sequence.sampling.seed


def _seed_of(seams: Seams, key: Any) -> int | None:
    """Of a request by its key; None if it has ended."""
    sequence = seams.engine._requests.get(key)
    return None if sequence is None else _seed(sequence)


def _seed_of_blocks(seams: Seams, blocks: Any) -> int | None:
    """Of the request whose blocks these are."""
    wanted = set(blocks[:1])
    for sequence in seams.engine._requests.here.values():
        if wanted & set(sequence.blocks):
            return _seed(sequence)
    return None
