"""How `headrace` reads arguments: help keeps its lines, no flag is abbreviated, an unknown one names the nearest."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from headrace.settings.table import nearest
from headrace.settings.values import shortened

Hint = Callable[[list[str]], str]
"""What else is known of unknown flags, to follow the error; empty where nothing is."""


class Parser(argparse.ArgumentParser):
    """One command, or the program: then `commands` has the parser of each command by its name."""

    def __init__(self, **options: Any) -> None:
        options["formatter_class"] = _Format
        super().__init__(allow_abbrev=False, **options)
        self.commands: dict[str, Parser] = {}

    def refuse_unknown(self, arguments: Sequence[str], hint: Hint | None = None) -> None:
        """Print this command's usage and end with status 2 where a flag is none of this command's.

        Called before the arguments are parsed: argparse would print the usage of the whole program, and would first
        complain of what is missing. Values are not repeated: one of them may be a key.
        """
        unknown = self._unknown_flags(arguments)
        if unknown:
            told = hint(unknown) if hint is not None else ""
            self.error(
                f"unrecognized arguments: {' '.join(unknown)}{told or self._nearest(unknown)}"
            )

    def refuse_command(self, words: Sequence[str]) -> None:
        """Print the usage and end with status 2 where the first word is not a command, but a misspelt one."""
        for word in words:
            if near := nearest([word], self.commands):
                self.error(f"{shortened(word)} is not a command; did you mean {near[0]}?")

    def refuse(self, flag: str, instead: str) -> None:
        """Let `flag` name what to use instead of it. The error does not repeat the value, which may be a secret."""
        self.add_argument(flag, action=_Refused, instead=instead)

    def _unknown_flags(self, arguments: Sequence[str]) -> list[str]:
        """What argparse takes for a flag and finds nowhere, without the values."""
        unknown: list[str] = []
        for word in arguments:
            if word == "--":
                break
            name = word.partition("=")[0]
            is_flag = len(word) > 1 and word[0] == "-" and not _is_number(word)
            if is_flag and name not in self._option_string_actions and " " not in word:
                unknown.append(name)
        return unknown

    def _nearest(self, unknown: list[str]) -> str:
        flags = [
            flag
            for action in self._actions
            if action.help != argparse.SUPPRESS
            for flag in action.option_strings
        ]
        found = nearest(unknown, flags)
        return f"; did you mean {', '.join(found)}?" if found else ""


class _Refused(argparse.Action):
    """A flag that is not taken, and not in the help."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, *, instead: str, **rest: Any
    ) -> None:
        super().__init__(option_strings, dest, nargs="?", help=argparse.SUPPRESS, **rest)
        self._instead = instead

    def __call__(self, *_: Any, **_more: Any) -> NoReturn:
        raise argparse.ArgumentError(self, self._instead)


def _is_number(word: str) -> bool:
    """Values may be negative; no command has a flag that is a number."""
    try:
        float(word)
    except ValueError:
        return False
    return True


class _Format(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=100)
