"""The table of a worker: each row is taken, refused, shown, and handed to the workers of `serve`."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.parser import Parser
from headrace.engine.config import EngineConfig
from headrace.settings import worker
from headrace.settings.engine import EngineSettings, engine_values
from headrace.settings.table import Flag, add_flags, rows
from headrace.settings.values import FlagError
from headrace.settings.worker import WORKER_FLAGS, WorkerSettings, worker_settings

HANDED_ON = {name: flag for name, flag in WORKER_FLAGS.items() if flag.in_serve}


def parse(argv: list[str], flags: dict[str, Flag] = WORKER_FLAGS) -> argparse.Namespace:
    parser = Parser(prog="headrace worker")
    worker.add_model(parser)
    add_flags(parser, flags.values())
    return parser.parse_args(argv)


def told(*argv: str) -> WorkerSettings:
    """What `headrace worker` makes of its flags."""
    return worker_settings(parse(list(argv)))


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The last line of what the person sees."""
    with pytest.raises(SystemExit) as ended:
        parse(list(argv))
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def example(flag: Flag, folder: Path) -> str:
    """A value of the flag that is not its default."""
    if flag.choices:
        return next(choice for choice in flag.choices if choice != flag.default)
    known = {"SIZE": "1GiB", "LEVEL": "debug", "NAME": "--odd name", "HOST": "10.0.0.1"}
    known |= {"ROUTER[,ROUTER]": "unix:/a,b:1", "MS": "300"}
    if flag.value == "FILE":
        (folder / "file").write_text("what it holds\n")
        return str(folder / "file")
    return known.get(flag.value or "", "3")


def typed_with(flag: Flag, folder: Path) -> list[str]:
    return [flag.name if flag.value is None else f"{flag.name}={example(flag, folder)}"]


@pytest.mark.parametrize("field", WORKER_FLAGS)
def test_every_flag_fills_its_field_and_no_other(field: str, tmp_path: Path) -> None:
    usual = dataclasses.asdict(told("--name=w"))
    flags = typed_with(WORKER_FLAGS[field], tmp_path)
    if field == "mtp_fixed":
        usual["mtp"] = 1
        flags.append("--mtp=1")
    if field == "http_host":
        usual["http_port"] = 1
        flags.append("--http-port=1")
    pair = ("router_client_cert", "router_client_key")
    if field in pair:  # one needs the other
        other = pair[1 - pair.index(field)]
        flags += typed_with(WORKER_FLAGS[other], tmp_path)
    changed = dataclasses.asdict(told(*([] if field == "name" else ["--name=w"]), *flags))
    also = {other for other in pair if field in pair and other != field}
    assert {name for name in usual if usual[name] != changed[name]} - also == {field}


@pytest.mark.parametrize("field", HANDED_ON)
def test_what_serve_was_told_reaches_its_workers(field: str, tmp_path: Path) -> None:
    flags = typed_with(HANDED_ON[field], tmp_path)
    if field == "mtp_fixed":
        flags.append("--mtp=1")
    argv = worker.worker_argv(parse(flags, HANDED_ON))
    assert sorted(argv) == sorted(flags), "as it was typed"
    assert told("--name=w", *argv) == told("--name=w", *flags)


def test_a_model_and_all_flags_are_handed_on_together(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    flags = [typed_with(flag, tmp_path)[0] for flag in HANDED_ON.values()]
    args = parse([str(tmp_path), *flags], HANDED_ON)
    argv = worker.worker_argv(args)
    assert argv[0] == str(tmp_path)
    assert told("--name=w", *argv) == told("--name=w", str(tmp_path), *flags)


@pytest.mark.parametrize("flag", WORKER_FLAGS.values(), ids=lambda flag: flag.name)
def test_every_flag_says_what_it_does_and_its_default(flag: Flag) -> None:
    assert flag.help[0].isalnum() and flag.help.endswith("."), flag.help
    assert len(flag.help.split()) >= 4
    field = next(f for f in dataclasses.fields(WorkerSettings) if f.metadata.get("flag") is flag)
    if flag.value is not None and field.default is not None:
        assert flag.default, "of a value that is set without the flag"


@pytest.mark.parametrize(
    "flag", [f for f in WORKER_FLAGS.values() if f.value is not None], ids=lambda f: f.name
)
def test_no_flag_is_given_twice_or_without_its_value(
    flag: Flag, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    once = typed_with(flag, tmp_path)
    for spelling in (flag.name, *flag.also):
        again = f"{spelling}={example(flag, tmp_path)}"
        assert "was given twice; give it once" in refused(capsys, *once, again)
        assert "expected one argument" in refused(capsys, spelling)


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--dtype=float8"], "'float8' is not one of auto, float32"),
        (["--dtype=flot32"], "did you mean float32?"),
        (["--role=decoder"], "did you mean decode?"),
        (["--device="], "'' is not one of auto, cpu, cuda"),
        (["--mtp=4"], "'4' is not a whole number from 0 to 3"),
        (["--mtp", "-1"], "'-1' is not a whole number from 0 to 3"),
        (["--max-sequences=0"], "'0' is not a whole number from 1 to"),
        (["--block-tokens=many"], "'many' is not a whole number"),
        (["--kv-memory=lots"], "'lots' is not a size"),
        (["--no-overlap=yes"], "ignored explicit argument 'yes'"),
        (["--router=,"], "it names no address"),
        (["--router-ca=/nonexistent"], "there is no file '/nonexistent'"),
        (["--secret-file=/nonexistent"], "cannot read '/nonexistent': No such file"),
        (["--log-level=loud"], "'loud' is not a level"),
        (["--context-tokens", "9" * 100_000], "(100000 characters) is not a whole number"),
    ],
    ids=lambda value: value[0][:30] if isinstance(value, list) else "",
)
def test_wrong_values_are_named(
    argv: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told_why = refused(capsys, *argv)
    assert why in told_why
    assert argv[0].partition("=")[0] in told_why
    assert len(told_why) < 300


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (
            ["--max-sequences=512", "--max-batched-tokens=256"],
            "--max-batched-tokens 256 is less than --max-sequences 512",
        ),
        (["--mtp-fixed"], "--mtp-fixed needs --mtp TOKENS"),
        (["--mtp-fixed", "--mtp=0"], "--mtp-fixed needs --mtp TOKENS"),
        (["--role=prefill", "--no-transfer"], "nothing to do"),
    ],
)
def test_flags_in_conflict_are_refused_together(argv: list[str], why: str) -> None:
    with pytest.raises(FlagError, match=why):
        told(*argv)


def test_secrets_come_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HEADRACE_SECRET", raising=False)
    assert told().secret is None
    monkeypatch.setenv("HEADRACE_SECRET", "from the environment")
    assert told().secret == "from the environment"
    (tmp_path / "secret").write_text("from a file\r\n")
    assert told(f"--secret-file={tmp_path}/secret").secret == "from a file"
    monkeypatch.setenv("HEADRACE_SECRET", "")
    assert told().secret is None
    for data, why in ((b"", "is empty"), (b"\n", "is empty"), (b"\xff\xfe", "it is not text")):
        (tmp_path / "secret").write_bytes(data)
        assert why in refused(capsys, f"--secret-file={tmp_path}/secret")


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("debug", "debug"),
        ("warning", "warning"),
        ("WARN", "warn"),
        ("off", "off"),
        ("info,headrace_router::fleet=debug", "info"),
        ("h2=debug", "info"),
        ("h2=trace,error", "error"),
    ],
)
def test_a_filter_of_the_router_is_a_level_of_a_worker(
    text: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert told(f"--log-level={text}").log_level == level
    monkeypatch.setenv("HEADRACE_LOG", text)
    assert told().log_level == level
    assert level in worker.LOG_LEVELS


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_LOG", "loud")
    with pytest.raises(FlagError, match="HEADRACE_LOG: 'loud' is not a level"):
        told()
    assert told("--log-level=info").log_level == "info", "a flag goes before a variable"


def test_certificates_to_trust_mean_tls(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").touch()
    assert told(f"--router-ca={tmp_path}/ca.pem").dials_tls
    assert told("--router-tls").dials_tls
    assert not told().dials_tls


@pytest.mark.parametrize(
    ("flags", "cpu", "cuda"),
    [
        ([], (16, 64, 256), (64, 512, 8192)),
        (["--max-sequences=5"], (16, 5, 256), (64, 5, 8192)),
        (["--max-num-seqs=1000"], (16, 1000, 1000), (64, 1000, 8192)),
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
        sizes = worker.step_sizes(told(*flags), device)
        assert sizes == worker.StepSizes(
            block_tokens=block, max_sequences=sequences, max_batched_tokens=batched
        )


@pytest.mark.parametrize("field", rows(EngineSettings))
def test_a_row_of_the_engine_reaches_its_config(field: str, tmp_path: Path) -> None:
    flags = typed_with(WORKER_FLAGS[field], tmp_path)
    if field == "mtp_fixed":
        flags.append("--mtp=1")
    typed = told(*flags)
    config = EngineConfig(num_blocks=4, **engine_values(typed))
    assert getattr(config, field) == getattr(typed, field) != getattr(told(), field)


def test_the_engine_is_told_nothing_but_rows_and_what_the_device_and_the_memory_say() -> None:
    fields = {one.name for one in dataclasses.fields(EngineConfig)}
    sizes = {one.name for one in dataclasses.fields(worker.StepSizes)}
    assert fields == rows(EngineSettings).keys() | sizes | {"num_blocks"}
    usual = told()
    assert engine_values(usual) == engine_values(EngineConfig(num_blocks=4))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"mtp": -1}, "mtp is -1, it must be 0 to 3"),
        ({"mtp": 4}, "mtp is 4, it must be 0 to 3"),
        ({"max_waiting": 0}, "max_waiting is 0, it must be 1 to"),
        ({"context_tokens": 0}, "context_tokens is 0, it must be 1 to"),
        ({"mtp_verify": "hope"}, "mtp_verify is 'hope', it must be one of noise, rejection"),
    ],
)
def test_a_config_keeps_the_bounds_of_the_rows(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        EngineConfig(num_blocks=4, **wrong)


def test_no_two_rows_have_one_name() -> None:
    spellings = [name for flag in rows(WorkerSettings).values() for name in (flag.name, *flag.also)]
    assert len(spellings) == len(set(spellings))


def test_a_host_of_the_endpoint_needs_its_port(capsys: pytest.CaptureFixture[str]) -> None:
    assert (told().http_port, told().http_host) == (None, "127.0.0.1")
    with pytest.raises(FlagError, match="--http-host needs --http-port"):
        told("--http-host=0.0.0.0")
    assert "'65536' is not a whole number from 0 to 65535" in refused(capsys, "--http-port=65536")
