"""Two engines under random traffic, random failures and random order of everything that may come in any order.

A mover writes garbage into the blocks of a pull until it is done, so a block that two hold shows as wrong tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.cache.kv_export import KvExport
from headrace.engine.cache.kv_import import KvImport
from headrace.engine.engine import Engine
from headrace.engine.result import StepResult
from headrace.engine.sequence import Key
from headrace.wire.frames import Sampling, Submit
from helpers.engine.drafting_toy import DraftingToy
from helpers.engine.pair import Heard, legs_of, unsplit
from helpers.engine.pipeline import Pipeline
from helpers.engine.toy import ToyModel, make_submit
from helpers.engine.toy_engine import engine_on
from helpers.kv.block_copy import copy_block

BLOCK = 4


def make_engine(
    blocks: int, sequences: int, batched: int, drafts: int = 0
) -> tuple[Engine, ToyModel]:
    model = DraftingToy(agreement=0.8, block_tokens=BLOCK) if drafts else ToyModel()
    engine = engine_on(model, blocks=blocks, sequences=sequences, batched=batched, mtp=drafts)
    return engine, model


@dataclass
class Request:
    """One request, what the router knows of it and what the movers do."""

    submit: Submit
    want: list[int]
    split: bool
    heard: Heard = field(default_factory=Heard)
    prefill_over: bool = False
    export: KvExport | None = None
    pull: KvImport | None = None
    told: bool = False  # Continue was sent
    cancelled: bool = False

    @property
    def p(self) -> Key:
        return Key(1, self.submit.request)

    @property
    def d(self) -> Key:
        return Key(0, self.submit.request)


class Scene:
    def __init__(self, data: st.DataObject) -> None:
        draw = data.draw
        self.data = data
        drafts = draw(st.integers(0, 3), "drafts")
        self.prefill, self.prefill_model = make_engine(
            draw(st.integers(12, 30), "p blocks"),
            draw(st.integers(1, 4)),
            draw(st.integers(4, 20)),
            drafts,
        )
        self.decode, self.decode_model = make_engine(
            draw(st.integers(14, 40), "d blocks"),
            draw(st.integers(1, 4)),
            draw(st.integers(4, 20)),
            drafts,
        )
        self.overlap = draw(st.booleans(), "steps overlap")
        self.prefill_line = Pipeline(self.prefill, self.one_of if self.overlap else None)
        self.decode_line = Pipeline(self.decode, self.one_of if self.overlap else None)
        self.requests: list[Request] = []
        self.now_s = 0.0
        self.turns = 0

    def one_of(self, count: int) -> int:
        return self.data.draw(st.integers(0, count - 1), "act")

    def chance(self, one_in: int) -> bool:
        return self.data.draw(st.integers(0, one_in - 1)) == 0

    def submit(self) -> None:
        draw, number = self.data.draw, len(self.requests)
        prompt = [draw(st.integers(0, 1))] * 5 + draw(
            st.lists(st.integers(0, 2), min_size=1, max_size=14)
        )
        submit = make_submit(
            number,
            prompt,
            max_tokens=draw(st.integers(1, 14)),
            sampling=Sampling(temperature=1.0, seed=number) if number % 2 else Sampling(),
            stop_ids=[5, 6, 7],
            priority=draw(st.integers(0, 1)),
        )
        whole = unsplit(make_engine(64, 1, 32)[0], submit).ids
        if len(whole) > 1 and self.chance(4):
            done = draw(st.integers(1, len(whole) - 1))
            submit = make_submit(
                number,
                prompt,
                max_tokens=submit.max_tokens,
                sampling=submit.sampling,
                stop_ids=submit.stop_ids,
                priority=submit.priority,
                resumed=whole[:done],
            )
            whole = whole[done:]
        request = Request(submit, whole, split=not self.chance(4))
        self.requests.append(request)
        if request.split:
            to_p, to_d = legs_of(submit, number, number)
            self.prefill.submit(to_p, link=1, now_s=self.now_s)
            self.decode.submit(to_d, link=0, now_s=self.now_s)
        else:
            self.decode.submit(submit, link=0, now_s=self.now_s)

    def step_prefill(self) -> None:
        results = self.prefill_line.turn(self.now_s)
        self.prefill.check()
        for export in self.prefill.kv_exports.take():
            self.requests[export.key.request].export = export
        for answers in [result.of(1) for result in results]:
            for output in answers.outputs:
                request = self.requests[output.request]
                assert not request.prefill_over and not request.told
                request.heard.ids += output.ids
                request.heard.finish = output.finish
                if output.finish is not None:
                    self._cancel_decode(request)
            for ended in (*answers.failed, *answers.freed):
                self.requests[ended.request].prefill_over = True

    def step_decode(self) -> None:
        results = self.decode_line.turn(self.now_s)
        self.decode.check()
        for result in results:
            for request in self.requests:
                answers = StepResult(answers={0: result.of(0)})
                if not request.cancelled:
                    request.heard.hear(answers, request.submit.request)
        for pull in self.decode.kv_imports.take_pulls():
            self.requests[pull.key.request].pull = pull
        self.scribble()

    def scribble(self) -> None:
        """Movers write to their blocks whenever they like."""
        for request in self.requests:
            if request.pull is not None:
                for _, block in request.pull.wanted:
                    self.decode_model.cells[block] = 0xBAD

    def ticket(self, request: Request) -> None:
        if request.export is not None:
            self.decode.kv_imports.ticket(request.d, b"t")

    def end_pull(self, request: Request, *, well: bool) -> None:
        pull, export = request.pull, request.export
        if pull is None or export is None:
            return
        whole = all(export.ready(place, g) for place, _ in pull.wanted for g in (0, 1))
        if well and not whole and not export.revoked:
            return
        request.pull = None
        freed: int | None
        if well and not export.revoked:
            here, there = self.prefill.model.kv_pool(), self.decode.model.kv_pool()
            for place, block in pull.wanted:
                copy_block(here, export.blocks[place], there, block)
            if self.prefill.released(request.p) is not None:
                request.prefill_over = True
            freed = self.decode.kv_imports.ended(request.d, arrived=True)
        else:
            freed = self.decode.kv_imports.ended(request.d, arrived=False)
        assert (freed is not None) == request.cancelled
        self.decode.check()
        self.prefill.check()

    def go_on(self, request: Request) -> None:
        if request.told or not request.split or request.cancelled:
            return
        new = request.heard.ids
        if new or request.prefill_over:
            request.told = True
            self.decode.go_on(request.d, list(new), self.now_s)
            self.decode.check()

    def lose_prefill(self, request: Request) -> None:
        if request.split and not request.prefill_over:
            self.prefill.cancel(request.p)
            request.prefill_over = True

    def _cancel_decode(self, request: Request) -> None:
        freed = self.decode.cancel(request.d)
        assert (freed is None) == (request.pull is not None)
        request.cancelled = True

    def cancel(self, request: Request) -> None:
        if request.cancelled or request.heard.finish is not None:
            return
        self._cancel_decode(request)
        self.lose_prefill(request)
        self.decode.check()

    def turn(self) -> None:
        """What is drawn happens next, if it can."""
        what = self.data.draw(st.integers(0, 12))
        some = self.data.draw(st.sampled_from(self.requests)) if self.requests else None
        match what:
            case 0 | 1 if len(self.requests) < 8:
                self.submit()
            case 2 | 3:
                self.step_prefill()
            case 4 | 5:
                self.step_decode()
            case 6 if some:
                self.ticket(some)
            case 7 if some:
                self.end_pull(some, well=True)
            case 8 if some and self.chance(3):
                self.end_pull(some, well=False)
            case 9 if some:
                self.go_on(some)
            case 10 if some and self.chance(3):
                self.lose_prefill(some)
            case 11 if some and self.chance(3):
                self.cancel(some)
            case 12:
                self.now_s += self.data.draw(st.sampled_from([0.01, 0.3]))
            case _:
                pass

    def settle(self) -> None:
        """All that is still to come comes.

        Two sides can wait for each other's blocks, each for the other's request: leases end that.
        """
        for turn in range(9000):
            engines = (self.prefill, self.decode)
            if all(engine.empty and not len(engine.steps) for engine in engines):
                return
            for line in (self.prefill_line, self.decode_line):
                line.choose = (lambda count, turn=turn: turn % count) if self.overlap else None
            self.now_s += 0.02
            self.step_prefill()
            self.step_decode()
            for request in self.requests:
                self.ticket(request)
                self.end_pull(request, well=True)
                self.go_on(request)
        raise AssertionError("something starves")


@given(data=st.data())
def test_random_traffic_in_two_legs_is_answered_as_if_each_request_were_alone(
    data: st.DataObject,
) -> None:
    scene = Scene(data)
    scene.submit()
    for _ in range(data.draw(st.integers(5, 60), "turns")):
        scene.turn()
    scene.settle()
    for engine in (scene.prefill, scene.decode):
        engine.check()
        engine.check_idle()
        assert engine.idle
        assert engine.pool.used == 0
    for request in scene.requests:
        got = request.heard
        assert got.failed is None
        if got.finish is None:
            assert request.cancelled
            assert got.ids == request.want[: len(got.ids)]
        else:
            assert got.ids == request.want
