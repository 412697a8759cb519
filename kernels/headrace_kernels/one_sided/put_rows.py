"""Rows to the ranks that hold their experts, each row once to a rank, straight into the memory of that rank.

bases     [ranks]            int64; addresses of the windows of all ranks (window.py), this rank's own among them
x         [rows, x_words]    int32; rows as 32-bit words, whatever they are
scale     [rows, scale_words]  float32, of rows in e4m3; `None` where they are not
ids       [rows, top_k]      int32; experts of the group
weights   [rows, top_k]      float32
owner     [experts]          int32; the rank that this rank's rows of an expert go to
slot      [experts]          int32; the slot there
places    [rows, ranks]      int32; place in this rank's slice of that rank's window (send_places.py)
Cost: reads each row once, writes it once for each rank that it goes to; the links between GPUs are the bound.
Source: the one-sided exchange of TensorRT-LLM (blog 18): slices by source, duplicates left out. Compiled for compute
capability 9.0, not run on a GPU yet.
"""

import torch
import triton
import triton.language as tl

from headrace_kernels.one_sided.window import Window

TILE = 1024  # words; a guess, not tuned yet


@triton.jit
def _put_rows_kernel(
    bases_ptr, x_ptr, scale_ptr, ids_ptr, weights_ptr, owner_ptr, slot_ptr, places_ptr,
    rank, most_rows, x_at, scale_at, slots_at, weights_at, rows_at, columns_at,
    RANKS: tl.constexpr, RANK_TILE: tl.constexpr, TOP_K: tl.constexpr, K_TILE: tl.constexpr,
    X_WORDS: tl.constexpr, SCALE_WORDS: tl.constexpr, SCALE_TILE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    col = tile * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + row * X_WORDS + col, mask=col < X_WORDS, other=0)
    k = tl.arange(0, K_TILE)
    mine = k < TOP_K
    expert = tl.load(ids_ptr + row * TOP_K + k, mask=mine, other=0)
    owners = tl.load(owner_ptr + expert, mask=mine, other=-1)
    r = tl.arange(0, RANK_TILE)
    places = tl.load(places_ptr + row * RANKS + r, mask=r < RANKS, other=-1)
    for i in range(TOP_K):
        to = tl.sum(tl.where(k == i, owners, 0), axis=0)
        before = tl.sum(((owners == to) & (k < i)).to(tl.int32), axis=0)
        if before == 0:  # the first of the row's experts that is there
            place = tl.sum(tl.where(r == to, places, 0), axis=0)
            at = (rank * most_rows + place).to(tl.int64)
            base = tl.load(bases_ptr + to)
            x_to = (base + x_at).to(tl.pointer_type(tl.int32))
            tl.store(x_to + at * X_WORDS + col, x, mask=col < X_WORDS)
            if tile == 0:
                there = owners == to
                slots = tl.load(slot_ptr + expert, mask=mine & there, other=-1)
                slots_to = (base + slots_at).to(tl.pointer_type(tl.int32))
                tl.store(slots_to + at * TOP_K + k, slots, mask=mine)
                weights = tl.load(weights_ptr + row * TOP_K + k, mask=mine, other=0.0)
                weights_to = (base + weights_at).to(tl.pointer_type(tl.float32))
                tl.store(weights_to + at * TOP_K + k, weights, mask=mine)
                column = tl.sum(((places >= 0) & (r < to)).to(tl.int32), axis=0)
                tl.store((base + rows_at).to(tl.pointer_type(tl.int32)) + at, row.to(tl.int32))
                tl.store((base + columns_at).to(tl.pointer_type(tl.int32)) + at, column)
                if SCALE_WORDS > 0:
                    s = tl.arange(0, SCALE_TILE)
                    scale = tl.load(
                        scale_ptr + row * SCALE_WORDS + s, mask=s < SCALE_WORDS, other=0.0
                    )
                    scale_to = (base + scale_at).to(tl.pointer_type(tl.float32))
                    tl.store(scale_to + at * SCALE_WORDS + s, scale, mask=s < SCALE_WORDS)


def put_rows(
    window: Window,
    bases: torch.Tensor,
    rank: int,
    x: torch.Tensor,
    scale: torch.Tensor | None,
    ids: torch.Tensor,
    weights: torch.Tensor,
    owner: torch.Tensor,
    slot: torch.Tensor,
    places: torch.Tensor,
) -> None:
    """Write the rows of this rank into all windows. They are there once a signal that follows has been seen."""
    rows, top_k = ids.shape
    words = x.view(torch.int32)
    assert rows <= window.most_rows, f"{rows} rows, a window takes {window.most_rows} of a rank"
    assert words.shape == (rows, window.x_words) and top_k == window.top_k and x.is_contiguous()
    assert ids.dtype == owner.dtype == slot.dtype == places.dtype == torch.int32
    assert weights.dtype == torch.float32 and bases.dtype == torch.int64
    assert all(t.is_contiguous() for t in (ids, weights, owner, slot, places, bases))
    assert (scale is None) == (window.scale_words == 0)
    assert scale is None or (scale.is_contiguous() and scale.shape == (rows, window.scale_words))
    parts = {name: part.offset for name, part in window.parts.items()}
    if rows:
        _put_rows_kernel[(rows, triton.cdiv(window.x_words, TILE))](
            bases, words, words if scale is None else scale, ids, weights, owner, slot, places,
            rank, window.most_rows, parts["x"], parts["scale"], parts["slots"], parts["weights"], parts["rows"],
            parts["columns"],
            RANKS=window.ranks, RANK_TILE=triton.next_power_of_2(window.ranks), TOP_K=top_k,
            K_TILE=triton.next_power_of_2(top_k), X_WORDS=window.x_words, SCALE_WORDS=window.scale_words,
            SCALE_TILE=triton.next_power_of_2(max(window.scale_words, 1)), TILE=TILE,
        )  # fmt: skip


def put_rows_ref(
    window: Window,
    buffers: list[torch.Tensor],
    rank: int,
    x: torch.Tensor,
    scale: torch.Tensor | None,
    ids: torch.Tensor,
    weights: torch.Tensor,
    owner: torch.Tensor,
    slot: torch.Tensor,
    places: torch.Tensor,
) -> None:
    """The same in torch, into buffers of this process."""
    owners = owner[ids.long()]
    for to, buffer in enumerate(buffers):
        going = (places[:, to] >= 0).nonzero().flatten()
        there = owners[going] == to
        values = {
            "x": x.view(torch.int32)[going],
            "slots": torch.where(there, slot[ids[going].long()], -1),
            "weights": weights[going],
            "rows": going.int()[:, None],
            "columns": (places[going, :to] >= 0).sum(1).int()[:, None],
        }
        if scale is not None:
            values["scale"] = scale[going]
        for name, value in values.items():
            shape = window.ranks, window.most_rows, value.shape[1]
            part = window.view(buffer, name, value.dtype, *shape)
            part[rank, places[going, to].long()] = value


def put_rows_bytes(window: Window, rows: int, sends: int) -> int:
    """Bytes that must move: rows in, and out once for each rank that a row goes to (`sends` in all)."""
    row = 4 * (window.x_words + window.scale_words)
    return rows * row + sends * (row + 8 * window.top_k + 8)
