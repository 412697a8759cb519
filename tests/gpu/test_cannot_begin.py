"""What stops `make gpu` before anything runs: one line that says what is missing, and exit status 2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu import __main__ as program
from bench.gpu.__main__ import CANNOT_BEGIN, OURS
from bench.gpu.wheel import ROOT, NotReadyError


def begin(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["make gpu", *arguments])
    return program.main()


def test_without_a_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert begin(monkeypatch, "--dry") == CANNOT_BEGIN
    assert capsys.readouterr().err == (
        "make gpu: a folder for the results is needed: make gpu OUT=FOLDER\n"
    )


@pytest.mark.parametrize("out", ["a file", "/dev/null/results", "/proc/results"])
def test_with_a_folder_that_cannot_be_written(
    out: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "a file").touch()
    monkeypatch.chdir(tmp_path)
    assert begin(monkeypatch, "--out", out, "--dry") == CANNOT_BEGIN
    error = capsys.readouterr().err
    assert error.startswith("make gpu: ") and ": cannot be written: " in error
    assert error.count("\n") == 1


def test_with_a_stage_that_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert begin(monkeypatch, "--out", str(tmp_path), "--only", "layers,kernel") == 2
    error = capsys.readouterr().err
    assert "no stage is called 'kernel': they are machine, engine, kernel tests, compile" in error


def test_without_what_gpu_wheel_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nothing(site: Path) -> None:
        raise NotReadyError("no wheel of it: run `make gpu-wheel`")

    monkeypatch.setattr(program, "make_ready", nothing)
    assert begin(monkeypatch, "--out", str(tmp_path)) == CANNOT_BEGIN
    assert capsys.readouterr().err == "make gpu: no wheel of it: run `make gpu-wheel`\n"


def test_results_of_an_earlier_run_are_not_mixed_with_new_ones(tmp_path: Path) -> None:
    for name in (*OURS, "notes.txt"):
        (tmp_path / name).write_text("old")
    program.open_folder(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_without_a_gpu(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu", "--out", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == CANNOT_BEGIN, done.stdout + done.stderr
    assert done.stderr.startswith("make gpu: no GPU: torch ")
    assert "DRY=1" in done.stderr
    assert "kernels: not run" in done.stdout
