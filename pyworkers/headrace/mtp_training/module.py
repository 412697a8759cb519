"""The head: one decoder layer that turns (token j, hidden state of position j - 1) into the hidden state of position j.

    x = eh_proj([enorm(embed(token j)) | hnorm(hidden j - 1)]);  y = layer(x);  logits of token j + 1 = head(norm(y))

Embedding and head are the model's own and stay as they are. A second token is drafted by a second pass at row j + 1,
which reads norm(y) of row j in place of the hidden state that the model has not computed yet, and so on: `unroll` does
for all rows at once what a drafter would do from each of them if its drafts were right.
Row t of a batch is position t + 1 of its sequence: position 0 has no hidden state before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from headrace.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """Sizes in elements; those of the model's own layers, but for `ffn`."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float

    @staticmethod
    def of(config: ModelConfig, ffn: int) -> HeadShape:
        return HeadShape(
            hidden=config.hidden_size,
            ffn=ffn,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
        )


class RmsNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class HeadAttention(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = _linear(shape.hidden, q)
        self.k_proj = _linear(shape.hidden, kv)
        self.v_proj = _linear(shape.hidden, kv)
        self.o_proj = _linear(q, shape.hidden)


class HeadMlp(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = _linear(shape.hidden, shape.ffn)
        self.up_proj = _linear(shape.hidden, shape.ffn)
        self.down_proj = _linear(shape.ffn, shape.hidden)

    def neurons(self, x: torch.Tensor) -> torch.Tensor:
        return functional.silu(self.gate_proj(x)) * self.up_proj(x)


class HeadModule(nn.Module):
    """Its parameters bear the names of the head file."""

    def __init__(self, shape: HeadShape, inv_freq: torch.Tensor, rope_scale: float = 1.0) -> None:
        super().__init__()
        self.shape = shape
        self.enorm = RmsNorm(shape.hidden, shape.eps)
        self.hnorm = RmsNorm(shape.hidden, shape.eps)
        self.eh_proj = _linear(2 * shape.hidden, shape.hidden)
        self.input_layernorm = RmsNorm(shape.hidden, shape.eps)
        self.self_attn = HeadAttention(shape)
        self.post_attention_layernorm = RmsNorm(shape.hidden, shape.eps)
        self.mlp = HeadMlp(shape)
        self.norm = RmsNorm(shape.hidden, shape.eps)
        self.inv_freq: torch.Tensor
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.rope_scale = rope_scale

    def unroll(
        self, embedded: torch.Tensor, hidden: torch.Tensor, passes: int
    ) -> list[torch.Tensor]:
        """norm(y) of each pass, `[sequences, rows, hidden]` as both inputs are.

        Row t of pass m is what a drafter that started m rows earlier sees there; the first m rows of it
        (m from 0) are meaningless.
        """
        seen = Seen(self, embedded.shape[1], embedded.device)
        normed: list[torch.Tensor] = []
        for m in range(passes):
            x = self.joined(embedded, hidden if m == 0 else _later(normed[-1], 1))
            x = x + self.self_attn.o_proj(seen.attend(self.input_layernorm(x))).float()
            x = x + self.mlp.down_proj(self.mlp.neurons(self.post_attention_layernorm(x))).float()
            normed.append(self.norm(x))
        return normed

    def joined(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """What the layer works on."""
        return self.eh_proj(self.pair(embedded, hidden)).float()

    def pair(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1)


class Seen:
    """The keys and values of the passes so far, and the attention of the next one over them."""

    def __init__(self, head: HeadModule, rows: int, device: torch.device) -> None:
        self._attn = head.self_attn
        self._shape = head.shape
        positions = torch.arange(1, rows + 1, device=device, dtype=torch.float32)
        angles = torch.outer(positions, head.inv_freq)
        self._turn = (angles.cos() * head.rope_scale, angles.sin() * head.rope_scale)
        self._distance = positions[:, None] - positions[None, :]  # [query, key]
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """The heads' results for the next pass, m: `[sequences, rows, heads * head_dim]`.

        Row t sees rows 0 .. t - m of pass 0, then row t - m + n of each pass n, and so its own row of pass m.
        Padding comes last, so causality alone keeps it out of what counts.
        """
        group = self._shape.heads // self._shape.kv_heads
        q = _turn(self._heads(self._attn.q_proj(x)), self._turn) * self._shape.head_dim**-0.5
        key = _turn(self._heads(self._attn.k_proj(x)), self._turn)
        self._keys.append(key.repeat_interleave(group, 1))
        self._values.append(self._heads(self._attn.v_proj(x)).repeat_interleave(group, 1))
        m, rows = len(self._keys) - 1, x.shape[1]
        scores = (q @ self._keys[0].transpose(-1, -2)).float()
        scores = scores.masked_fill(self._distance < m, -torch.inf)
        drafted = [
            (q * _later(self._keys[n], m - n)).sum(-1, keepdim=True).float()
            for n in range(1, m + 1)
        ]
        weights = torch.cat([scores, *drafted], -1).softmax(-1).to(q.dtype)
        mixed = weights[..., :rows] @ self._values[0]
        for n in range(1, m + 1):
            mixed = mixed + weights[..., rows + n - 1, None] * _later(self._values[n], m - n)
        return mixed.transpose(1, 2).flatten(2)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """`[sequences, heads, rows, head_dim]`"""
        return x.unflatten(-1, (-1, self._shape.head_dim)).transpose(1, 2)


def _later(x: torch.Tensor, rows: int) -> torch.Tensor:
    """`x` moved towards later rows; zeros come in."""
    if rows == 0:
        return x
    return functional.pad(x, (0, 0, rows, 0))[..., :-rows, :]


def _turn(x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary positions: element i turns with element i + head_dim / 2."""
    cos, sin = turn
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
