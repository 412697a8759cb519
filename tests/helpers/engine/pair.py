"""Two engines that hand KV over: blocks are copied between their pools when a test says so, without any transport."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import count

from headrace.engine.cache.kv_export import KvExport
from headrace.engine.cache.kv_import import KvImport
from headrace.engine.engine import Engine
from headrace.engine.result import StepResult
from headrace.engine.sequence import Key
from headrace.wire.frames import Failed, KvFrom, KvTransfer, Output, Submit, TokenLogprob
from helpers.kv.block_copy import copy_block
from helpers.kv.pull_keys import PULL_KEY

KV_FROM = KvFrom(worker="p", transfer=["none"], timeout_ms=1000, pull_key=PULL_KEY)


@dataclass
class Heard:
    """What the client of one request hears, over all its legs."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    first: Output | None = None
    drafts: list[tuple[int, int]] = field(default_factory=list)  # of each output: drafted, accepted
    finish: str | None = None
    failed: Failed | None = None
    freed: int | None = None

    def hear(self, result: StepResult, request: int) -> None:
        for answers in result.answers.values():
            for output in answers.outputs:
                if output.request == request:
                    assert self.finish is None, "an output after the last one"
                    self.first = self.first or output
                    self.ids += output.ids
                    self.logprobs += output.logprobs or []
                    self.drafts.append((output.drafted, output.accepted))
                    self.finish = output.finish
            for failed in answers.failed:
                if failed.request == request:
                    self.failed = failed
            for freed in answers.freed:
                if freed.request == request:
                    assert self.freed is None, "freed twice"
                    self.freed = freed.blocks


def move(source: Engine, export: KvExport, to: Engine, pull: KvImport) -> None:
    """Copy what is wanted, group by group; all of it has to be whole by now."""
    here, there = source.model.kv_pool(), to.model.kv_pool()
    for place, block in pull.wanted:
        for group in range(len(here.groups)):
            assert export.ready(place, group)
            copy_block(here, export.blocks[place], there, block, group)
    assert not export.revoked


REQUESTS = count(1)


def split(prefill: Engine, decode: Engine, submit: Submit) -> Heard:
    """One request in two legs, nothing else going on on either side."""
    p, d = next(REQUESTS), next(REQUESTS)
    heard = Heard()
    legs = legs_of(submit, p, d)
    prefill.submit(legs[0])
    decode.submit(legs[1])
    while not prefill.idle:
        heard.hear(prefill.step(), p)
        prefill.check()
    if heard.finish is not None:
        assert decode.cancel(Key(0, d)) == 0
        return heard
    [export] = prefill.kv_exports.take()
    decode.kv_imports.ticket(Key(0, d), b"t")
    decode.step()
    [pull] = decode.kv_imports.take_pulls()
    move(prefill, export, decode, pull)
    assert prefill.released(Key(0, p)) == len(export.blocks)
    assert decode.kv_imports.ended(Key(0, d), arrived=True) is None
    decode.go_on(Key(0, d), list(heard.ids))
    while not decode.idle:
        heard.hear(decode.step(), d)
        decode.check()
    for engine in (prefill, decode):
        assert engine.empty
        engine.check_idle()
    return heard


def unsplit(engine: Engine, submit: Submit) -> Heard:
    """The same on one engine."""
    heard = Heard()
    engine.submit(submit)
    while not engine.idle:
        heard.hear(engine.step(), submit.request)
    return heard


def legs_of(submit: Submit, p: int, d: int) -> tuple[Submit, Submit]:
    return (
        replace(submit, request=p, kv_transfer=KvTransfer(1000, PULL_KEY)),
        replace(submit, request=d, kv_from=KV_FROM),
    )
