"""Layer sizes of the models whose shapes every kernel is measured at, from their public config.json.

Headrace serves the families llama and deepseek_v3. Of the others only the sizes are taken: gpt-oss has sliding windows
and attention sinks, and routes by a softmax as Qwen3 does.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedQueries:
    heads: int
    kv_heads: int
    dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention."""

    heads: int
    q_lora: int
    kv_lora: int
    nope: int
    rope: int
    v: int

    @property
    def costs(self) -> dict[str, int]:
        """As the kernels' `bytes()` and `flops()` name them."""
        return {
            "kv_lora": self.kv_lora,
            "rope_dim": self.rope,
            "nope_dim": self.nope,
            "v_dim": self.v,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """A layer's experts, and the groups that limit which of them a row may choose."""

    experts: int
    top_k: int
    width: int
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    model: str
    hidden: int
    ffn: int | None  # width of a dense layer's MLP; None: all layers have experts
    vocab: int
    attention: GroupedQueries | Latent
    mixture: Mixture | None
    fp8: bool  # weights in e4m3 with a scale for each 128 x 128


R1 = Shape(
    model="DeepSeek-R1",
    hidden=7168,
    ffn=18_432,
    vocab=129_280,
    attention=Latent(heads=128, q_lora=1536, kv_lora=512, nope=128, rope=64, v=128),
    mixture=Mixture(experts=256, top_k=8, width=2048, groups=8, top_groups=4, scale=2.5),
    fp8=True,
)
LLAMA_70B = Shape(
    model="Llama-70B",
    hidden=8192,
    ffn=28_672,
    vocab=128_256,
    attention=GroupedQueries(heads=64, kv_heads=8, dim=128),
    mixture=None,
    fp8=False,
)
QWEN3_235B = Shape(
    model="Qwen3-235B",
    hidden=4096,
    ffn=None,
    vocab=151_936,
    attention=GroupedQueries(heads=64, kv_heads=4, dim=128),
    mixture=Mixture(experts=128, top_k=8, width=1536),
    fp8=False,
)
GPT_OSS = Shape(
    model="gpt-oss-120b",
    hidden=2880,
    ffn=None,
    vocab=201_088,
    attention=GroupedQueries(heads=64, kv_heads=8, dim=64),
    mixture=Mixture(experts=128, top_k=4, width=2880),
    fp8=False,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large everything is: the models, and the points that they are measured at."""

    shapes: tuple[Shape, ...]
    decode_rows: int
    prefill_rows: int
    context: int  # of a decoding sequence
    prompt: int  # tokens of the prompt that attention is measured with
    block_tokens: int
    ranks: int  # of an expert-parallel group
    dry: bool


FULL = Sizes(
    shapes=(R1, LLAMA_70B, QWEN3_235B, GPT_OSS),
    decode_rows=128,
    prefill_rows=4096,
    context=4096,
    prompt=4096,
    block_tokens=64,
    ranks=32,
    dry=False,
)


def _small(shape: Shape) -> Shape:
    """The same layers, a few values wide, for the interpreter. Odd sizes stay odd, groups stay groups."""
    attention, mixture = shape.attention, shape.mixture
    if isinstance(attention, Latent):
        attention = Latent(heads=3, q_lora=48, kv_lora=32, nope=16, rope=16, v=16)
    else:
        group = attention.heads // attention.kv_heads // 4
        attention = GroupedQueries(heads=group, kv_heads=1, dim=attention.dim // 4)
    if mixture is not None:
        mixture = Mixture(
            experts=4,
            top_k=2,
            width=48,
            groups=min(mixture.groups, 2),
            top_groups=1,
            scale=mixture.scale,
        )
    return Shape(
        model=shape.model,
        hidden=544,  # enough columns that a product of few rows cuts them
        ffn=None if shape.ffn is None else 96,
        vocab=80,
        attention=attention,
        mixture=mixture,
        fp8=shape.fp8,
    )


# For a dry run: everything is called once, and says nothing of speed.
DRY = Sizes(
    shapes=tuple(_small(shape) for shape in FULL.shapes),
    decode_rows=2,
    prefill_rows=3,
    context=9,
    prompt=6,
    block_tokens=4,
    ranks=2,
    dry=True,
)
