"""Draft passes of the native backend: which hidden rows they read, which keys they see, what travels with blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from headrace_kernels.ops import (
    Compiled,
    CompiledDraft,
    Fence,
    MlaAttention,
    MlaStep,
    Progress,
    Value,
)
from helpers.kernels.paged_rows import BLOCK, PagedRows, Part, cache_floats
from helpers.kernels.tensor_backend import TensorBackend, floats_of
from helpers.kv.block_copy import copy_block

HIDDEN = 24
HEADS, RANK, ROPE, V = 3, 16, 8, 8
QUERY = HEADS * ROPE
WIDTH = QUERY + RANK + ROPE


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def told_to(told: list[int]) -> Progress:
    def progress(groups: int, fence: Fence | None = None) -> None:
        assert fence is None
        told.append(groups)

    return progress


class Model:
    """Main pass: hidden = embedding. Draft pass: attention over [embedding | hidden], which is also what it keeps."""

    def __init__(self, rows: PagedRows, *, simd: str | None = None, layers: int = 2) -> None:
        self.rows = rows
        self.attention = MlaAttention(
            layers=layers,
            heads=HEADS,
            kv_lora_rank=RANK,
            nope_dim=0,
            rope_dim=ROPE,
            v_dim=V,
            block_tokens=BLOCK,
            context_tokens=4096,
            scale=ROPE**-0.5,
            inv_freq=[1.0, 0.3, 0.1, 0.01],
            rope_scale=1.0,
            rope_interleave=True,
            hidden_size=HIDDEN,
            mtp=True,
        )
        self.backend = b = TensorBackend(self.attention, dtype="float32", simd=simd)
        self.table = noise(rows.rows, HIDDEN)
        table = b.table(self.table)
        mix = b.matrix([noise(WIDTH, 2 * HIDDEN, seed=1) / HIDDEN**0.5])
        out = b.matrix([noise(HIDDEN, HEADS * V, seed=2) / 5])
        norm = b.vector(torch.ones(RANK))
        kv_b = b.head_matrices(noise(HEADS, V, RANK, seed=3))

        def attend(step: MlaStep, x: Value, layer: int) -> Value:
            latent = step.columns(x, QUERY, WIDTH)
            q = step.mla_store(step.columns(x, 0, QUERY), latent, norm, 1e-6, layer)
            return step.linear(step.mla_attention(q, kv_b, layer), out)

        def main(step: MlaStep) -> Value:
            x = step.embed(table)
            for layer in range(layers - 1):
                attend(step, step.linear(step.concat(x, x), mix), layer)
            step.keep_hidden(x)
            return step.wanted_rows(x)

        def draft(step: MlaStep) -> Value:
            x = step.linear(step.concat(step.embed(table), step.hidden()), mix)
            y = attend(step, x, layers - 1)
            step.keep_hidden(y)
            return step.wanted_rows(y)

        def shown(step: MlaStep) -> Value:
            return step.wanted_rows(step.hidden())

        self.main: Compiled = b.compile(main)
        self.draft: CompiledDraft = b.compile_draft(draft)
        self.shown: CompiledDraft = b.compile_draft(shown)  # keeps nothing
        b.allocate_kv(rows.num_blocks)

    def run(self, *parts: Part) -> torch.Tensor:
        return floats_of(self.main(self.rows.batch(parts)))

    def drafted(
        self,
        parts: list[Part],
        hidden_from: list[int],
        *,
        first_key: int = 1,
        chained: bool = False,
    ) -> torch.Tensor:
        batch = self.rows.draft(parts, hidden_from, first_key, chained=chained)
        return floats_of(self.draft(batch))

    def seen(
        self, parts: list[Part], hidden_from: list[int], *, chained: bool = False
    ) -> torch.Tensor:
        batch = self.rows.draft(parts, hidden_from, 1, chained=chained)
        return floats_of(self.shown(batch))

    def tail(self, block: int) -> NDArray[np.float32]:
        return cache_floats(self.backend)[block, -HIDDEN:]


def test_rows_read_the_main_pass_the_draft_pass_and_the_tails_of_blocks() -> None:
    rows = PagedRows([20, 5])
    m = Model(rows)
    hidden = m.run((0, 0, 20), (1, 0, 5))
    assert torch.equal(hidden, m.table)
    block = rows.tables[0][0]
    got = m.seen([(0, 16, 18), (1, 4, 5)], [15, 0, -(block + 1)])
    assert torch.equal(got, torch.stack([m.table[15], m.table[0], m.table[15]]))
    drafts = m.drafted([(0, 19, 20), (1, 4, 5)], [18, 23])
    got = m.seen([(0, 19, 20), (1, 4, 5)], [1, 0], chained=True)
    assert torch.equal(got, drafts.flip(0))
    # A chained pass reads what the one before it kept, not what it keeps itself.
    again = m.drafted([(0, 19, 20), (1, 4, 5)], [1, 0], chained=True)
    assert not torch.equal(again, drafts)
    assert torch.equal(m.seen([(1, 4, 5)], [0], chained=True), again[:1])
    # The main pass's stay what they were.
    assert torch.equal(m.seen([(1, 4, 5)], [7]), m.table[7:8])


def test_a_block_ends_with_the_hidden_row_of_its_newest_token() -> None:
    rows = PagedRows([40, 3])
    m = Model(rows)
    blocks = rows.tables[0]
    m.run((0, 0, 18), (1, 0, 3))
    assert (m.tail(blocks[0]) == m.table[15].numpy()).all()
    assert (m.tail(blocks[1]) == m.table[17].numpy()).all()
    assert (m.tail(rows.tables[1][0]) == m.table[42].numpy()).all()
    m.run((0, 18, 40))
    for block, token in zip(blocks, (15, 31, 39), strict=True):
        assert (m.tail(block) == m.table[token].numpy()).all()
    before = cache_floats(m.backend).tobytes()
    m.drafted([(0, 39, 40)], [0], first_key=39)
    assert (m.tail(blocks[2]) == m.table[39].numpy()).all(), "a draft pass writes no tail"
    assert cache_floats(m.backend).tobytes() != before, "it writes its layer"


def test_the_tail_travels_in_the_last_region_of_a_block() -> None:
    rows = PagedRows([16, 16])
    m = Model(rows, layers=10)
    pool = m.backend.kv_pool()
    layer = 4 * BLOCK * (RANK + ROPE)
    assert m.backend.kv_block_bytes == 10 * layer + 4 * HIDDEN == pool.block_bytes
    regions = [region for group in pool.groups for region in group]
    assert [region.nbytes for region in regions] == [8 * layer, 2 * layer + 4 * HIDDEN]
    assert m.backend.kv_layout.endswith(f" mtp hidden={HIDDEN}")
    m.run((0, 0, 16))
    copy_block(pool, rows.tables[0][0], pool, rows.tables[1][0])
    assert (m.tail(rows.tables[1][0]) == m.table[15].numpy()).all()


def test_the_last_group_is_not_told_of_before_its_drafting_layer_is_written() -> None:
    rows = PagedRows([4])
    for layers, told in ((2, []), (9, [1]), (10, [1]), (17, [1, 2])):
        groups: list[int] = []
        m = Model(rows, layers=layers)
        m.main(rows.batch(rows.whole()), told_to(groups))
        assert groups == told


@pytest.mark.parametrize("first_key", [1, 17, 60, 64, 65, 70])
def test_drafts_see_keys_from_the_first_on_and_have_the_same_bits_in_any_cut(
    first_key: int,
) -> None:
    rows = PagedRows([140, 33])
    n = 140 - first_key
    m = Model(rows)
    m.run((0, 0, 140), (1, 0, 33))
    whole = m.drafted([(0, first_key, 140)], list(range(first_key - 1, 139)), first_key=first_key)
    # The same rows elsewhere: keys before the first are never read, whatever they are.
    half = cache_floats(m.backend)[:, BLOCK * (RANK + ROPE) : -HIDDEN]
    half[:] = np.nan
    parts: list[Part] = [(1, first_key_of_mate := 32, 33), (0, first_key, 140)]
    batch = rows.draft(parts, [140 + 31, *range(first_key - 1, 139)], 1, chained=False)
    batch.first_keys[:] = [first_key_of_mate, first_key]
    assert torch.equal(floats_of(m.draft(batch))[1:], whole)
    half[:] = np.nan
    cut = first_key + n // 3
    one = m.drafted([(0, first_key, cut)], list(range(first_key - 1, cut - 1)), first_key=first_key)
    two = [m.drafted([(0, p, p + 1)], [p - 1], first_key=first_key) for p in range(cut, 140)]
    assert torch.equal(torch.cat([one, *two]), whole)


def test_a_draft_is_the_attention_of_the_shifted_sequence() -> None:
    """With the first key at 1 the drafting layer sees what a main layer sees one position before."""
    rows = PagedRows([30])
    m = Model(rows)
    m.run((0, 0, 30))
    got = m.drafted([(0, 1, 30)], list(range(29)))
    shifted = PagedRows([30])
    b, a = m.backend, m.attention
    table = b.table(torch.cat([m.table[1:], m.table[:-1]], dim=1))
    mix = b.matrix([noise(WIDTH, 2 * HIDDEN, seed=1) / HIDDEN**0.5])
    out = b.matrix([noise(HIDDEN, HEADS * V, seed=2) / 5])
    kv_b = b.head_matrices(noise(HEADS, V, RANK, seed=3))

    def describe(step: MlaStep) -> Value:
        x = step.linear(step.embed(table), mix)
        latent = step.columns(x, QUERY, WIDTH)
        norm = b.vector(torch.ones(RANK))
        q = step.mla_store(step.columns(x, 0, QUERY), latent, norm, 1e-6, a.layers - 1)
        return step.wanted_rows(step.linear(step.mla_attention(q, kv_b, a.layers - 1), out))

    want = b.compile(describe)(shifted.batch([(0, 0, 29)]))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_instruction_sets_have_the_same_bits() -> None:
    rows = PagedRows([80])

    def drafts(simd: str | None) -> torch.Tensor:
        m = Model(rows, simd=simd)
        m.run((0, 0, 80))
        return m.drafted([(0, 20, 80)], list(range(19, 79)), first_key=20)

    want = drafts(None)
    for simd in ("avx2", "portable"):
        try:
            got = drafts(simd)
        except ValueError:
            continue  # not on this machine
        assert torch.equal(got, want), simd


def test_what_does_not_fit_is_named_and_changes_nothing() -> None:
    rows = PagedRows([20])
    m = Model(rows)
    parts: list[Part] = [(0, 5, 7)]
    with pytest.raises(ValueError, match="hidden_from holds 0, which is not below 0"):
        m.drafted(parts, [0, 1])  # before any main pass
    m.run((0, 0, 20))
    m.drafted(parts, [4, 5])
    before = cache_floats(m.backend).tobytes()

    def case(
        text: str, hidden_from: list[int], *, first_key: int = 1, chained: bool = False
    ) -> None:
        with pytest.raises(ValueError, match=text):
            m.drafted(parts, hidden_from, first_key=first_key, chained=chained)

    case("hidden_from holds 20, which is not below 20", [4, 20])
    case("hidden_from holds 2, which is not below 2", [0, 2], chained=True)
    case("blocks of hidden_from holds 2, which is not below 2", [4, -3])
    case("blocks of hidden_from holds 2147483647", [4, -(2**31)])
    case("hidden_from has 1 entries, expected 2", [4])
    case(r"first_keys holds 0, must be in 1\.\.=5", [4, 5], first_key=0)
    case(r"sequence 0: first_keys holds 6, must be in 1\.\.=5", [4, 5], first_key=6)
    assert cache_floats(m.backend).tobytes() == before
    with pytest.raises(ValueError, match="a main pass reads no hidden rows"):
        m.backend.compile_draft(lambda s: s.wanted_rows(s.embed(m.backend.table(m.table))))(
            rows.draft(parts, [4, 5], 1, chained=False)
        )
    with pytest.raises(ValueError, match="a draft pass needs hidden_from"):
        m.backend.compile(lambda s: s.wanted_rows(s.hidden()))(rows.batch(parts))
    with pytest.raises(ValueError, match=f"keep_hidden: x is {2 * HIDDEN} wide, expected {HIDDEN}"):
        m.backend.compile(lambda s: s.keep_hidden(s.concat(s.hidden(), s.hidden())))
