"""What only a GPU machine runs of the benchmarks, with a stand-in for the GPU: which calls are made, in which order."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from bench.gpu import facts, slices, steps
from bench.kernels import __main__ as program
from bench.kernels import ceilings, timing
from bench.kernels.measure import measure
from bench.kernels.shapes import DRY
from bench.kernels.timing import GpuClock, Times
from headrace.models.config import parse_config

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Gpu:
    """Every call costs it what `costs_us` says; it counts from the last event."""

    def __init__(self, costs_us: float) -> None:
        self.log: list[str] = []
        self.costs_us = costs_us

    def work(self) -> None:
        self.log.append("work")

    def event(self, *, enable_timing: bool) -> Any:
        assert enable_timing
        return SimpleNamespace(
            record=lambda: self.log.append("event"), elapsed_time=lambda _: self.costs_us / 1e3
        )

    def synchronize(self) -> None:
        self.log.append("wait")

    def sleep(self, cycles: int) -> None:
        assert cycles > 0
        self.log.append("sleep")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu(costs_us=2_000.0)
    monkeypatch.setattr(timing, "FLUSH_BYTES", 16)
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    monkeypatch.setattr(torch.cuda, "_sleep", gpu.sleep)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 123)
    return gpu


def test_a_call_is_timed_by_events_behind_a_gpu_that_is_busy(gpu: Gpu) -> None:
    times = GpuClock(CPU).time(gpu.work)
    assert times.us == times.least_us == times.most_us == pytest.approx(2_000)
    assert times.calls == 30  # 60 ms of them
    assert times.host_us < 1e6
    assert gpu.log[:2] == ["work", "wait"]  # compiles
    assert gpu.log[-5:] == ["sleep", "event", "work", "event", "wait"]


def test_a_long_call_is_repeated_seldom(gpu: Gpu) -> None:
    gpu.costs_us = 2e6
    assert GpuClock(CPU).time(gpu.work).calls == 2


class Fixed:
    """A clock that is no dry one."""

    dry = False

    def time(self, call: timing.Call) -> Times:
        call()
        return Times(10.0, 9.0, 12.0, 5.0, 7)


def test_a_case_that_is_timed_has_its_figures(gpu: Gpu) -> None:
    case = next(case for case in program.all_cases(DRY) if case.wrapper == "linear")
    row = measure(case, Fixed(), DEVICE)
    assert (row["us"], row["torch_us"], row["host_us"], row["calls"]) == (10.0, 10.0, 5.0, 7)
    assert "dry" not in row


def test_ceilings_that_are_timed_have_rates_by_their_names() -> None:
    rates = program.rates_of([ceilings._row("copy", "bytes", Fixed(), small_copy, CPU)])
    assert rates == {"copy": pytest.approx(1e8)}
    failed = ceilings._row("fp8", "flops", Fixed(), no_such_product, CPU)
    assert failed["error"] == "RuntimeError: not on this device"
    assert program.rates_of([failed]) == {}


def small_copy(device: torch.device, dry: bool) -> tuple[timing.Call, int]:
    return (lambda: None), 1000


def no_such_product(device: torch.device, dry: bool) -> tuple[timing.Call, int]:
    raise RuntimeError("not on this device\nand more")


def test_a_step_that_is_timed_has_its_figures(gpu: Gpu) -> None:
    model: Any = SimpleNamespace(forward=lambda _: torch.zeros(2, 3))
    row = steps.run("decode", model, steps.decode(2, 5, 4), Fixed())
    assert (row["gpu_us"], row["host_us"], row["memory_bytes"]) == (10.0, 5.0, 123)
    assert row["step_us"] > 0
    json.dumps(row)


def test_as_many_layers_are_taken_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 0
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, free))
    fitting: list[int] = []
    for gib in (139, 60, 1, 2000):
        free = gib << 30
        fitting.append(slices._fitting(slices.FULL, torch.device("cuda")))
    assert fitting[1:] == [1 + 3, 1 + 1, 61]
    assert fitting[0] == 1 + 9
    assert parse_config(slices.FULL.raw).num_layers == 61


def test_the_cache_of_kernels_is_filled_by_shares(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = program.all_cases(DRY)[-4:]
    built: list[str] = []

    def case_of(name: str) -> Any:
        def build(_: object) -> Any:
            built.append(name)
            return SimpleNamespace(ours=gpu.work)

        return SimpleNamespace(build=build)

    monkeypatch.setattr(program, "all_cases", lambda _: [case_of(case.name) for case in cases])
    end_at = time.monotonic() + 1e9
    assert program.compile_share(DRY, CPU, "1/2", end_at) == 0
    assert built == [cases[1].name, cases[3].name]


def test_what_a_gpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = {"name": "NVIDIA H200", "major": 9, "minor": 0, "total_memory": 1}
    found = SimpleNamespace(**properties, multi_processor_count=132, L2_cache_size=60)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    monkeypatch.setattr(facts.shutil, "which", lambda _: None)
    gpu = facts.of_the_gpu()
    assert (gpu["name"], gpu["capability"], gpu["l2_bytes"]) == ("NVIDIA H200", "9.0", 60)
    assert "nvidia_smi" not in gpu
