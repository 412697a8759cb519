"""What this machine lacks: one line that names the command, the thing and what to do, and status 78."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headrace import logs
from headrace.cli import main
from headrace.errors import MissingExtra
from headrace.exit_status import EXIT_CONFIG
from headrace.extras import needs
from headrace.worker import device
from helpers.models.tiny_model import tiny_llama


def one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What stderr gets, after status 78."""
    assert main.main(arguments) == EXIT_CONFIG
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


@pytest.fixture(autouse=True)
def stderr_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands give standard error to a thread of their own, behind the back of `capsys`."""
    monkeypatch.setattr(logs, "never_wait", lambda **_: None)


def environment() -> dict[str, str]:
    """Of a process that imports what is imported here."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


@pytest.mark.parametrize(
    ("command", "package", "extra"),
    [
        ("worker", "numpy", "cpu"),
        ("worker --device=cuda", "torch", "worker"),
        ("fetch", "numpy", "cpu"),
        ("fetch --for=serve --device=cuda", "torch", "worker"),
        ("convert smollm2 --as=deepseek_v3 --out=x", "numpy", "cpu"),
    ],
)
def test_without_the_packages_of_workers_the_extra_is_named(
    command: str, package: str, extra: str, tmp_path: Path
) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None; from headrace.cli.main import main; "
        f"sys.exit(main({command.split()}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    typed = "serve" if "--for=serve" in command else command.partition(" ")[0]
    what_for = "--device cuda: " if "--device" in command else ""
    says = f"{what_for}{package} is not installed; run: pip install 'headrace[{extra}]'"
    assert (done.returncode, done.stderr) == (EXIT_CONFIG, f"headrace {typed}: {says}\n")


@pytest.mark.parametrize("command", ["worker", "fetch"])
def test_without_the_client_of_a_hub_its_extra_is_named(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    error = one_line([command, "org/name"], capsys)
    assert error.startswith(f"headrace {command}: org/name: there is no such directory")
    assert error.endswith("huggingface_hub is not installed; run: pip install 'headrace[hub]'\n")


def test_our_own_modules_are_no_extra() -> None:
    with pytest.raises(ModuleNotFoundError), needs("worker"):
        importlib.import_module("headrace.no_such_module")


def test_serve_looks_before_it_starts_anything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    error = one_line(["serve"], capsys)
    assert error == "headrace serve: numpy is not installed; run: pip install 'headrace[cpu]'\n"
    error = one_line(["serve", "--ep", "2"], capsys)
    says = "--ep: torch is not installed; run: pip install 'headrace[worker]'"
    assert error == f"headrace serve: {says}\n"


def test_plots_name_their_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "run.json"
    report.write_text(json.dumps({"requests": 1, "ttft_curve_ms": [1.0]}))
    # What other tests have imported would still be found.
    for name in [name for name in sys.modules if name.startswith("matplotlib.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    error = one_line(["bench", "plot", str(report), "--out", str(tmp_path / "out")], capsys)
    start = "headrace bench plot: matplotlib is not installed; run: "
    assert error == f"{start}pip install 'headrace[bench]'\n"


def no_cuda(patch: pytest.MonkeyPatch, *, built: str | None, driver: bool) -> None:
    patch.setattr(torch.cuda, "is_available", lambda: False)
    patch.setattr(torch.version, "cuda", built)
    patch.setattr(torch.version, "hip", None)
    patch.setattr(device, "_has_driver", lambda: driver)


@pytest.mark.parametrize(
    ("built", "driver", "says"),
    [
        (None, True, "is built without CUDA; install a build with CUDA"),
        ("13.0", False, "no NVIDIA driver is on this machine"),
        (
            "13.0",
            True,
            "the driver shows no GPU (CUDA_VISIBLE_DEVICES is '7'); see what nvidia-smi",
        ),
    ],
    ids=["torch", "driver", "gpu"],
)
@pytest.mark.parametrize("command", ["worker", "serve", "fetch"])
def test_a_device_that_is_not_there_is_one_line(
    command: str,
    built: str | None,
    driver: bool,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    no_cuda(monkeypatch, built=built, driver=driver)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    model = str(tiny_llama(tmp_path / "tiny"))
    # `serve` has `fetch` look, before anything is fetched
    argv = ["fetch", "--for=serve"] if command == "serve" else [command]
    if command == "fetch":  # which computes nothing
        assert main.main([*argv, "--device=cuda", model]) == 0
        assert capsys.readouterr().out == f"{model}\n"
        return
    error = one_line([*argv, "--device=cuda", model], capsys)
    assert error.startswith(f"headrace {command}: --device cuda: ")
    assert says in error and "--device cpu" in error


@pytest.mark.parametrize("command", ["worker", "fetch --for=serve"])
def test_a_context_that_the_model_does_not_allow_is_one_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny_llama(tmp_path / "tiny", max_position_embeddings=512))
    flag = "--max-model-len=513" if command == "worker" else "--context-tokens=513"
    error = one_line([*command.split(), "--device=cpu", flag, model], capsys)
    typed = command.rpartition("=")[2]
    says = (
        "--max-model-len (--context-tokens) 513 is more than the 512 tokens that this model allows"
    )
    assert error.startswith(f"headrace {typed}: {says}; give at most 512, ")


def test_what_torch_says_of_an_old_driver_is_told_in_the_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    no_cuda(monkeypatch, built="13.0", driver=True)

    def warn() -> bool:
        import warnings

        warnings.warn("The NVIDIA driver is too old\n(found version 1)", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", warn)
    with pytest.raises(
        device.NoDevice, match=r"too old \(found version 1\); or compute on the CPU"
    ):
        device.choose_device("cuda")


def test_unasked_the_device_is_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_has_driver", lambda: True)
    for there, name in ((False, "cpu"), (True, "cuda")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert device.choose_device("auto") == name
        assert device.choose_device("cpu") == "cpu"


def test_a_gpu_is_not_left_idle_because_torch_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_has_driver", lambda: True)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra, match=r"--device cpu .*torch is not .*headrace\[worker\]"):
        device.choose_device("auto")
    assert device.choose_device("cpu") == "cpu"


def test_torch_is_not_imported_to_see_that_there_is_no_gpu() -> None:
    code = (
        "import sys; from headrace.worker import device; device._has_driver = lambda: False; "
        "device.AMD_DRIVER = device.Path('/nowhere'); "
        "assert device.choose_device('auto') == 'cpu'; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True, timeout=60)


def test_errors_about_a_model_name_the_command_that_was_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    for flags, command in (([], "fetch"), (["--for=serve"], "serve")):
        assert main.main(["fetch", *flags, str(broken)]) == main.EXIT_USAGE
        assert capsys.readouterr().err.startswith(f"headrace {command}: ")


@pytest.mark.parametrize(("dtype", "found"), [("auto", "int8"), ("float32", "float32")])
def test_a_fetch_for_serve_says_what_the_weights_become(
    dtype: str, found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny_llama(tmp_path / "tiny"))
    flags = ["--for=serve", "--device=cpu", f"--dtype={dtype}"]
    assert main.main(["fetch", *flags, "--", model]) == 0
    assert json.loads(capsys.readouterr().out) == {"device": "cpu", "dtype": found}
