"""A NaN in any floating input of any Triton kernel reaches the rows that read it, and no other row. In attention an
infinity does so, too.

Each case launches a kernel through its wrapper. The launch is repeated with a NaN in one place of one input, and its
result is compared row by row. The kernels of the package and their floating inputs are counted: a new kernel or input
without a case fails here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.jit import KernelInterface

from bench.kernels.launched import kernels_of_the_package, name_of
from headrace_kernels.attention import mla_attention as absorbed
from headrace_kernels.attention import mla_prefill as prefill
from headrace_kernels.attention import paged_attention as paged
from headrace_kernels.attention.head_linear import head_linear
from headrace_kernels.attention.merge_spans import merge_spans
from headrace_kernels.attention.mla_store import mla_store
from headrace_kernels.attention.rope import rope_and_store_kv
from headrace_kernels.dense.fp8_linear import Fp8Matrix, fp8_linear, fp8_matrix
from headrace_kernels.dense.fp8_quantise import quantise_rows
from headrace_kernels.dense.linear import linear
from headrace_kernels.dense.mask_rows import mask_rows
from headrace_kernels.dense.rms_norm import rms_norm
from headrace_kernels.dense.silu_mul import silu_mul
from headrace_kernels.dense.sum_parts import sum_parts
from headrace_kernels.moe.combine import combine
from headrace_kernels.moe.fp8_grouped_linear import fp8_experts, fp8_grouped_linear
from headrace_kernels.moe.grouped_linear import grouped_linear
from headrace_kernels.moe.permute import permute, permute_ref
from headrace_kernels.moe.route import route
from headrace_kernels.ops import Routing
from helpers.kernels.e4m3 import NEEDS_E4M3, e4m3

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
E4M3 = torch.float8_e4m3fn
NAN = float("nan")
ROWS = 5
ALL = range(ROWS)

pytestmark = [
    pytest.mark.matrix,
    NEEDS_E4M3,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, in the interpreter
]

Args: TypeAlias = Mapping[str, Any]  # of a launch, by the names of the kernel's parameters


@dataclass(frozen=True, slots=True)
class Spot:
    """A place of an input, and the rows of the result that read it."""

    name: str
    at: tuple[int, ...]
    rows: Sequence[int]


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel. `run` launches it through its wrapper; `result` is `[rows, ...]` of what a launch left."""

    kernel: str
    run: Callable[[], object]
    result: Callable[[Args], torch.Tensor] | None
    outputs: frozenset[str]  # floating ones that the kernel does not read
    spots: Sequence[Spot]


@dataclass(frozen=True, slots=True)
class Launch:
    kernel: Any
    grid: Any
    args: Args

    def repeated(self, outputs: frozenset[str], spot: Spot | None, bad: float = NAN) -> Args:
        """The arguments after a launch on copies of them, with `bad` in `spot`, and NaN all over `outputs` before."""
        args = {name: copied(x) for name, x in self.args.items()}
        for name in outputs:
            args[name].fill_(NAN)
        if spot is not None:
            args[spot.name][spot.at] = bad
        self.kernel[self.grid](**args)
        return args

    @property
    def floating(self) -> set[str]:
        """Names of the tensors that can hold a NaN."""
        return {n for n, x in self.args.items() if torch.is_tensor(x) and x.is_floating_point()}


def copied(x: Any) -> Any:
    """A tensor with memory of its own and the same strides, which are arguments too."""
    if not torch.is_tensor(x):
        return x
    memory = x.untyped_storage().clone()
    empty = torch.empty(0, dtype=x.dtype, device=x.device)
    return empty.set_(memory, x.storage_offset(), x.size(), x.stride())  # pyright: ignore[reportArgumentType]


def last_launch(case: Case) -> Launch:
    """With copies of what its arguments were before."""
    launches: list[Launch] = []
    launch_of: Any = KernelInterface.__getitem__

    def record(kernel: Any, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **named: Any) -> None:
            all_args = dict(zip(kernel.arg_names, args, strict=False)) | named
            if name_of(kernel) == case.kernel:
                copies = {name: copied(x) for name, x in all_args.items()}
                launches.append(Launch(kernel, grid, copies))
            launch_of(kernel, grid)(*args, **named)

        return launch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KernelInterface, "__getitem__", record)
        case.run()
    return launches[-1]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def integers(
    values: Sequence[int] | Sequence[Sequence[int]], dtype: torch.dtype = torch.int32
) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def side_by_side(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.float().flatten(1) for part in parts], dim=1)


# --- products, norms, activations ---

EXPERT_OF_ROW = [0, 1, 1, 0, 2]
OF_EXPERT_1 = [1, 2]


def a_matrix(seed: int = 0) -> Fp8Matrix:
    weight = e4m3(draw(40, 200, seed=seed) * 100)
    return fp8_matrix([(weight, draw(1, 2, seed=seed + 50).abs() / 100)])


def products() -> list[Case]:
    permutation = permute_ref(integers(EXPERT_OF_ROW).view(ROWS, 1), 3)

    def of_rows(args: Args) -> torch.Tensor:
        return args["y_ptr"][permutation.places[:, 0]]

    def of_y(args: Args) -> torch.Tensor:
        return args["y_ptr"]

    y = frozenset({"y_ptr"})
    return [
        Case(
            "linear._linear_kernel",
            lambda: linear(draw(ROWS, 40), draw(24, 40, seed=1)),
            of_y,
            y,
            [Spot("x_ptr", (2, 39), [2]), Spot("weight_ptr", (7, 3), ALL)],
        ),
        Case(
            "sum_parts._sum_parts_kernel",
            lambda: sum_parts(draw(3, ROWS, 40), draw(ROWS, 40)),
            of_y,
            y,
            [Spot("parts_ptr", (1, 2, 39), [2])],
        ),
        Case(
            "head_linear._head_linear_kernel",
            lambda: head_linear(draw(ROWS, 2, 20), draw(2, 20, 9, seed=1)),
            of_y,
            y,
            [Spot("x_ptr", (2, 1, 19), [2]), Spot("weight_ptr", (1, 3, 8), ALL)],
        ),
        Case(
            "fp8_linear._fp8_linear_kernel",
            lambda: fp8_linear(draw(ROWS, 200), a_matrix()),
            of_y,
            y,
            [
                Spot("x_ptr", (2, 150), [2]),
                Spot("x_scale_ptr", (2, 1), [2]),
                Spot("weight_ptr", (7, 150), ALL),
                Spot("scale_ptr", (0, 1), ALL),
            ],
        ),
        Case(
            "grouped_linear._grouped_linear_kernel",
            lambda: grouped_linear(
                draw(ROWS, 40), draw(3, 24, 40, seed=1), permutation, gather=True
            ),
            of_rows,
            y,
            [Spot("x_ptr", (2, 39), [2]), Spot("weight_ptr", (1, 7, 3), OF_EXPERT_1)],
        ),
        Case(
            "fp8_grouped_linear._fp8_grouped_linear_kernel",
            lambda: fp8_grouped_linear(
                draw(ROWS, 200),
                fp8_experts([a_matrix(100 * e) for e in range(3)]),
                permutation,
                gather=True,
            ),
            of_rows,
            y,
            [
                Spot("x_ptr", (2, 150), [2]),
                Spot("x_scale_ptr", (2, 1), [2]),
                Spot("weight_ptr", (1, 7, 150), OF_EXPERT_1),
                Spot("scale_ptr", (1, 0, 1), OF_EXPERT_1),
            ],
        ),
        Case(
            "fp8_quantise._quantise_rows_kernel",
            lambda: quantise_rows(draw(ROWS, 133)),
            lambda args: side_by_side(args["values_ptr"], args["scale_ptr"]),
            frozenset({"values_ptr", "scale_ptr"}),
            [Spot("x_ptr", (2, 7), [2]), Spot("x_ptr", (2, 132), [2])],
        ),
        Case(
            "rms_norm._rms_norm_kernel",
            lambda: rms_norm(draw(ROWS, 40), draw(40, seed=1), 1e-6, draw(ROWS, 40, seed=2)),
            lambda args: side_by_side(args["out_ptr"], args["residual_ptr"]),
            frozenset({"out_ptr"}),
            [
                Spot("x_ptr", (2, 39), [2]),
                Spot("residual_ptr", (2, 0), [2]),
                Spot("weight_ptr", (3,), ALL),
            ],
        ),
        Case(
            "silu_mul._silu_mul_kernel",
            lambda: silu_mul(draw(ROWS, 40)),
            lambda args: args["out_ptr"],
            frozenset({"out_ptr"}),
            [Spot("gate_up_ptr", (2, 19), [2]), Spot("gate_up_ptr", (2, 39), [2])],
        ),
        Case(
            "mask_rows._mask_rows_kernel",
            lambda: mask_rows(
                draw(ROWS, 40), integers([4, 2], torch.int64), integers([[-1, 0], [1 << 7, 1]])
            ),
            lambda args: args["logits_ptr"].nan_to_num(nan=NAN, neginf=-9.0),
            frozenset(),
            [Spot("logits_ptr", (2, 7), [2]), Spot("logits_ptr", (2, 32), [2])],
        ),
    ]


# --- experts ---


def experts() -> list[Case]:
    routing = Routing(experts=8, top_k=3, groups=4, top_groups=2, normalise=True, scale=2.5)
    places = integers(range(2 * ROWS)).view(ROWS, 2)
    return [
        Case(
            "route._route_kernel",
            lambda: route(draw(ROWS, 8), draw(8, seed=1), routing),
            lambda args: args["weights_ptr"],
            frozenset({"weights_ptr"}),
            [
                *[Spot("logits_ptr", (2, expert), [2]) for expert in range(8)],
                Spot("bias_ptr", (3,), ALL),
            ],
        ),
        Case(
            "permute._permute_kernel",
            lambda: permute(integers(EXPERT_OF_ROW).view(ROWS, 1), 3),
            None,
            frozenset(),
            [],
        ),
        Case(
            "combine._combine_kernel",
            lambda: combine(
                draw(2 * ROWS, 10), places, draw(ROWS, 2, seed=1), draw(ROWS, 10, seed=2)
            ),
            lambda args: args["out_ptr"],
            frozenset({"out_ptr"}),
            [
                Spot("y_ptr", (5, 9), [2]),
                Spot("weights_ptr", (2, 0), [2]),
                Spot("residual_ptr", (2, 0), [2]),
            ],
        ),
    ]


# --- what goes into the cache ---

POSITIONS = [0, 49, 3, 4, 4]
SLOTS = [11, 0, 7, 8, 3]  # of 3 blocks with 4 tokens
HEADS, NOPE, ROPE, LORA, V = 3, 10, 8, 24, 12


def stores() -> list[Case]:
    positions, slots = integers(POSITIONS), integers(SLOTS, torch.int64)

    def rope() -> None:
        # slices of one buffer, as in the model
        q, k, v = draw(ROWS, 4, ROPE, dtype=torch.bfloat16).split((2, 1, 1), dim=1)
        cache = draw(2, 3, 4, 1, ROPE, dtype=torch.bfloat16)
        rope_and_store_kv(q, k, v, draw(50, ROPE, seed=3), positions, slots, cache[0], cache[1])

    def latent() -> None:
        x = draw(ROWS, HEADS * (NOPE + ROPE) + LORA + ROPE, dtype=torch.bfloat16)
        q, entry = x.split((HEADS * (NOPE + ROPE), LORA + ROPE), dim=1)
        mla_store(
            q.unflatten(1, (HEADS, -1)), entry, draw(LORA, seed=2).to(x.dtype), 1e-6,
            draw(50, ROPE, seed=3), positions, slots, draw(3, 4, LORA + ROPE).to(E4M3), rope_interleave=True,
        )  # fmt: skip

    def stored(args: Args, name: str) -> torch.Tensor:
        return args[name].flatten(0, 1)[slots]

    turns = [Spot("cos_sin_ptr", (3, 1), [2]), Spot("cos_sin_ptr", (3, ROPE - 1), [2])]
    return [
        Case(
            "rope._rope_store_kernel",
            rope,
            lambda args: side_by_side(
                args["q_ptr"], stored(args, "k_cache_ptr"), stored(args, "v_cache_ptr")
            ),
            frozenset({"k_cache_ptr", "v_cache_ptr"}),
            [
                *turns,
                *[Spot(f"{x}_ptr", (2, 0, d), [2]) for x in "qkv" for d in (0, ROPE - 1)],
            ],
        ),
        Case(
            "mla_store._mla_store_kernel",
            latent,
            lambda args: side_by_side(args["q_ptr"], stored(args, "cache_ptr")),
            frozenset({"cache_ptr"}),
            [
                *turns,
                Spot("q_ptr", (2, 1, NOPE), [2]),
                Spot("q_ptr", (2, 1, NOPE + ROPE - 1), [2]),
                Spot("latent_ptr", (2, 5), [2]),
                Spot("latent_ptr", (2, LORA + 1), [2]),
                Spot("norm_ptr", (3,), ALL),
            ],
        ),
    ]


# --- attention: two sequences with the last rows of their contexts, the second one's have the bad values ---

SPAN, TILE, BLOCK = 32, 16, 4
CONTEXT, NEW = 60, 3
FIRST_SEQ = CONTEXT // BLOCK  # blocks before those of the second sequence
AT_ROW = CONTEXT - 2  # position of the second of the new rows
THOSE_WHO_SEE = {5: [3, 4, 5], 40: [3, 4, 5], AT_ROW: [4, 5], CONTEXT - 1: [5]}  # by position


def tables() -> torch.Tensor:
    return integers(range(2 * FIRST_SEQ)).view(2, FIRST_SEQ)


def in_cache(name: str, *at: int) -> list[Spot]:
    return [
        Spot(name, (FIRST_SEQ + token // BLOCK, token % BLOCK, *at), rows)
        for token, rows in THOSE_WHO_SEE.items()
    ]


def of_spans(tile_rows: int) -> Callable[[Args], torch.Tensor]:
    """Rows of `part`, as the queries come. It is `[tiles, spans, rows of a tile]` of `[heads, ...]`."""

    def in_rows(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, (2 * NEW // tile_rows, -1, tile_rows)).transpose(1, 2).flatten(0, 1)

    return lambda args: side_by_side(in_rows(args["part_ptr"]), in_rows(args["lse_ptr"]).exp())


def short_spans(run: Callable[[], object]) -> Callable[[], None]:
    """So that a short context has several spans of several tiles."""

    def with_short_spans() -> None:
        with pytest.MonkeyPatch.context() as patch:
            for module in (absorbed, paged, prefill):
                patch.setattr(module, "SPAN", SPAN)
                if module is not paged:
                    patch.setattr(module, "KV_TILE", TILE)
            patch.setattr(paged, "TILES", {4: dataclasses.replace(paged.TILES[4], tokens=TILE)})
            run()

    return with_short_spans


def attention() -> list[Case]:
    starts = [0, NEW, 2 * NEW]

    def grouped_queries() -> None:
        cache = draw(2, 2 * FIRST_SEQ, BLOCK, 2, 16, seed=1)
        paged.paged_attention(
            draw(2 * NEW, 4, 16), cache[0], cache[1], tables(), integers(starts), integers([CONTEXT] * 2),
            scale=0.2, plan=paged.attention_plan(starts, [CONTEXT] * 2, heads=4, dim=16, device=DEVICE),
        )  # fmt: skip

    kv_b = draw(HEADS, NOPE + V, LORA, seed=4) * LORA**-0.5

    def latent() -> None:
        at = np.array([*range(CONTEXT - NEW, CONTEXT)] * 2, dtype=np.int32)
        absorbed.mla_attention(
            draw(2 * NEW, HEADS, NOPE + ROPE), kv_b, draw(2 * FIRST_SEQ, BLOCK, LORA + ROPE, seed=1),
            tables(), integers([0] * NEW + [1] * NEW), torch.from_numpy(at).to(DEVICE),
            integers([0, 0]), scale=0.2, plan=absorbed.attention_plan(at, heads=HEADS, kv_lora=LORA, device=DEVICE),
        )  # fmt: skip

    def expanded() -> None:
        prefill.mla_prefill(
            draw(2 * NEW, HEADS, NOPE + ROPE), kv_b, draw(2 * FIRST_SEQ, BLOCK, LORA + ROPE, seed=1),
            tables(), integers([0, 0]), prefill.prefill_plan(starts, [CONTEXT] * 2, DEVICE), scale=0.2,
        )  # fmt: skip

    def workspace(token: int) -> int:
        """Where the last span has a token of the second sequence."""
        return CONTEXT - SPAN + token - SPAN

    def in_workspace(name: str, at: int) -> list[Spot]:
        return [
            Spot(name, (workspace(token), at), rows)
            for token, rows in THOSE_WHO_SEE.items()
            if token >= SPAN
        ]

    query = [Spot("q_ptr", (4, 1, 0), [4]), Spot("q_ptr", (4, 1, 15), [4])]
    parts = frozenset({"part_ptr", "lse_ptr"})
    return [
        Case(
            "paged_attention._attend_span_kernel",
            short_spans(grouped_queries),
            of_spans(NEW),
            parts,
            [*query, *in_cache("k_ptr", 1, 3), *in_cache("v_ptr", 1, 3)],
        ),
        Case(
            "mla_attention._attend_latent_kernel",
            short_spans(latent),
            of_spans(1),
            parts,
            [
                Spot("latent_ptr", (4, 1, 0), [4]),
                Spot("q_ptr", (4, 1, NOPE), [4]),
                *in_cache("cache_ptr", 3),
                *in_cache("cache_ptr", LORA + 1),
            ],
        ),
        Case(
            "mla_prefill._gather_kernel",
            short_spans(expanded),
            lambda args: side_by_side(args["latent_ptr"], args["key_ptr"]),
            frozenset({"latent_ptr", "key_ptr"}),
            [
                Spot("cache_ptr", (FIRST_SEQ + 50 // BLOCK, 50 % BLOCK, at), [workspace(50)])
                for at in (3, LORA + 1)
            ],
        ),
        Case(
            "mla_prefill._attend_expanded_kernel",
            short_spans(expanded),
            lambda args: side_by_side(args["acc_ptr"], args["lse_ptr"]),
            frozenset(),
            [
                *query,
                *in_workspace("key_ptr", 1),
                *in_workspace("expanded_ptr", 3),  # of a key
                *in_workspace("expanded_ptr", NOPE + 3),  # of a value
                Spot("acc_ptr", (4, 1, 0), [4]),
                Spot("lse_ptr", (4, 1), [4]),
            ],
        ),
        Case(
            "merge_spans._merge_spans_kernel",
            lambda: merge_spans(
                draw(3 * ROWS, 1, 7),
                draw(3 * ROWS, 1, seed=1),
                integers([*ALL, *[ROWS] * ROWS, *[3] * ROWS]).view(3, ROWS),
                torch.empty(ROWS, 1, 7, device=DEVICE),
            ),
            lambda args: args["out_ptr"],
            frozenset({"out_ptr"}),
            [Spot("part_ptr", (ROWS + 2, 0, 3), [2]), Spot("lse_ptr", (ROWS + 2, 0), [2])],
        ),
    ]


CASES = [*products(), *experts(), *stores(), *attention()]


# They move bytes between ranks or look at counters, and calculate nothing: tests/kernels/one_sided compares the bits.
MOVERS = ["put_rows", "return_rows", "send_places", "signal", "wait"]


def test_every_kernel_has_a_case() -> None:
    movers = [f"{name}._{name}_kernel" for name in MOVERS]
    assert sorted(kernels_of_the_package()) == sorted([*movers, *(case.kernel for case in CASES)])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.kernel)
def test_a_nan_reaches_those_who_read_it(case: Case) -> None:
    launch = last_launch(case)
    inputs = {spot.name for spot in case.spots}
    assert launch.floating == inputs | case.outputs, "an input without a spot"
    if case.result is None:
        return
    before = case.result(launch.repeated(case.outputs, None)).float()
    assert before.isfinite().all(), "an output is read, or not written"
    for spot in case.spots:
        after = case.result(launch.repeated(case.outputs, spot)).float()
        reached = after.flatten(1).isnan().any(1).nonzero().flatten().tolist()
        assert reached == list(spot.rows), spot
        others = [row for row in range(len(after)) if row not in spot.rows]
        assert torch.equal(after[others], before[others]), spot


@pytest.mark.matrix(cases=2)
@pytest.mark.parametrize("bad", [float("inf"), -float("inf")])
@pytest.mark.parametrize("case", attention(), ids=lambda case: case.kernel)
def test_an_infinity_in_attention_makes_no_plausible_number(case: Case, bad: float) -> None:
    """A score of -inf is no token that a row does not see, and no weight of 0."""
    launch = last_launch(case)
    assert case.result is not None
    before = case.result(launch.repeated(case.outputs, None)).float()
    for spot in case.spots:
        if spot.name == "lse_ptr" and bad < 0:
            continue  # there it says that nothing was seen
        after = case.result(launch.repeated(case.outputs, spot, bad)).float()
        broken = ~after.flatten(1).isfinite().all(1)
        assert broken.nonzero().flatten().tolist() == list(spot.rows), spot
        assert torch.equal(after[~broken], before[~broken]), spot
