"""Multi-head latent attention of prompt rows, with keys and values made of the latents first: long prompts on a GPU.

q             [rows, heads, nope_dim + rope_dim]  turned already; the rows' own latents are in the cache
kv_b          [heads, nope_dim + v_dim, kv_lora]  makes keys, then values, of a latent
cache         [blocks, block_tokens, kv_lora + rope_dim]  float or e4m3 with the scale 1
block_tables  [seqs, max_blocks]  int32
first_keys    [seqs]  int32  a row sees the keys first_keys[seq] .. its position
plan          which rows are of which sequence, known on the host
out           [rows, heads, v_dim]
Source: DeepSeek-V2 2024, section 2.1.2; merging parts by log-sum-exp as in Dao 2023.

Per pair of row and key this costs 2 * (nope_dim + rope_dim + v_dim) flops a head, absorbed attention 2 * (2 * kv_lora +
rope_dim): 3.4 times as many at DeepSeek-R1's sizes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Rows of the sequences of `block_tables`, one sequence after the other."""

    seq_starts: list[int]  # [seqs + 1]; rows of sequence s are seq_starts[s] : seq_starts[s + 1]
    context_lens: list[int]  # [seqs]; the position of its last row, plus 1


def prefill_plan(
    seq_starts: Sequence[int],
    context_lens: Sequence[int],
    device: torch.device,  # noqa: ARG001 - only the kernel needs it
) -> PrefillPlan:
    """What every layer of a step needs to know, made once."""
    return PrefillPlan(list(seq_starts), list(context_lens))


def mla_prefill_ref(
    q: torch.Tensor,
    kv_b: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    first_keys: torch.Tensor,
    plan: PrefillPlan,
    *,
    scale: float,
) -> torch.Tensor:
    """The same in torch, one sequence after the other."""
    kv_lora = kv_b.shape[2]
    rope_dim = cache.shape[2] - kv_lora
    nope_dim = q.shape[2] - rope_dim
    out = q.new_empty(len(q), q.shape[1], kv_b.shape[1] - nope_dim)
    for seq, context in enumerate(plan.context_lens):
        start, end = plan.seq_starts[seq : seq + 2]
        blocks = block_tables[seq, : -(-context // cache.shape[1])].long()
        entries = cache[blocks].flatten(0, 1)[:context].float()
        expanded = torch.einsum("tl,hnl->htn", entries[:, :kv_lora], kv_b.float())
        keys, values = expanded.split((nope_dim, out.shape[2]), dim=-1)  # [heads, context, ...]
        shared = entries[:, kv_lora:].expand(len(keys), -1, -1)
        keys = torch.cat((keys, shared), dim=-1)
        scores = torch.einsum("rhd,htd->hrt", q[start:end].float(), keys) * scale
        position = torch.arange(context - (end - start), context, device=q.device)[:, None]
        token = torch.arange(context, device=q.device)
        hidden = (token > position) | (token < first_keys[seq])
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[start:end] = torch.einsum("hrt,htv->rhv", weights, values).to(out.dtype)
    return out
