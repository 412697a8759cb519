"""Norm of the latent, rotary turn of queries and key, and the store of both into the compressed cache of MLA.

q          [rows, heads, nope_dim + rope_dim]  nope first in each head; the rope part is turned in place
latent     [rows, kv_lora + rope_dim]          as the projection gave it: latent, then the key that all heads share
norm       [kv_lora]                           weight of the latent's RMS norm
cos_sin    [positions, rope_dim]  float32      cosines of the rope_dim / 2 frequencies, then their sines
positions  [rows]  int32
slots      [rows]  int64                       block * block_tokens + offset
cache      [blocks, block_tokens, kv_lora + rope_dim]  normed latent, then turned key; float or e4m3
Cost: reads q's rope parts and latent, writes the former back and one cache row; memory bandwidth is the bound.
Source: DeepSeek-V2 2024, section 2.1; Su et al. 2021 for the turn. Run on an H100 and an H200.

Interleaved, values 2p and 2p + 1 turn by frequency p; otherwise values p and p + rope_dim / 2 do. Both stay where they
are, in queries and keys alike. An e4m3 cache has the scale 1: values past 448 are cut off there, and
infinities become NaN.
"""

import torch
import triton
import triton.language as tl

from headrace_kernels.interpret import INTERPRET, narrow


@triton.jit
def _mla_store_kernel(
    q_ptr, latent_ptr, norm_ptr, cos_sin_ptr, positions_ptr, slots_ptr, cache_ptr, q_row, q_head, latent_row, eps,
    HEADS: tl.constexpr, NOPE: tl.constexpr, KV_LORA: tl.constexpr, ROPE: tl.constexpr,
    INTERLEAVE: tl.constexpr, LATENT_TILE: tl.constexpr, HALF_TILE: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)  # the one after the last is the key that all heads share
    half: tl.constexpr = ROPE // 2
    p = tl.arange(0, HALF_TILE)
    inside = p < half
    position = tl.load(positions_ptr + row).to(tl.int64)
    cos = tl.load(cos_sin_ptr + position * ROPE + p, mask=inside, other=0.0)
    sin = tl.load(cos_sin_ptr + position * ROPE + half + p, mask=inside, other=0.0)
    if INTERLEAVE:
        first, second = 2 * p, 2 * p + 1
    else:
        first, second = p, p + half
    if head < HEADS:
        source = q_ptr + row * q_row + head * q_head + NOPE
    else:
        source = latent_ptr + row * latent_row + KV_LORA
    x = tl.load(source + first, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(source + second, mask=inside, other=0.0).to(tl.float32)
    new_x = x * cos - y * sin
    new_y = y * cos + x * sin
    if head < HEADS:
        q_dtype = q_ptr.dtype.element_ty
        tl.store(source + first, narrow(new_x, q_dtype, INTERPRET), mask=inside)
        tl.store(source + second, narrow(new_y, q_dtype, INTERPRET), mask=inside)
    else:
        dtype = cache_ptr.dtype.element_ty
        slot = tl.load(slots_ptr + row)  # int64 already: slot * width passes 2**31
        target = cache_ptr + slot * (KV_LORA + ROPE)
        tl.store(target + KV_LORA + first, narrow(new_x, dtype, INTERPRET), mask=inside)
        tl.store(target + KV_LORA + second, narrow(new_y, dtype, INTERPRET), mask=inside)
        i = tl.arange(0, LATENT_TILE)
        c = tl.load(latent_ptr + row * latent_row + i, mask=i < KV_LORA, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(c * c, axis=0) / KV_LORA + eps)
        weight = tl.load(norm_ptr + i, mask=i < KV_LORA, other=0.0).to(tl.float32)
        tl.store(target + i, narrow(c * scale * weight, dtype, INTERPRET), mask=i < KV_LORA)


def mla_store(
    q: torch.Tensor,
    latent: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    *,
    rope_interleave: bool,
) -> torch.Tensor:
    """Turn `q` in place, fill the slots of `cache`, and return `q`.

    q and latent may be slices of wider buffers: only their last dimension must be contiguous.
    """
    rows, heads, q_dim = q.shape
    kv_lora, rope_dim = norm.numel(), cos_sin.shape[1]
    assert rope_dim % 2 == 0 and q_dim >= rope_dim and cos_sin.dtype == torch.float32
    assert latent.shape == (rows, kv_lora + rope_dim) and cache.shape[2] == latent.shape[1]
    assert q.stride(2) == 1 and latent.stride(1) == 1 and cache.is_contiguous()
    assert cos_sin.is_contiguous() and slots.dtype == torch.int64
    if rows:
        _mla_store_kernel[(rows, heads + 1)](
            q, latent, norm, cos_sin, positions, slots, cache, q.stride(0), q.stride(1), latent.stride(0), eps,
            HEADS=heads, NOPE=q_dim - rope_dim, KV_LORA=kv_lora, ROPE=rope_dim, INTERLEAVE=rope_interleave,
            LATENT_TILE=triton.next_power_of_2(kv_lora), HALF_TILE=triton.next_power_of_2(rope_dim // 2),
            INTERPRET=INTERPRET,
        )  # fmt: skip
    return q


def mla_store_ref(
    q: torch.Tensor,
    latent: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    *,
    rope_interleave: bool,
) -> torch.Tensor:
    """The same in torch."""
    rope_dim = cos_sin.shape[1]
    cos, sin = cos_sin[positions.long()].chunk(2, dim=-1)

    def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        if rope_interleave:
            first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
            pairs = (first * cos - second * sin, second * cos + first * sin)
            return torch.stack(pairs, dim=-1).flatten(-2)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    q_rope = q[..., q.shape[-1] - rope_dim :]
    q_rope.copy_(turn(q_rope.float(), cos.unsqueeze(1), sin.unsqueeze(1)))
    c = latent[:, : len(norm)].float()
    c = c * torch.rsqrt(c.square().mean(-1, keepdim=True) + eps) * norm.float()
    entry = torch.cat((c, turn(latent[:, len(norm) :].float(), cos, sin)), dim=-1)
    if cache.dtype == torch.float8_e4m3fn:
        entry = entry.clamp(-448, 448).where(entry.isfinite(), torch.nan)
    cache.flatten(0, 1)[slots] = entry.to(cache.dtype)
    return q


def mla_store_bytes(
    rows: int, heads: int, kv_lora: int, rope_dim: int, element_bytes: int, cache_bytes: int
) -> int:
    """Bytes that must move; an element of the cache has `cache_bytes`."""
    width = kv_lora + rope_dim
    return rows * (element_bytes * (2 * heads * rope_dim + width) + cache_bytes * width)
