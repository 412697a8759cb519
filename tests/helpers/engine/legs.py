"""The two legs of a request, each on an engine over the toy model."""

from __future__ import annotations

from headrace.engine.cache.kv_export import KvExport
from headrace.engine.engine import Engine
from headrace.engine.sequence import Key
from headrace.wire.frames import Submit
from helpers.engine.pair import Heard, legs_of, unsplit
from helpers.engine.toy import ToyModel, make_submit
from helpers.engine.toy_engine import engine_on

BLOCK = 4
P, D = Key(0, 1), Key(0, 2)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]  # three blocks, the last one full in part


def make_engine(
    *, blocks: int = 64, sequences: int = 8, batched: int = 16, waiting: int = 100
) -> Engine:
    return engine_on(
        ToyModel(), blocks=blocks, sequences=sequences, batched=batched, max_waiting=waiting
    )


def legs(submit: Submit | None = None) -> tuple[Submit, Submit]:
    return legs_of(submit or make_submit(0, PROMPT), P.request, D.request)


def exported(engine: Engine, submit: Submit | None = None) -> tuple[KvExport, Heard]:
    """An export whose first token is out."""
    engine.submit(legs(submit)[0])
    heard = Heard()
    while not engine.idle:
        heard.hear(engine.step(), P.request)
        engine.check()
    [export] = engine.kv_exports.take()
    return export, heard


def reserved(engine: Engine, submit: Submit | None = None) -> list[tuple[int, int]]:
    """An arriving request that has its blocks; what it wants."""
    engine.submit(legs(submit)[1])
    engine.kv_imports.ticket(D, b"t")
    engine.step()
    engine.check()
    [pull] = engine.kv_imports.take_pulls()
    assert pull.key == D
    return pull.wanted


def run(engine: Engine, request: int = D.request, heard: Heard | None = None) -> Heard:
    heard = heard or Heard()
    while not engine.idle:
        heard.hear(engine.step(), request)
        engine.check()
    return heard


def truth(submit: Submit | None = None) -> list[int]:
    return unsplit(make_engine(), submit or make_submit(0, PROMPT)).ids
