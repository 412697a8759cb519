"""`headrace bench`, `headrace mock` and `headrace sim` are the programs of the bench crate, flags and all."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ENV = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def headrace(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headrace", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=ENV,
    )


def test_help_names_the_command_as_it_was_typed() -> None:
    done = headrace("bench", "load", "--help")
    assert done.returncode == 0
    assert "Usage: headrace bench load" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 110


def test_each_is_in_the_list_of_commands() -> None:
    done = headrace("--help")
    for command in ("bench", "mock", "sim"):
        assert f"\n    {command} " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "why"),
    [
        (["bench", "juggle"], 2, "unrecognized subcommand 'juggle'"),
        (["bench", "load", "--no-such-flag"], 2, "--no-such-flag"),
        (["bench", "load", "--target", "127.0.0.1:1"], 1, "127.0.0.1:1"),
    ],
)
def test_what_is_wrong_is_named(arguments: list[str], status: int, why: str) -> None:
    done = headrace(*arguments)
    assert done.returncode == status
    assert why in done.stderr
    assert "Traceback" not in done.stderr
