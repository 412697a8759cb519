"""Unknown flags: the usage of the command that was typed, and the nearest flag that it has."""

from __future__ import annotations

import pytest

from headrace.cli import main, plot
from headrace.exit_status import EXIT_USAGE


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What stderr gets."""
    with pytest.raises(SystemExit) as ended:
        main.main(arguments)
    assert ended.value.code == EXIT_USAGE
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        (["serve", "--wokers=2"], "--workers"),
        (["worker", "--sercet-file", "x"], "--secret-file"),
        (["chat", "--max-token", "5"], "--max-tokens"),
        (["explain", "--jsn"], "--json"),
        (["drain", "w", "--bugdet", "3s"], "--budget"),
        (["fetch", "--hepl"], "--help"),
        (["convert", "smollm2", "--mpt"], "--mtp"),
        (["version", "--hlep"], "--help"),
        (["bench", "plot", "--uot", "x"], "--out"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_an_unknown_flag_names_the_nearest_of_its_command(
    arguments: list[str], nearest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(arguments, capsys)
    command = " ".join(arguments[: 2 if arguments[0] == "bench" else 1])
    assert error.startswith(f"usage: headrace {command} ")
    assert error.endswith(f"; did you mean {nearest}?\n")


def test_a_flag_before_the_command_is_of_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(["--versoin"], capsys)
    assert error.startswith("usage: headrace [-h]")
    assert error.endswith("unrecognized arguments: --versoin; did you mean --version?\n")


@pytest.mark.parametrize(("word", "nearest"), [("serv", "serve"), ("chta", "chat")])
def test_a_misspelt_command_names_the_nearest(
    word: str, nearest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused([word], capsys)
    assert error.startswith("usage: headrace [-h]")
    assert error.endswith(f"{word!r} is not a command; did you mean {nearest}?\n")
    assert "invalid choice: 'x'" in refused(["x"], capsys)


def test_values_are_not_repeated_and_hidden_flags_not_offered(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = refused(["chat", "--api-kye=sk-123"], capsys)
    assert "sk-123" not in error
    assert "--api-key?" not in error, "which is there only to be refused"


def test_words_too_many_are_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(["chat", "hello"], capsys)
    assert error.startswith("usage: headrace chat ")
    assert error.endswith("unrecognized arguments: hello\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["chat", "--temperature", "-1", "--help"],
        ["chat", "--system=--tone soft", "--help"],
        ["chat", "--system", "--tone soft", "--help"],
        ["explain", "--help", "--", "--odd-id"],
    ],
    ids=" ".join,
)
def test_values_that_look_like_flags_are_values(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(arguments)
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: headrace {arguments[0]}")


def test_a_plot_without_a_file_prints_its_own_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        plot.run([])
    assert ended.value.code == EXIT_USAGE
    assert capsys.readouterr().err.startswith("usage: headrace bench plot ")
