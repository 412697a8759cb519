"""Arguments: what is accepted, what is refused and in which words, and how fast help answers."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from headrace import settings
from headrace.cli import main, serve

ENV = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


@pytest.mark.parametrize(
    ("text", "size"),
    [("512", 512), ("1k", 1024), ("1.5GiB", 3 << 29), ("2 MB", 2 << 20), ("1T", 1 << 40)],
)
def test_sizes(text: str, size: int) -> None:
    assert settings.size_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "1.5.5G", "x", "1GG", "\N{ARABIC-INDIC DIGIT ONE}"]
)
def test_wrong_sizes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        settings.size_bytes(text)


@pytest.mark.parametrize("text", ["0", "-3", "1.5", "", "²"])
def test_wrong_counts(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        settings.positive(text)


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "soon"])
def test_wrong_seconds(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        settings.seconds(text)


def test_what_serve_was_told_reaches_the_worker(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    served = argparse.ArgumentParser()
    settings.add_model_arguments(served)
    flags = [
        *(str(tmp_path), "--dtype", "int8", "--kv-memory", "1G", "--max-sequences", "5"),
        *("--served-model-name=--odd name", "--no-prefix-cache", "--context-tokens", "99"),
        "--kv-dtype=fp8",
        *("--mtp", "2", "--mtp-verify", "rejection", "--mtp-fixed", "--no-overlap"),
    ]
    argv = settings.model_argv(served.parse_args(flags))
    worker = argparse.ArgumentParser()
    settings.add_model_arguments(worker)
    settings.add_link_arguments(worker)
    checked = settings.worker_settings(worker.parse_args(argv))
    assert checked.model == str(tmp_path)
    assert checked.dtype == "int8"
    assert checked.kv_dtype == "fp8"
    assert checked.kv_memory_bytes == 1 << 30
    assert checked.max_sequences == 5
    assert checked.served_model_name == "--odd name"
    assert checked.context_tokens == 99
    assert not checked.prefix_cache
    assert (checked.mtp, checked.mtp_verify) == (2, "rejection")
    assert checked.mtp_fixed
    assert not checked.overlap


def typed(flags: list[str]) -> settings.WorkerSettings:
    """What `headrace worker` makes of its flags."""
    parser = argparse.ArgumentParser()
    settings.add_model_arguments(parser)
    settings.add_link_arguments(parser)
    return settings.worker_settings(parser.parse_args(flags))


@pytest.mark.parametrize(
    ("flags", "cpu", "cuda"),
    [
        ([], (16, 64, 256), (64, 512, 8192)),
        (["--max-sequences=5"], (16, 5, 256), (64, 5, 8192)),
        (["--max-sequences=1000"], (16, 1000, 1000), (64, 1000, 8192)),
        (["--max-batched-tokens=48"], (16, 48, 48), (64, 48, 48)),
        (["--block-tokens=32", "--max-batched-tokens=9999"], (32, 64, 9999), (32, 512, 9999)),
        (
            ["--block-tokens=48", "--max-sequences=7", "--max-batched-tokens=70"],
            (48, 7, 70),
            (48, 7, 70),
        ),
    ],
)
def test_steps_are_cut_by_the_device_unless_flags_say_how(
    flags: list[str], cpu: tuple[int, int, int], cuda: tuple[int, int, int]
) -> None:
    for device, (block, sequences, batched) in (("cpu", cpu), ("cuda", cuda)):
        sizes = settings.step_sizes(typed(flags), device)
        assert sizes == settings.StepSizes(
            block_tokens=block, max_sequences=sequences, max_batched_tokens=batched
        )


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
            sizes = settings.SIZES_OF_DEVICE
            assert default in shown
            assert (
                default
                == f"{getattr(sizes['cpu'], name)} on a CPU, {getattr(sizes['cuda'], name)} on a GPU"
            )


def test_mtp_is_bounded_and_off_unless_asked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    parser = argparse.ArgumentParser()
    settings.add_model_arguments(parser)
    settings.add_link_arguments(parser)
    checked = settings.worker_settings(parser.parse_args([str(tmp_path)]))
    assert (checked.mtp, checked.mtp_fixed) == (0, False)
    with pytest.raises(settings.SettingsError, match="add --mtp K"):
        settings.worker_settings(parser.parse_args([str(tmp_path), "--mtp-fixed"]))
    with pytest.raises(settings.SettingsError, match="--mtp 4 is too many"):
        settings.worker_settings(parser.parse_args([str(tmp_path), "--mtp", "4"]))
    for flags in (["--mtp", "-1"], ["--mtp", "two"], ["--mtp-verify", "never"]):
        with pytest.raises(SystemExit):
            parser.parse_args([str(tmp_path), *flags])


def test_secrets_come_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parser = argparse.ArgumentParser()
    settings.add_model_arguments(parser)
    settings.add_link_arguments(parser)
    monkeypatch.setenv("HEADRACE_SECRET", "from the environment")
    assert settings.worker_settings(parser.parse_args([])).secret == "from the environment"
    (tmp_path / "secret").write_text("from a file\n")
    args = parser.parse_args(["--secret-file", str(tmp_path / "secret")])
    assert settings.worker_settings(args).secret == "from a file"


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
        (["--port", "70000"], "0 to 65535"),
        (["--workers", "0"], "above 0"),
        (["--kv-memory", "lots"], "no size"),
        (["--no-such-flag"], "--no-such-flag"),
        (
            ["--max-sequences", "512", "--max-batched-tokens", "256"],
            "--max-batched-tokens 256 is less than --max-sequences 512",
        ),
        (["--host", "no.such.host.invalid", "--port", "0"], "--host no.such.host.invalid"),
        (["--router-args", "'"], "--router-args"),
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


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--policy", "kv"], '--router-args="--policy ..."'),
        (["--allow-anonymous-workers"], '--router-args="--allow-anonymous-workers ..."'),
        (["./model", "--cache-sharing=all", "--dice"], '--router-args="--cache-sharing ..."'),
        (["--router-args", "--cache-sharing=all"], '--router-args="--cache-sharing ..."'),
        (["--router-args", "--policy", "kv"], '--router-args="--policy ..."'),
    ],
)
def test_flags_of_the_router_are_told_their_place(
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


def test_who_may_come_in_is_told_to_the_router() -> None:
    flags = [
        *("--api-key-file=keys", "--admin-key-file=operators", "--allow-anonymous-clients"),
        *("--admin-listen=unix:a", "--admin-listen=127.0.0.1:1"),
        *("--allowed-hosts=a,b", "--allowed-hosts=c", "--allowed-origins=https://a"),
    ]
    args = main._parser().parse_args(["serve", *flags])
    assert sorted(serve.access_argv(args)) == sorted(flags)
    assert serve.access_argv(main._parser().parse_args(["serve"])) == []


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
    config = serve.ServeSettings(
        host=host,
        port=8000,
        roles=("both",),
        model=None,
        worker_argv=[],
        router_argv=[],
        drain_timeout_s=1.0,
    )
    assert config.url == url


def test_what_a_worker_does_for_split_requests(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    settings.add_model_arguments(parser)
    settings.add_link_arguments(parser)
    usual = settings.worker_settings(parser.parse_args([]))
    assert (usual.role, usual.transfer, usual.transfer_host) == ("both", True, None)
    flags = ["--role", "decode", "--no-transfer", "--transfer-host", "10.0.0.1"]
    told = settings.worker_settings(parser.parse_args(flags))
    assert (told.role, told.transfer, told.transfer_host) == ("decode", False, "10.0.0.1")
    assert main.main(["worker", "--role", "prefill", "--no-transfer"]) == main.EXIT_USAGE
    assert "nothing to do" in capsys.readouterr().err
