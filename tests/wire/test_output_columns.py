"""Outputs in columns: the same as lists of them, in every order, merged, cut, and as bytes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import _core
from headrace.engine.result import Answers
from headrace.errors import FrameTooLong, MalformedFrame
from headrace.wire.codec import decode, encode
from headrace.wire.frames import MAX_FRAME_BYTES, Load, Output, Ranked, Step, TokenLogprob
from headrace.wire.output_columns import Outputs, joined
from headrace.worker.outbox import MOST_STEPS, Outbox

IDS = st.integers(0, 2**32 - 1)
REQUESTS = st.sampled_from([0, 1, 127, 128, 2**32, 2**63, 2**64 - 1])
LOGPROBS = st.lists(
    st.builds(
        TokenLogprob,
        st.floats(allow_nan=False),
        st.lists(st.builds(Ranked, IDS, st.floats(allow_nan=False)), max_size=2),
    ),
    max_size=3,
)
OUTPUTS = st.builds(
    Output,
    REQUESTS,
    st.lists(IDS, max_size=3),
    logprobs=st.none() | LOGPROBS,
    finish=st.sampled_from([None, "stop", "length", "cancelled"]),
    cached_tokens=st.none() | st.integers(0, 2**32 - 1),
    prompt_logprobs=st.none() | LOGPROBS,
    drafted=st.integers(0, 300),
    accepted=st.integers(0, 300),
) | st.builds(
    Output,
    REQUESTS,
    st.lists(IDS, max_size=3),
    drafted=st.integers(0, 300),
    accepted=st.integers(0, 300),
)


def is_plain(output: Output) -> bool:
    return output == Output(
        output.request, output.ids, drafted=output.drafted, accepted=output.accepted
    )


def in_columns(outputs: list[Output]) -> Outputs:
    """Plain ones as columns, the others as they are."""
    plain = [output if is_plain(output) else None for output in outputs]
    return Outputs(
        np.array([output.request for output in outputs], dtype=np.uint64),
        np.array([len(it.ids) if it else 0 for it in plain], dtype=np.int64),
        np.array([token for it in plain if it for token in it.ids], dtype=np.int64),
        np.array([output.drafted for output in outputs], dtype=np.int64),
        np.array([output.accepted for output in outputs], dtype=np.int64),
        {row: output for row, output in enumerate(outputs) if not is_plain(output)},
    )


def a_step(outputs: list[Output] | Outputs) -> Step:
    return Step(1, 0.5, 0, 0, 0, 3, 70, 0, 0, 0, Load(1, 2, 3, 4), outputs)


def merged(outputs: list[Output]) -> list[Output]:
    """What a router makes of them, one after the other."""
    found: dict[int, Output] = {}
    for output in outputs:
        before = found.setdefault(output.request, output)
        if before is output:
            continue
        logprobs = None
        if before.logprobs is not None or output.logprobs is not None:
            logprobs = [*(before.logprobs or []), *(output.logprobs or [])]
        logprobs = before.logprobs if output.logprobs is None else logprobs
        found[output.request] = replace(
            before,
            ids=before.ids + output.ids,
            logprobs=logprobs,
            finish=output.finish,
            drafted=before.drafted + output.drafted,
            accepted=before.accepted + output.accepted,
        )
    return list(found.values())


def unique(outputs: list[Output]) -> list[Output]:
    return list({output.request: output for output in outputs}.values())


@given(outputs=st.lists(OUTPUTS, max_size=20))
def test_columns_are_a_sequence_of_their_outputs(outputs: list[Output]) -> None:
    columns = in_columns(outputs)
    assert columns == outputs
    assert Outputs.of(outputs) == outputs
    assert len(columns) == len(outputs)
    assert [columns[row] for row in range(len(outputs))] == outputs
    assert columns[1:] == outputs[1:]


@given(outputs=st.lists(OUTPUTS, max_size=20))
def test_a_step_of_columns_has_the_bytes_of_a_step_of_a_list(outputs: list[Output]) -> None:
    body = encode(a_step(in_columns(outputs)))
    assert body == encode(a_step(outputs))
    assert decode(body) == a_step(outputs)


U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
STEPS = st.builds(
    Step,
    U64,
    st.floats(allow_nan=False),
    U32,
    U32,
    U64,
    U32,
    U64,
    U64,
    U32,
    U32,
    st.builds(Load, U32, U32, U32, U32),
    st.just([Output(7, [1, 2], drafted=2, accepted=1), Output(2**64 - 1, [])]),
)


@given(step=STEPS)
def test_a_step_of_columns_has_the_numbers_of_a_step_of_a_list(step: Step) -> None:
    columns = replace(step, outputs=in_columns(list(step.outputs)))
    assert encode(columns) == encode(step)


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("step", -1),
        ("ms", 1),
        ("ms", "1"),
        ("prefill_tokens", 2**32),
        ("prefill_context", 2**64),
        ("decode_rows", None),
        ("kv_tokens", 1.0),
        ("waiting_tokens", "1"),
        ("drafted", -1),
        ("accepted", 2**32),
    ],
)
def test_a_wrong_number_of_a_step_of_columns_is_named(field: str, wrong: object) -> None:
    step = replace(a_step(in_columns([Output(1, [2])])), **{field: wrong})
    with pytest.raises(MalformedFrame, match=rf"step\.{field}"):
        encode(step)
    load = replace(Load(), running=-1)
    with pytest.raises(MalformedFrame, match=r"step\.load\.running"):
        encode(replace(a_step(in_columns([Output(1, [2])])), load=load))


@given(parts=st.lists(st.lists(OUTPUTS, max_size=6).map(unique), min_size=1, max_size=5))
def test_parts_are_joined_as_if_each_request_were_alone(parts: list[list[Output]]) -> None:
    whole = joined([in_columns(part) for part in parts])
    assert whole == merged([output for part in parts for output in part])


@given(outputs=st.lists(OUTPUTS, max_size=12), request=REQUESTS)
def test_a_request_is_taken_out(outputs: list[Output], request: int) -> None:
    left = [output for output in outputs if output.request != request]
    assert in_columns(outputs).without(request) == left


@given(outputs=st.lists(OUTPUTS, max_size=12), most=st.integers(1, 8))
def test_parts_hold_so_many_values_or_one_output(outputs: list[Output], most: int) -> None:
    def values(part: list[Output]) -> int:
        entries = [e for o in part for some in (o.logprobs, o.prompt_logprobs) for e in some or []]
        return sum(len(o.ids) for o in part) + sum(1 + len(entry.top) for entry in entries)

    parts = [list(part) for part in in_columns(outputs).parts(most)]
    assert parts and [output for part in parts for output in part] == outputs
    assert all(values(part) <= most or len(part) == 1 for part in parts)
    for part, after in pairwise(parts):
        assert values([*part, after[0]]) > most, "it would have had room"


@given(parts=st.lists(st.lists(OUTPUTS, max_size=4).map(unique), max_size=3 * MOST_STEPS))
def test_a_slow_link_hears_what_a_fast_one_would_and_no_more_is_kept(
    parts: list[list[Output]],
) -> None:
    outbox = Outbox()
    for part in parts:
        answers = Answers()
        answers.columns = in_columns(part) if part else None
        outbox.answer(answers)
        assert len(outbox._outputs) <= MOST_STEPS  # type: ignore[reportPrivateUsage]
    [step] = outbox.take()
    assert isinstance(step, Step)
    assert step.outputs == merged([output for part in parts for output in part])


def test_a_wrong_value_of_a_special_row_is_named() -> None:
    outputs = [Output(1, [2]), Output(3, [4], finish="done")]  # type: ignore[arg-type]
    with pytest.raises(MalformedFrame, match=r"step\.outputs\[1\]\.finish: expected stop"):
        encode(a_step(in_columns(outputs)))


def test_columns_that_are_too_long_for_a_frame_are_refused() -> None:
    count = MAX_FRAME_BYTES // 5 + 1
    none = np.zeros(1, dtype=np.int64)
    ids = np.full(count, 2**32 - 1)
    outputs = Outputs(np.ones(1, np.uint64), none + count, ids, none, none, {})
    with pytest.raises(FrameTooLong):
        encode(a_step(outputs))


@pytest.mark.parametrize(
    ("counts", "ids", "special", "says"),
    [
        ([1], [1], [], "2 requests, but counts, drafted and accepted of"),
        ([1, 1], [1], [], "1 ids, but counts of 2"),
        ([1, 0], [1], [(0, b"")], "special row 0 of 2"),
        ([0, 0], [], [(2, b"")], "special row 2 of 2"),
        ([0, 0], [], [(1, b""), (0, b"")], "special row 0 of 2"),
        ([0, 0], [], [(1, b""), (1, b"")], "special row 1 of 2"),
        ([0, 1], [-1], [], "ids of -1"),
        ([0, 1], [1 << 32], [], "ids of 4294967296"),
        ([0, -1], [], [], "counts of -1"),
    ],
)
def test_core_refuses_columns_that_do_not_fit_together(
    counts: list[int], ids: list[int], special: list[tuple[int, bytes]], says: str
) -> None:
    none = np.zeros(2, dtype=np.int64)
    with pytest.raises(ValueError, match=says):
        _core.encode_outputs(
            np.zeros(2, dtype=np.uint64),
            np.array(counts, dtype=np.int64),
            np.array(ids, dtype=np.int64),
            drafted=none,
            accepted=none,
            special=special,
        )
