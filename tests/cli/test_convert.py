"""`headrace convert`: what it writes and prints, and what it refuses, leaving nothing behind."""

from __future__ import annotations

import json
import types
from pathlib import Path

import pytest

from headrace.cli import convert, main
from headrace.models.load.checkpoint import SafetensorsCheckpoint
from headrace.models.load.source import resolve
from headrace.models.r1_demo.deepseek_folder import Conversion
from headrace.models.r1_demo.smollm2_r1 import R1_FORMS
from helpers.models.tiny_gguf import tiny_gguf
from helpers.models.tiny_model import tiny_llama, tiny_mtp_head

FFN = 17 * 64


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "llama", intermediate_size=FFN)


def run(*arguments: object, status: int = 0) -> None:
    assert main.main(["convert", *map(str, arguments)]) == status


def test_a_folder_is_written_and_named(
    llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "below" / "deepseek"
    run(llama, "--as", "deepseek_v3", "--out", out)
    printed = capfd.readouterr()
    assert printed.out == f"{out}\n"
    assert "writing deepseek: 100%" in printed.err
    before, after = SafetensorsCheckpoint(llama), resolve(str(out))
    assert after.config.model_type == "deepseek_v3"
    assert json.loads(after.doc()) == json.loads(before.doc())  # text goes in and out alike
    assert [path.name for path in out.parent.iterdir()] == ["deepseek"]


def test_a_gguf_file_can_be_converted(llama: Path, tmp_path: Path) -> None:
    gguf = tiny_gguf(tmp_path / "tiny.gguf", llama)
    run(gguf, "--as", "deepseek_v3", "--paired", "--out", tmp_path / "out")
    assert resolve(str(tmp_path / "out")).config.raw["n_routed_experts"] == 32


def test_a_head_of_ones_own_comes_with_it(llama: Path, tmp_path: Path) -> None:
    head = tiny_mtp_head(tmp_path / "head.safetensors", llama, ffn=128)
    run(llama, "--as", "deepseek_v3", "--mtp-head", head, "--out", tmp_path / "out")
    assert resolve(str(tmp_path / "out")).config.raw["num_nextn_predict_layers"] == 1


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_what_exists_is_not_overwritten(
    llama: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    if kind == "folder":
        out.mkdir()
    elif kind == "file":
        out.write_text("mine")
    else:
        out.symlink_to("nowhere")
    run(llama, "--as", "deepseek_v3", "--out", out, status=2)
    assert capsys.readouterr().err == (
        f"headrace convert: --out {out} exists already; nothing is overwritten\n"
    )


def test_a_full_disk_is_noticed_before_anything_is_written(
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    usage = types.SimpleNamespace(total=10, used=9, free=1_000_000)
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda _: usage)
    run(llama, "--as", "deepseek_v3", "--out", tmp_path / "out", status=2)
    assert "MB are needed, 1 MB are free" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt(), 130), (OSError(28, "No space left on device"), 2)]
)
def test_what_was_interrupted_leaves_nothing(
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    status: int,
) -> None:
    def fail(_: Conversion, out: Path, __: object) -> None:
        (out / "model.safetensors").write_bytes(b"half")
        raise error

    monkeypatch.setattr(Conversion, "write", fail)
    run(llama, "--as", "deepseek_v3", "--out", tmp_path / "out", status=status)
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nothing-here"], "nothing-here: no such directory or file"),
        (["./nothing-here"], "there is no model at ./nothing-here"),
        (["{llama}", "--mtp"], "the head that comes with headrace is for smollm2"),
        (["{llama}", "--mtp-head", "none.safetensors"], "none.safetensors: cannot be read"),
        (["{llama}", "--mtp-head", "{llama}/model.safetensors"], "is missing"),
        (["{llama}", "--mtp-head", "{llama}/config.json"], "not safetensors"),
        (["{biased}"], "attention_bias"),
        (["{llama}", "--out", "{llama}/config.json/x"], "config.json/x: "),
    ],
)
def test_what_cannot_be_done_is_one_line(
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    biased = tiny_llama(tmp_path / "biased", intermediate_size=FFN, attention_bias=True)
    filled = [argument.format(llama=llama, biased=biased) for argument in arguments]
    run("--as", "deepseek_v3", "--out", "out", *filled, status=2)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert text in printed.err
    assert printed.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--out", "x", "m"],
        ["--as", "gpt", "--out", "x", "m"],
        ["--as", "deepseek_v3", "m"],
        ["--as", "deepseek_v3", "--out", "x"],
        ["--as", "deepseek_v3", "--out", "x", "--mtp", "--mtp-head", "y", "m"],
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main.main(["convert", *arguments])
    assert caught.value.code == 2


@pytest.mark.real_model
def test_short_names_of_the_default_model() -> None:
    assert resolve("smollm2").name == "SmolLM2-135M-Instruct"
    for name in R1_FORMS:
        checkpoint = resolve(name)
        assert checkpoint.name == name
        assert checkpoint.config.model_type == "deepseek_v3"
