"""Arguments: what is accepted, what is refused and in which words, and how fast help answers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.cli.serving.config import ServeSettings
from headrace.settings import worker

ENV = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def test_help_shows_the_defaults_of_each_device(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("serve", "worker"):
        with pytest.raises(SystemExit):
            main.main([command, "--help"])
        shown = " ".join(capsys.readouterr().out.split())
        for name, default in (
            ("block_tokens", "16 on a CPU, 64 on a GPU"),
            ("max_sequences", "64 on a CPU, 512 on a GPU"),
            ("max_batched_tokens", "256 on a CPU, 8192 on a GPU"),
        ):
            sizes = worker.SIZES_OF_DEVICE
            assert default in shown
            assert (
                default
                == f"{getattr(sizes['cpu'], name)} on a CPU, {getattr(sizes['cuda'], name)} on a GPU"
            )


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("./nothing", "there is no model at"),
        ("/a/b/c.gguf", "there is no model at"),
        ("{}/empty", "no config.json"),
        ("{}/model.bin", "does not end in .gguf"),
    ],
)
def test_wrong_models_are_one_line(
    name: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.bin").touch()
    assert main.main(["serve", name.format(tmp_path)]) == main.EXIT_USAGE
    error = capsys.readouterr().err
    assert why in error
    assert error.startswith("headrace serve: ")
    assert error.count("\n") == 1


def test_a_port_in_use_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main.main(["serve", "--port", str(port)]) == main.EXIT_USAGE
    error = capsys.readouterr().err
    assert error == f"headrace serve: cannot listen on 127.0.0.1:{port}: Address already in use\n"


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--dtype", "float8"], "float8"),
        (["--port", "70000"], "70000 is not in 0..=65535"),
        (["--workers", "0"], "from 1 to 1024"),
        (["--kv-memory", "lots"], "is not a size"),
        (["--no-such-flag"], "--no-such-flag"),
        (
            ["--max-sequences", "512", "--max-batched-tokens", "256"],
            "--max-batched-tokens 256 is less than --max-sequences 512",
        ),
        (["--host", "no.such.host.invalid", "--port", "0"], "--host no.such.host.invalid"),
        (["--ep-redundant", "1"], "there is one rank, which makes nothing of --ep-redundant: give"),
        (
            ["--ep", "1", "--ep-transport", "gloo", "--ep-redundant", "1"],
            "nothing of --ep-transport and --ep-redundant: give --ep too, at least 2, or leave them",
        ),
    ],
)
def test_wrong_flags_are_named(
    flags: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main.main(["serve", *flags])
    except SystemExit as ended:
        status = ended.code
    assert status == main.EXIT_USAGE
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "chat"])
def test_flags_of_nobody_are_told_no_place(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main.main([command, "--no-such-flag"])
    error = capsys.readouterr().err
    assert error.endswith("unrecognized arguments: --no-such-flag\n")


@pytest.mark.parametrize("command", ["serve", "worker", "chat", "fetch", "version"])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main([command, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: headrace {command}")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom headrace.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'triton', 'headrace._core', 'msgpack'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], env=ENV, check=True, capture_output=True)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("example.org", "http://example.org:8000"),
    ],
)
def test_the_url_is_one_that_works_from_here(host: str, url: str) -> None:
    config = ServeSettings(
        host=host,
        port=8000,
        roles=("both",),
        model=None,
        worker_argv=[],
        router_argv=[],
        drain_timeout_s=1.0,
    )
    assert config.url == url
