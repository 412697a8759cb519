"""A file of configuration: what counts before what, and what is said of a file that is wrong."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.cli.client import chat
from headrace.cli.config_file import in_force
from headrace.exit_status import EXIT_USAGE
from headrace.settings.config_file import TABLES
from headrace.settings.fleet import FleetSettings
from headrace.settings.table import typed, values_of
from headrace.settings.worker import WorkerSettings, worker_argv, worker_settings

Write = Callable[[str], Path]


def parsed(command: str, *arguments: str) -> argparse.Namespace:
    """The arguments as the command gets them."""
    parser = main.make_parser(command)
    words = in_force(parser.commands[command], command, arguments).words
    return parser.parse_args([command, *words])


def worker(*arguments: str) -> WorkerSettings:
    return worker_settings(parsed("worker", *arguments))


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What stderr gets."""
    try:
        status: object = main.main(arguments)
    except SystemExit as ended:
        status = ended.code
    assert status == EXIT_USAGE
    return capsys.readouterr().err


def test_the_command_line_counts_before_the_environment_and_that_before_the_file(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("[worker]\nlog-level = 'debug'\nmax-waiting = 7\nno-overlap = true\n")
    of_file = worker("--config", str(path))
    assert (of_file.log_level, of_file.max_waiting, of_file.overlap) == ("debug", 7, False)
    assert worker(f"--config={path}", "--max-waiting", "9").max_waiting == 9
    monkeypatch.setenv("HEADRACE_LOG", "error")
    assert worker("--config", str(path)).log_level == "error"
    assert worker("--config", str(path), "--log-level=warn").log_level == "warn"
    assert worker("--log-level=warn").max_waiting == WorkerSettings().max_waiting
    monkeypatch.setenv("HEADRACE_CONFIG", str(path))
    assert worker("--log-level=warn").max_waiting == 7
    monkeypatch.setenv("HEADRACE_CONFIG", "")
    assert worker().max_waiting == WorkerSettings().max_waiting


def test_the_file_of_the_flag_counts_before_that_of_the_environment(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("[worker]\nmax-waiting = 7\n")
    monkeypatch.setenv("HEADRACE_CONFIG", "/nonexistent/file")
    assert worker("--config", str(path)).max_waiting == 7


def test_a_command_reads_its_own_table_alone(write: Write) -> None:
    path = str(write("[worker]\nname = 'w'\n[serve]\nworkers = 3\nnonsense = 1\n"))
    assert worker("--config", path).name == "w"


def test_serve_hands_on_what_the_file_says_as_if_it_had_been_typed(write: Write) -> None:
    path = str(
        write(
            "[serve]\nmodel = './m'\nworkers = 2\npolicy = 'round-robin'\nmax-sequences = 5\n"
            "queue-floors = [0.5, 0.2, 0.1]\nadmin-listen = ['unix:/a', 'unix:/b']\n"
        )
    )
    args = parsed("serve", "--config", path, "--max-sequences=6")
    assert FleetSettings(**values_of(FleetSettings, args)).workers == 2
    assert worker_argv(args) == ["./m", "--max-sequences=6"]
    kept = typed(args)
    assert kept.texts["--admin-listen"] == ["unix:/a", "unix:/b"]
    assert kept.last("--policy") == "round-robin"
    assert kept.last("--queue-floors") == "0.5,0.2,0.1"
    assert "--config" not in kept
    assert parsed("serve", "./other", "--config", path).model == "./other"


def test_flags_of_no_table_are_set_as_well_and_may_stand_before_the_command(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(write("[chat]\nurl = 'http://h:1'\ntemperature = 0.5\nstats = true\n"))
    given: list[argparse.Namespace] = []
    monkeypatch.setattr(chat, "run", lambda args: given.append(args) or 0)  # type: ignore[func-returns-value]
    assert main.main(["--config", path, "chat"]) == 0
    assert main.main([f"--config={path}", "chat", "--url", "http://h:2"]) == 0
    assert [args.url for args in given] == ["http://h:1", "http://h:2"]
    assert given[0].temperature == 0.5 and given[0].stats


def test_flags_that_a_command_needs_may_stand_in_the_file(write: Write) -> None:
    path = str(write("[convert]\nas = 'deepseek_v3'\nout = './o'\n"))
    args = parsed("convert", "smollm2", "--config", path)
    assert (args.family, args.out) == ("deepseek_v3", "./o")


def test_a_key_of_the_environment_counts_before_a_file_of_keys_in_the_configuration(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(write("[chat]\napi-key-file = '/k'\n"))
    assert parsed("chat", "--config", path).api_key_file == Path("/k")
    monkeypatch.setenv("HEADRACE_API_KEY", "sesame")
    assert parsed("chat", "--config", path).api_key_file is None


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("max-wating = 5", "[worker] has no key 'max-wating'; did you mean max-waiting?"),
        ("max_waiting = 5", "[worker] has no key 'max_waiting'; did you mean max-waiting?"),
        ("zzz = 5", "[worker] has no key 'zzz'; its keys are the flags that --help shows"),
        ("config = 'g.toml'", "[worker] has no key 'config'"),
        ("help = true", "[worker] has no key 'help'"),
        ("secret = 'sesame'", "[worker] has no key 'secret'"),
        ("max-waiting = 0", "max-waiting: '0' is not a whole number from 1 to 2147483647"),
        ("max-waiting = 'many'", "max-waiting: 'many' is not a whole number"),
        ("max-waiting = 1.5", "max-waiting: '1.5' is not a whole number"),
        ("max-waiting = true", "max-waiting takes N, not true"),
        ("max-waiting = [1, 2]", "max-waiting: '1,2' is not a whole number"),
        ("no-overlap = 'yes'", "no-overlap is a switch: write true or false"),
        ("dtype = 'int9'", "dtype: 'int9' is not one of auto, float32"),
        ("max-num-seqs = 1\nmax-sequences = 2", "--max-sequences is set at "),
        ("max-waiting = 1\nmax-waiting = 2", "this is no TOML: duplicate key"),
        ("max-waiting = 1979-05-27", '"max-waiting" is of the type datetime, where'),
        ("max-sequences = 9\nmax-batched-tokens = 5", "--max-batched-tokens 5 is less than"),
    ],
)
def test_what_is_wrong_has_its_line_and_what_is_right(
    line: str, why: str, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(f"[worker]\n{line}\n")
    error = refused(["worker", "--config", str(path)], capsys)
    assert error.startswith("usage: headrace worker ")
    assert f"error: {path}:{2 + line.count(chr(10))}: {why}" in error
    assert "sesame" not in error and "Traceback" not in error


def test_what_the_router_of_serve_refuses_has_the_line_of_the_file(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write("[serve]\n\nheartbeat-ms = 0\n")
    error = refused(["serve", "--config", str(path)], capsys)
    assert error.startswith(f"error: {path}:3: --heartbeat-ms: is 0")


def test_files_that_cannot_be_read_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(path: Path) -> str:
        return refused(["chat", "--config", str(path)], capsys)

    path = tmp_path / "f.toml"
    assert f"error: {path}: the configuration cannot be read: No such file" in error(path)
    assert f"error: {tmp_path}: this is a folder" in error(tmp_path)
    path.write_bytes(b"[chat]\n\xff\n")
    assert f"error: {path}: line 2 is no text of UTF-8" in error(path)
    path.write_bytes(b"#" * (1 << 20) + b"\n")
    assert f"error: {path}: a file of configuration has 1048576 bytes at most" in error(path)
    path.write_text("[caht]\n")
    assert f'error: {path}:1: there is no command "caht"; did you mean [chat]?' in error(path)
    path.write_text("url = 'u'\n")
    assert f'error: {path}:1: "url" is in no table' in error(path)


def test_two_files_are_not_one(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write("[chat]\n"))
    error = refused(["--config", path, "chat", "--config", path], capsys)
    assert "--config was given twice" in error


def test_commands_that_measure_take_no_file(capfd: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--config", "f.toml", "mock"]) == EXIT_USAGE
    assert "--config" in capfd.readouterr().err


def test_every_command_with_a_table_has_the_flag_and_the_reader_knows_it(write: Write) -> None:
    path = str(write("".join(f"[{command}]\n" for command in TABLES)))
    for command in TABLES:
        parser = main.make_parser(command).commands[command]
        assert in_force(parser, command, ["--config", path]).words == ["--config", path]
        assert parser.options()
