"""Rotary position embedding of queries and keys, and the store of keys and values into the paged cache.

q          [rows, heads, dim]      rotated in place
k, v       [rows, kv_heads, dim]   k is rotated on its way into the cache
cos_sin    [positions, dim]        cosines of the dim / 2 frequencies, then their sines
positions  [rows]                  int32
slots      [rows]                  int64; block * block_tokens + offset
k_cache, v_cache  [blocks, block_tokens, kv_heads, dim]
Cost: reads q, k, v, writes q and two cache rows; memory bandwidth is the bound.
Source: Su et al. 2021, the half-split form of Hugging Face Llama: value i turns with value i + dim / 2.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _rope_store_kernel(
    q_ptr, k_ptr, v_ptr, cos_sin_ptr, positions_ptr, slots_ptr, k_cache_ptr, v_cache_ptr,
    q_stride, k_stride, v_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF_TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    i = tl.arange(0, HALF_TILE)
    inside = i < DIM // 2
    position = tl.load(positions_ptr + row).to(tl.int64)
    cos = tl.load(cos_sin_ptr + position * DIM + i, mask=inside, other=0.0)
    sin = tl.load(cos_sin_ptr + position * DIM + DIM // 2 + i, mask=inside, other=0.0)
    if head < HEADS:
        source = q_ptr + row * q_stride + head * DIM
    else:
        source = k_ptr + row * k_stride + (head - HEADS) * DIM
    low = tl.load(source + i, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + DIM // 2 + i, mask=inside, other=0.0).to(tl.float32)
    new_low = low * cos - high * sin
    new_high = high * cos + low * sin
    if head < HEADS:
        tl.store(source + i, new_low, mask=inside)
        tl.store(source + DIM // 2 + i, new_high, mask=inside)
    else:
        kv_head = head - HEADS
        slot = tl.load(slots_ptr + row)  # int64 already: slot * KV_HEADS * DIM passes 2**31
        target = (slot * KV_HEADS + kv_head) * DIM
        tl.store(k_cache_ptr + target + i, new_low, mask=inside)
        tl.store(k_cache_ptr + target + DIM // 2 + i, new_high, mask=inside)
        value = v_ptr + row * v_stride + kv_head * DIM
        tl.store(v_cache_ptr + target + i, tl.load(value + i, mask=inside), mask=inside)
        tl.store(
            v_cache_ptr + target + DIM // 2 + i,
            tl.load(value + DIM // 2 + i, mask=inside),
            mask=inside,
        )


def rope_and_store_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> None:
    """Rotate `q` in place and fill the slots of `k_cache` and `v_cache`.

    q, k and v may be slices of one buffer: only their last two dimensions must be contiguous.
    """
    rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    assert dim % 2 == 0 and cos_sin.shape[1] == dim and cos_sin.dtype == torch.float32
    assert k.shape == v.shape == (rows, kv_heads, dim) and k_cache.shape[2:] == (kv_heads, dim)
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and slots.dtype == torch.int64
    for tensor in (q, k, v):
        assert tensor.stride(2) == 1 and tensor.stride(1) == dim
    if rows:
        _rope_store_kernel[(rows, heads + kv_heads)](
            q, k, v, cos_sin, positions, slots, k_cache, v_cache,
            q.stride(0), k.stride(0), v.stride(0),
            HEADS=heads, KV_HEADS=kv_heads, DIM=dim, HALF_TILE=triton.next_power_of_2(dim // 2),
        )  # fmt: skip


def rope_and_store_kv_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> None:
    """The same in torch."""
    cos, sin = cos_sin[positions.long()].unsqueeze(1).chunk(2, dim=-1)

    def turn(x: torch.Tensor) -> torch.Tensor:
        low, high = x.float().chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)

    q.copy_(turn(q))
    k_cache.flatten(0, 1)[slots] = turn(k).to(k_cache.dtype)
    v_cache.flatten(0, 1)[slots] = v.to(v_cache.dtype)


def rope_and_store_kv_bytes(
    rows: int, heads: int, kv_heads: int, dim: int, element_bytes: int
) -> int:
    """Bytes that must move: q both ways, k and v in, their cache rows out."""
    return rows * dim * element_bytes * (2 * heads + 4 * kv_heads)
