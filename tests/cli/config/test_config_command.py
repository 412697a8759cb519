"""`headrace config`: what is in force and where it comes from, and what is wrong with a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.exit_status import EXIT_USAGE

Write = Callable[[str], Path]


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main.main(["config", "show", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main.main(["config", *arguments])
    assert ended.value.code == EXIT_USAGE
    return capsys.readouterr().err


def test_each_value_has_its_origin(
    write: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(
        "[serve]\nmodel = './m'\nworkers = 2\npolicy = 'kv'\nlog-level = 'info'\npublic-metrics = true\n"
    )
    monkeypatch.setenv("HEADRACE_LOG", "debug")
    lines = shown(capsys, "serve", "--config", str(path), "--policy=round-robin", "--no-overlap")
    assert lines[0] == "[serve]"
    for line in (
        f'model = "./m"  # {path}:2',
        f"workers = 2  # {path}:3",
        'policy = "round-robin"  # --policy',
        "no-overlap = true  # --no-overlap",
        'log-level = "debug"  # HEADRACE_LOG',
        f"public-metrics = true  # {path}:6",
        "# port: 8000 (default)",
        "# kv-memory: chosen by the worker from the free memory (default)",
        "# public-metrics: false (default)",
        "# api-key-file: none (default)",
    ):
        assert (line in lines) == (line != "# public-metrics: false (default)"), line
    assert not any("config" in line for line in lines)


def test_what_is_shown_is_such_a_file_again(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        '[router]\npolicy = "kv"\nqueue-floors = [0.5, 0.2, 0.1]\nadmin-listen = ["unix:/a", "unix:/b"]\n'
        'allowed-origins = "https://a.example,https://b.example"\nresponse-store = "a \\"b\\" c"\n'
    )
    first = shown(capsys, "router", "--config", str(write(text)))
    path = write("\n".join(first))
    assert main.main(["config", "check", str(path)]) == 0
    capsys.readouterr()
    again = shown(capsys, "router", "--config", str(path))
    values = [[line.partition("  #")[0] for line in lines] for lines in (first, again)]
    assert values[0] == values[1]
    assert 'response-store = "a \\"b\\" c"' in values[0]


def test_secrets_are_not_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SECRET", "API_KEY", "ADMIN_KEY"):
        monkeypatch.setenv(f"HEADRACE_{name}", "sesame-sesame")
    for command in ("serve", "router", "worker", "chat", "top"):
        lines = shown(capsys, command)
        assert "sesame" not in "\n".join(lines)
        held = [line for line in lines if "holds the secret, which is not shown" in line]
        assert held, command


def test_without_a_command_each_table_of_the_file_is_shown(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write("[router]\nport = 1\n[chat]\nurl = 'u'\n"))
    lines = shown(capsys, "--config", path)
    assert [line for line in lines if line.startswith("[")] == ["[router]", "[chat]"]
    assert f"port = 1  # {path}:2" in lines
    assert "name a command, such as serve, or a file" in refused(capsys, "show")
    assert "sets nothing" in refused(capsys, "show", "--config", str(write("")))


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("show", "serv"), "has a table for; did you mean serve?"),
        (("show", "bench"), "'bench' is no command that a file of configuration has a table for"),
        (("show", "worker", "--max-waiting=0"), "--max-waiting: '0' is not a whole number"),
        (("show", "worker", "--max-wating=0"), "did you mean --max-waiting?"),
        (("check",), "check takes one FILE"),
        (("check", "/nonexistent/file"), "/nonexistent/file: the configuration cannot be read"),
    ],
)
def test_what_is_refused_is_named(
    arguments: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert why in refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[worker]\nmax-wating = 1\n", ":2: [worker] has no key 'max-wating'"),
        ("[worker]\nmax-sequences = 9\nmax-batched-tokens = 5\n", ":3: --max-batched-tokens 5"),
        ("[serve]\nprefill = 1\n", ":2: --prefill"),
        ("[serve]\nmodel = './none'\n", ":2: there is no model at ./none"),
        ("[router]\nport = 8000\nheartbeat-ms = 0\n", ":3: --heartbeat-ms: is 0"),
        ("[chat]\n\ntemperature = 'warm'\n", ":3: temperature: "),
    ],
)
def test_check_finds_what_the_command_would_refuse(
    text: str, why: str, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(text)
    assert f"error: {path}{why}" in refused(capsys, "check", str(path))


def test_check_says_that_nothing_is_wrong(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write("[serve]\nworkers = 2\npolicy = 'kv'\n[worker]\n[chat]\nurl = 'u'\n")
    assert main.main(["config", "check", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: 3 keys, nothing is wrong\n"
