"""What a step of the largest batch takes beside weights and cache: planned from shapes before the cache gets its share.

Each number is the sum of what exists at one moment of a pass; the largest moment counts. Values that a pass keeps in
local names (`llama.forward`, `deepseek.decoder_layer`) are in it, also those that nobody reads any more. Kernels on a
CPU work with float32 and in small parts, those of torch with the dtype of the values and with buffers of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.models.config import ModelConfig
from headrace.models.config_deepseek import DeepseekConfig

NATIVE_SCRATCH_BYTES = 64 << 20  # of the Rust kernels and of Python; above what was seen
# Of what `sampler.DRAW_ELEMENTS` logits become while tokens are drawn.
DRAW_BYTES = 12 * 4 * (1 << 23)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSpread:
    """The experts of a layer lie on several ranks, each of which takes steps of as many rows."""

    ranks: int
    slots: int  # of this rank, in the layer that has most
    native: bool = False  # programs exchange rows by themselves, without copies for Python

    def most(self, rows: int, experts_per_token: int) -> tuple[int, int, int]:
        """Rows that are sent, rows that come, and results of the slots here.

        A row goes once to each rank that has some of its experts, and asks no more slots than it chooses experts.
        """
        sent = rows * min(self.ranks, experts_per_token)
        asking = self.ranks * rows
        return sent, asking, asking * min(experts_per_token, self.slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """The largest step that settings allow."""

    rows: int  # prompts and answers together
    answers: int  # rows that are sampled: of all sequences, with their drafts
    context_tokens: int
    mtp: bool
    element_bytes: int
    torch: bool  # its kernels, rather than those in Rust
    fp8: bool  # weights stay e4m3, so that activations are quantised
    experts: ExpertSpread | None = None  # None: all are here
    mapped_bytes: int = (
        0  # of weights in files: pages that count as free, but are read in every step
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Bytes at the worst moment of each part. `lasting` is there all the time."""

    lasting: int
    attention: int
    mlp: int
    logits: int  # and sampling

    @property
    def total(self) -> int:
        return self.lasting + max(self.attention, self.mlp, self.logits)

    def __str__(self) -> str:
        parts = (
            f"{name} {getattr(self, name) / 2**20:.0f}"
            for name in ("attention", "mlp", "logits", "lasting")
        )
        return f"{self.total / 2**20:.0f} MiB ({', '.join(parts)})"


def step_memory(config: ModelConfig, shape: StepShape) -> StepMemory:
    """For a model with this config.json."""
    if config.deepseek is not None:
        return _latent(config, config.deepseek, shape)
    return _grouped(config, shape)


def _grouped(config: ModelConfig, shape: StepShape) -> StepMemory:
    rows, e = shape.rows, shape.element_bytes
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    held = rows * e * (2 * config.hidden_size + q + 2 * kv)  # x, what was normed of it, qkv
    attention = held + rows * e * 2 * q
    hidden, ffn = config.hidden_size, config.intermediate_size
    mlp = held + rows * e * 3 * ffn
    if shape.torch:
        attention += _spans(shape, config.num_heads, config.head_dim, paged=True)
        # `qkv` of the layer before is held until that of this one is there.
        made = max(_made(shape, hidden, q + 2 * kv), rows * e * q + _made(shape, q, hidden))
        attention = max(attention, held + made)
        mlp = max(mlp, held + _mlp_made(shape, hidden, ffn))
    return StepMemory(
        lasting=_lasting(shape),
        attention=attention,
        mlp=mlp,
        logits=held + _logits(config, shape),
    )


def _latent(config: ModelConfig, deepseek: DeepseekConfig, shape: StepShape) -> StepMemory:
    rows, e, hidden, heads = shape.rows, shape.element_bytes, config.hidden_size, config.num_heads
    q_dim = deepseek.nope_dim + deepseek.rope_dim
    latent = deepseek.kv_lora_rank + deepseek.rope_dim
    qkv_a = latent + (deepseek.q_lora_rank or heads * q_dim)
    held = rows * e * (2 * hidden + qkv_a + latent + heads * q_dim)
    # What drafting holds around its layer: token, hidden state, both together.
    drafting = rows * e * 4 * hidden if shape.mtp else 0
    out = rows * e * heads * deepseek.v_dim
    absorbed_rows = rows if shape.mtp else min(rows, shape.answers)
    absorbed = absorbed_rows * e * heads * (q_dim + 2 * deepseek.kv_lora_rank + deepseek.v_dim)
    width = deepseek.expert_size
    dense = max(config.intermediate_size, deepseek.shared_experts * width)
    expanded = made = joining = 0
    if shape.torch:
        absorbed += _spans(shape, heads, deepseek.kv_lora_rank, paged=False)
        expanded = _expanded(shape, heads, deepseek)
        q_lora = deepseek.q_lora_rank or 0
        made = max(
            _sums(shape, hidden, qkv_a),  # whose result is held
            # Columns of it and what was normed of them; the result is held.
            rows * e * 2 * q_lora + _sums(shape, q_lora, heads * q_dim),
            out + _made(shape, heads * deepseek.v_dim, hidden),
        )
        if shape.mtp:  # before the layer; FP8 checkpoints do not quantise it
            joining = drafting + _made(replace(shape, fp8=False), 2 * hidden, hidden)
    quantised = rows * max(hidden, heads * deepseek.v_dim) * 5 // 4 if shape.fp8 else 0
    moe = _experts(shape, hidden, deepseek)
    mlp = max(rows * e * 3 * dense + quantised, moe)
    if shape.torch:
        # Rows that all share run beside those of experts, which the router, in float32, chose before.
        shared = _mlp_made(shape, hidden, deepseek.shared_experts * width)
        router = _sums(replace(shape, element_bytes=4, fp8=False), hidden, deepseek.experts)
        alone = rows * e * hidden + _mlp_made(shape, hidden, dense)
        mlp = max(mlp, quantised + alone, moe + max(quantised + shared, router))
    return StepMemory(
        lasting=_lasting(shape) + (2 * rows * e * hidden if shape.mtp else 0),
        attention=max(
            held + drafting + max(out + max(absorbed, expanded, quantised), quantised + made),
            joining,
        ),
        mlp=held + drafting + mlp,
        logits=held + _logits(config, shape),
    )


def _experts(shape: StepShape, hidden: int, deepseek: DeepseekConfig) -> int:
    """The rows of this rank, and what its slots make of those that ask them."""
    rows, e, width = shape.rows, shape.element_bytes, deepseek.expert_size
    top_k = deepseek.experts_per_token
    held = rows * (4 * (hidden + 2 * deepseek.experts) + e * hidden)
    if shape.experts is not None and shape.experts.native:
        return held + _by_parcels(shape.experts, rows, hidden, deepseek)
    asking, pairs, returning = rows, rows * top_k, 0
    if shape.experts is not None:
        sent, asking, pairs = shape.experts.most(rows, top_k)
        by_row = e * hidden + 12 * top_k  # with slots, weights and places
        held += (sent + asking) * by_row
        # Results in the order of slots, and in that of the rows that asked; then those of this rank's own rows.
        results, own = pairs * e * hidden, rows * top_k * e * hidden
        returning = pairs * 40 + 2 * results + own
        if not shape.torch:  # Rust keeps copies of what comes and goes
            held += asking * by_row + results + own
    computing = pairs * (e * max(3 * width, width + hidden) + 40)  # with ids, weights and places
    computing += (pairs * width + asking * hidden) * 5 // 4 if shape.fp8 else 0
    return held + max(computing, returning)


def _by_parcels(experts: ExpertSpread, rows: int, hidden: int, deepseek: DeepseekConfig) -> int:
    """What a program of the CPU keeps for layers that exchange rows by themselves: no part of it is given back.

    Rows and results go from here straight into the memory of the rank that gets them (`moe/apart.rs`).
    """
    e, top_k = 4, deepseek.experts_per_token  # whatever the weights are, rows are float32
    sent, asking, pairs = experts.most(rows, top_k)
    plan = sent * (8 + 8 * top_k) + rows * 8 * top_k
    received = asking * (e * hidden + 8 * top_k)
    # With their places and their order; those of own rows apart, where there was once time for them.
    results = pairs * (e * hidden + 12) + rows * top_k * (e * hidden + 4)
    exact = rows * top_k * e * hidden
    partial = (
        (rows * min(experts.ranks, top_k) + asking + rows) * e * hidden
    )  # with the sums that go
    # All may ask one slot, and the rows of a slot are computed at once.
    computing = asking * e * 3 * deepseek.expert_size + pairs * 8
    return plan + received + results + max(exact, partial) + computing


def _lasting(shape: StepShape) -> int:
    """Arrays of the batch, its tables and plans; what Rust keeps."""
    by_row = 64 * shape.rows
    tables = 8 * (shape.answers + 1) * -(-shape.context_tokens // 16)
    kernels = 0 if shape.torch else NATIVE_SCRATCH_BYTES
    return by_row + tables + kernels + shape.mapped_bytes


def _logits(config: ModelConfig, shape: StepShape) -> int:
    """Of every row: a request may ask for the log-probabilities of its prompt. Those of answers may be copied."""
    e, vocab = shape.element_bytes, config.vocab_size
    rows = shape.rows
    kept = rows * (2 * config.hidden_size * e + 4 * vocab)
    converting = rows * e * vocab if shape.torch and e != 4 else 0
    return kept + max(converting, 4 * shape.answers * vocab + DRAW_BYTES)


def _mlp_made(shape: StepShape, hidden: int, ffn: int) -> int:
    """What the products of an MLP take at the worst moment; the second has the first one's result beside it."""
    activated = shape.rows * shape.element_bytes * ffn
    return max(_made(shape, hidden, 2 * ffn), activated + _made(shape, ffn, hidden))


def _made(shape: StepShape, n_in: int, n_out: int) -> int:
    """The result of a product, and what it keeps of its parts."""
    return shape.rows * shape.element_bytes * n_out + _sums(shape, n_in, n_out)


def _sums(shape: StepShape, n_in: int, n_out: int) -> int:
    """The most that a product keeps of its parts."""
    from headrace_kernels.dense import fp8_linear, linear
    from headrace_kernels.dense.parts import part_bytes

    tile = fp8_linear.TILE if shape.fp8 else linear.tile_of(shape.element_bytes)
    return part_bytes(shape.rows, n_out, n_in, tile)


def _spans(shape: StepShape, heads: int, dim: int, *, paged: bool) -> int:
    """Of attention that is summed span by span: no more than the bound, and no more than there is."""
    from headrace_kernels.attention import mla_attention, paged_attention
    from headrace_kernels.attention.span_plan import part_bytes, row_width

    width = row_width(heads, dim)
    tile_rows, span = (
        (paged_attention.ROWS_TILE, paged_attention.SPAN) if paged else (1, mla_attention.SPAN)
    )
    most = part_bytes(tile_rows, shape.context_tokens, span=span, width=width)
    return min(most, 4 * width * shape.rows * -(-shape.context_tokens // span))


def _expanded(shape: StepShape, heads: int, deepseek: DeepseekConfig) -> int:
    """Of prompt rows whose keys and values are made of the latents."""
    from headrace_kernels.attention import mla_prefill

    rows, e, v = shape.rows, shape.element_bytes, deepseek.v_dim
    q_dim = deepseek.nope_dim + deepseek.rope_dim
    by_row = rows * heads * (e * (q_dim + v) + 4 * (v + 1))  # queries, results in both types
    tokens = max(mla_prefill.LAUNCH_TOKENS, mla_prefill.SPAN)
    tokens = min(tokens, shape.context_tokens * max(1, shape.answers))
    of_latents = deepseek.kv_lora_rank + deepseek.rope_dim + heads * (deepseek.nope_dim + v)
    return by_row + tokens * e * of_latents
