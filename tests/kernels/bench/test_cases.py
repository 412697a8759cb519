"""What `bench/kernels` says of a kernel: whether it is right, how near its ceiling is, and that it has a case."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from bench.gpu import table
from bench.kernels import __main__ as program
from bench.kernels import measure as measuring
from bench.kernels.case import Bench, Case, Work
from bench.kernels.launched import kernels_of_the_package
from bench.kernels.measure import WrongResultError, all_cases, measure, with_shares
from bench.kernels.shapes import DRY, FULL
from bench.kernels.timing import HostClock
from headrace_kernels.dense.silu_mul import silu_mul, silu_mul_ref

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROOT = Path(__file__).parents[3]


def a_case(name: str, **changes: Any) -> Case:
    def build(bench: Bench) -> Work:
        x = bench.draw(2, 8)
        work: dict[str, Any] = {
            "ours": lambda: silu_mul(x),
            "theirs": lambda: silu_mul_ref(x),
            "theirs_is": "the reference",
            "check": lambda: (silu_mul(x), silu_mul_ref(x)),
            "nbytes": 48,
        }
        return Work(**(work | changes))

    return Case(wrapper="silu_mul", model="none", point=name, build=build)


def failing() -> object:
    raise RuntimeError("not on this device\nand more")


def test_a_wrong_result_is_no_measurement() -> None:
    wrong = a_case("wrong", check=lambda: (torch.ones(4), torch.full((4,), 1.02)))
    with pytest.raises(WrongResultError, match=r"differs from the reference by 1.96e-02"):
        measure(wrong, HostClock(), DEVICE)
    nan = a_case("nan", check=lambda: (torch.full((4,), torch.nan), torch.ones(4)))
    with pytest.raises(WrongResultError, match="nan"):
        measure(nan, HostClock(), DEVICE)


def test_what_torch_cannot_do_is_noted_and_ours_stands() -> None:
    row = measure(a_case("theirs", theirs=failing), HostClock(), DEVICE)
    assert row["torch_failed"] == "RuntimeError: not on this device"
    assert row["kernels"] == ["silu_mul._silu_mul_kernel"]
    assert row["dry"] is True


def test_the_share_is_that_of_the_ceiling_that_bounds() -> None:
    row = {"us": 10.0, "bytes": 1e6, "flops": 1e9, "peak": "bf16"}
    by_bytes = with_shares(row, {"copy": 2e11, "bf16": 1e15})
    assert by_bytes["bytes_per_s"] == pytest.approx(1e11)
    assert (by_bytes["bound"], by_bytes["share"]) == ("copy", pytest.approx(0.5))
    by_flops = with_shares(row, {"copy": 1e13, "bf16": 1e14, "fp8": 1.0})
    assert (by_flops["bound"], by_flops["share"]) == ("bf16", pytest.approx(1.0))
    assert "share" not in with_shares(row, {})
    assert with_shares({"dry": True}, {"copy": 1.0}) == {"dry": True}


def test_names_of_cases_are_their_own_at_all_sizes() -> None:
    for sizes in (FULL, DRY):
        names = [case.name for case in all_cases(sizes)]
        assert len(set(names)) == len(names)
    wrappers = [[case.wrapper for case in all_cases(sizes)] for sizes in (FULL, DRY)]
    assert wrappers[0] == wrappers[1]  # so that the dry run covers every one


def test_published_latencies_belong_to_cases() -> None:
    rows = json.loads((ROOT / "bench/kernels/published.json").read_text())["rows"]
    assert {case.published for case in all_cases(FULL)} - {None} == set(rows) | {None} - {None}


def run(path: Path, monkeypatch: pytest.MonkeyPatch, *cases: Case, left_s: float = 1e9) -> int:
    monkeypatch.setattr(program, "all_cases", lambda _: list(cases))
    end_at = program.time.monotonic() + left_s
    return program.run(program.Kept(path), DRY, HostClock(), DEVICE, end_at)


def test_one_that_fails_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kernels.json"
    cases = a_case("first", ours=failing, check=failing), a_case("second")
    assert run(path, monkeypatch, *cases) == 1
    first, second = json.loads(path.read_text())["cases"]
    assert first["failed"] == "RuntimeError: not on this device"
    assert "failed" not in second


def test_kernels_without_a_case_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kernels.json"
    assert run(path, monkeypatch, a_case("the only one")) == 1
    missing = json.loads(path.read_text())["without_case"]
    assert set(missing) == kernels_of_the_package(one_gpu=True) - {"silu_mul._silu_mul_kernel"}
    assert len(missing) > 15


def test_a_broken_device_ends_the_process_which_goes_on_after_the_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> object:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    path = tmp_path / "kernels.json"
    cases = a_case("first", check=broken), a_case("second")
    assert run(path, monkeypatch, *cases) == program.AGAIN
    assert run(path, monkeypatch, *cases) == 1
    first, second = json.loads(path.read_text())["cases"]
    assert "illegal memory access" in first["failed"]
    assert "failed" not in second


def test_a_case_that_ended_the_process_failed_and_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kernels.json"
    begun = measuring.head(a_case("first"))
    path.write_text(json.dumps({"ceilings": [], "cases": [], "begun": begun}))
    assert run(path, monkeypatch, a_case("first"), a_case("second")) == 1
    figures = json.loads(path.read_text())
    assert [row.get("failed") for row in figures["cases"]] == ["the process ended in it", None]
    assert "begun" not in figures


def test_cases_that_did_not_fit_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kernels.json"
    case = a_case("late")
    assert run(path, monkeypatch, case, left_s=-1.0) == 0
    figures = json.loads(path.read_text())
    assert (figures["left_out"], figures["without_case"]) == ([case.name], [])


def test_every_row_says_so_where_no_gpu_has_run(tmp_path: Path) -> None:
    lines = table.render(table.read(tmp_path / "nowhere")).splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith("| ")][2:]
    assert len(rows) > 120
    assert {row[2] for row in rows} == {table.NOT_RUN}
    assert not any("".join(row[3:8]).strip() for row in rows)  # published figures alone


def test_a_measured_row_has_its_rates_and_its_neighbours_say_that_they_have_none() -> None:
    case = next(case for case in all_cases(FULL) if case.published is not None)
    row = measuring.head(case) | {"bytes": 2e6, "flops": 4e9, "us": 12.345, "torch_us": 20.0}
    row = with_shares(row, {"copy": 4e12, "bf16": 8e14})
    facts = {"gpu": {"name": "NVIDIA H200", "cuda": "13.0"}, "torch": "2.11.0", "triton": "3.6.0"}
    results = table.Results(
        run={"facts": facts | {"commit": "abc"}, "command": "make gpu OUT=x", "stages": []},
        kernels={
            "cases": [row, {"case": "unknown"}],
            "ceilings": [{"ceiling": "copy", "error": "x"}],
        },
    )
    text = table.render(results)
    assert "NVIDIA H200" in text and "commit abc" in text
    assert "| measured | 12.3 | 162 | 324 | 41% of bf16 | 20 | 20.8 |" in text
    assert "| failed: x |" in text
    assert text.count("measured |") == 1
