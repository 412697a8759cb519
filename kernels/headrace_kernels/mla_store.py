"""Norm of the latent, rotary turn of queries and key, and the store of both into the compressed cache of MLA.

q          [rows, heads, nope_dim + rope_dim]  nope first in each head; the rope part is turned in place
latent     [rows, kv_lora + rope_dim]          as the projection gave it: latent, then the key that all heads share
norm       [kv_lora]                           weight of the latent's RMS norm
cos_sin    [positions, rope_dim]  float32      cosines of the rope_dim / 2 frequencies, then their sines
positions  [rows]  int32
slots      [rows]  int64                       block * block_tokens + offset
cache      [blocks, block_tokens, kv_lora + rope_dim]  normed latent, then turned key; float or e4m3
Source: DeepSeek-V2 2024, section 2.1; Su et al. 2021 for the turn.

Interleaved, values 2p and 2p + 1 turn by frequency p; otherwise values p and p + rope_dim / 2 do. Both stay where they
are, in queries and keys alike. An e4m3 cache has the scale 1: values past 448 are cut off there.
"""

import torch

E4M3_MAX = 448.0


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
        entry = entry.clamp(-E4M3_MAX, E4M3_MAX)
    cache.flatten(0, 1)[slots] = entry.to(cache.dtype)
    return q
