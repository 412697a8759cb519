"""The experts of a layer are in memory once while they are loaded: each is read, put into its place and let go of."""

from __future__ import annotations

import multiprocessing
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from headrace_kernels.lazy import Lazy
from headrace_kernels.ops import Attention, Routing
from helpers.kernels.tensor_backend import TensorBackend
from helpers.require import needs

EXPERTS, WIDTH, HIDDEN = 48, 256, 512
ROUTING = Routing(experts=EXPERTS, top_k=2, groups=1, top_groups=1, normalise=True, scale=1.0)


class Reader:
    """Makes tensors, and counts how many of them there are at once."""

    def __init__(self) -> None:
        self.alive = self.most = self.made = 0

    def read(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        tensor = torch.ones(shape).to(dtype)
        weakref.finalize(tensor, self._gone)
        self.alive += 1
        self.made += 1
        self.most = max(self.most, self.alive)
        return tensor

    def _gone(self) -> None:
        self.alive -= 1

    def each(self, *shape: int) -> Lazy[torch.Tensor]:
        return Lazy(range(EXPERTS), lambda _: self.read(*shape))


def native() -> TensorBackend:
    attention = Attention(
        layers=1, heads=1, kv_heads=1, head_dim=16, block_tokens=16, context_tokens=64, scale=1.0,
        inv_freq=[1.0] * 8, rope_scale=1.0,
    )  # fmt: skip
    return TensorBackend(attention, dtype="float32")


def peak_bytes(run: Callable[[], object]) -> int:
    """How much more memory than before this process had at most."""

    def of(key: str) -> int:
        status = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(key))

    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = of("VmRSS")
    kept = run()
    peak = of("VmHWM") - before
    del kept
    return peak


def load_natively() -> tuple[int, int]:
    """Bytes of the peak, and how many tensors there were at once."""
    reader, backend = Reader(), native()

    def load() -> object:
        return backend.experts(
            torch.ones(EXPERTS, HIDDEN), torch.zeros(EXPERTS), reader.each(2 * WIDTH, HIDDEN),
            reader.each(HIDDEN, WIDTH), ROUTING,
        )  # fmt: skip

    return peak_bytes(load), reader.most


@needs("linux", "the peak of a process is read in /proc", here=sys.platform == "linux")
def test_native_experts_are_packed_one_by_one() -> None:
    layer = 4 * EXPERTS * 3 * WIDTH * HIDDEN
    assert layer > 70 << 20
    # a process of its own, as what another test freed would be taken again and not seen
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as alone:
        peak, most = alone.submit(load_natively).result(timeout=120)
    assert most <= 3  # a pair, and what is left of the one before
    assert layer * 0.9 < peak < layer * 1.25  # it was twice as much


def test_torch_experts_are_stacked_one_by_one() -> None:
    pytest.importorskip("triton")
    from headrace_kernels.dense.fp8_linear import fp8_matrix
    from headrace_kernels.moe.fp8_grouped_linear import fp8_experts
    from headrace_kernels.torch_mla import stack

    reader = Reader()
    stacked = stack(reader.each(8, 16), torch.bfloat16, torch.device("cpu"))
    assert stacked.shape == (EXPERTS, 8, 16) and bool((stacked == 1).all())
    assert (reader.made, reader.most) == (EXPERTS, 1)

    reader = Reader()

    def matrix(expert: int):  # noqa: ANN202
        weight = reader.read(130, 140, dtype=torch.float8_e4m3fn)
        return fp8_matrix([(weight, torch.full((2, 2), float(expert)))])

    experts = fp8_experts(Lazy(range(EXPERTS), matrix))
    assert (reader.made, reader.most) == (EXPERTS, 1)
    for expert in (0, 1, EXPERTS - 1):
        assert bool((experts[expert].dequantised() == expert).all())
