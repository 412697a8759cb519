"""Absorbed multi-head latent attention of rows over the compressed paged cache: decode, and drafts beside it.

q             [rows, heads, nope_dim + rope_dim]  turned already; the row's own key is in the cache
kv_b          [heads, nope_dim + v_dim, kv_lora]  makes keys, then values, of a latent
cache         [blocks, block_tokens, kv_lora + rope_dim]  float or e4m3 with the scale 1
block_tables  [seqs, max_blocks]  int32
row_seqs      [rows]  int32  which sequence each row is of
positions     [rows]  int32  a row sees the keys first_keys[seq] .. position
first_keys    [seqs]  int32
out           [rows, heads, v_dim]
Source: DeepSeek-V2 2024, section 2.1.3 (absorption).

The key projection goes into the query and the value projection behind the sum, so that all heads attend over one key
of kv_lora + rope_dim values, of which the first kv_lora are also the value. Any subset of a step's rows may be given.
"""

import torch


def mla_attention_ref(
    q: torch.Tensor,
    kv_b: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    row_seqs: torch.Tensor,
    positions: torch.Tensor,
    first_keys: torch.Tensor,
    *,
    scale: float,
    max_context: int,  # noqa: ARG001 - only the kernel needs it
) -> torch.Tensor:
    """The same in torch, one sequence after the other."""
    kv_lora = kv_b.shape[2]
    rope_dim = cache.shape[2] - kv_lora
    nope_dim = q.shape[2] - rope_dim
    w_k, w_v = kv_b.float().split((nope_dim, kv_b.shape[1] - nope_dim), dim=1)
    q_latent = torch.einsum("rhn,hnl->rhl", q[..., :nope_dim].float(), w_k)
    query = torch.cat((q_latent, q[..., nope_dim:].float()), dim=-1)
    out = q.new_empty(len(q), q.shape[1], w_v.shape[1])
    for seq in row_seqs.unique().tolist():
        rows = (row_seqs == seq).nonzero().squeeze(1)
        position = positions[rows].long()
        context = int(position.max()) + 1
        blocks = block_tables[seq, : -(-context // cache.shape[1])].long()
        keys = cache[blocks].flatten(0, 1)[:context].float()
        scores = query[rows] @ keys.T * scale  # [rows, heads, context]
        token = torch.arange(context, device=q.device)
        hidden = (token > position[:, None]) | (token < first_keys[seq])
        weights = scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1)
        summed = weights @ keys[:, :kv_lora]  # [rows, heads, kv_lora]
        out[rows] = torch.einsum("rhl,hvl->rhv", summed, w_v).to(out.dtype)
    return out
