"""How `headrace` reads arguments: help keeps its lines, no flag is abbreviated, an unknown one names the nearest."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from headrace.settings.table import Keep, nearest
from headrace.settings.values import FlagError, shortened

Hint = Callable[[list[str]], str]
"""What else is known of unknown flags, to follow the error; empty where nothing is."""


class Parser(argparse.ArgumentParser):
    """One command, or the program: then `commands` has the parser of each command by its name."""

    def __init__(self, **options: Any) -> None:
        options["formatter_class"] = _Format
        super().__init__(allow_abbrev=False, **options)
        self.commands: dict[str, Parser] = {}
        self.variables: dict[str, str] = {}  # of flags that are in no table

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

    def scan(self, arguments: Sequence[str]) -> tuple[dict[str, list[str | None]], list[str]]:
        """The texts of each flag by its first name, and the words that belong to no flag; nothing is checked."""
        flags: dict[str, list[str | None]] = {}
        words: list[str] = []
        rest = iter(arguments)
        for word in rest:
            if word == "--":
                words += rest
                break
            name, has_text, text = word.partition("=")
            action = self._option_string_actions.get(name)
            if action is None:
                words.append(word)
                continue
            value = text if has_text else None
            if not has_text and action.nargs != 0:
                value = next(rest, None)
            flags.setdefault(action.option_strings[0], []).append(value)
        return flags, words

    def options(self) -> list[Option]:
        """All that a file of configuration can set, in the order of the help."""
        hidden = (argparse.SUPPRESS,)
        shown = [action for action in self._actions if action.help not in hidden]
        flags = [
            a
            for a in shown
            if a.option_strings and not {"--help", "--config"} & {*a.option_strings}
        ]
        places = [a for a in self._actions if not a.option_strings]
        # of one word that may be left out it is clear whether it is there
        optional = [a for a in places if len(places) == 1 and a.nargs == "?"]
        return [Option(self, action) for action in (*optional, *flags)]

    def option(self, key: str) -> Option | None:
        """The flag with this name, which has no dashes here; also one of its other names."""
        return next((option for option in self.options() if key in option.keys), None)

    def unknown_key(self, command: str, key: str) -> str:
        """What is said of a key that is no flag."""
        found = nearest([key], [name for option in self.options() for name in option.keys])
        hint = f"did you mean {found[0]}?" if found else "its keys are the flags that --help shows"
        return f"[{command}] has no key {shortened(key)}; {hint}"

    def check_value(self, action: argparse.Action, text: str) -> None:
        """Raise FlagError for a text that this flag does not take."""
        try:
            if isinstance(action, Keep):
                action.flag.checked(text)
            else:
                self._get_values(action, [text])
        except (argparse.ArgumentTypeError, argparse.ArgumentError) as error:
            why = error.message if isinstance(error, argparse.ArgumentError) else error
            raise FlagError(str(why)) from error

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


@dataclass(frozen=True, slots=True)
class Option:
    """A flag, or an argument that may be left out, as a file of configuration sets it."""

    parser: Parser
    action: argparse.Action

    @property
    def is_flag(self) -> bool:
        return bool(self.action.option_strings)

    @property
    def name(self) -> str:
        """With its dashes, if it is a flag."""
        return self.action.option_strings[0] if self.is_flag else self.action.dest

    @property
    def keys(self) -> list[str]:
        """Its names in a file."""
        names = self.action.option_strings or [self.action.dest]
        return [name.removeprefix("--") for name in names]

    @property
    def is_switch(self) -> bool:
        return self.is_flag and self.action.nargs == 0

    @property
    def is_repeated(self) -> bool:
        return isinstance(self.action, Keep) and self.action.flag.repeated

    @property
    def variable(self) -> str | None:
        """The variable of the environment that counts where the flag is not given."""
        if isinstance(self.action, Keep):
            return self.action.flag.variable
        return self.parser.variables.get(self.name)

    @property
    def default(self) -> str | None:
        """For people; None: without the flag nothing is set."""
        if isinstance(self.action, Keep):
            return self.action.flag.default
        default = self.action.default
        return None if default is None or isinstance(default, bool) else str(default)

    def words(self, value: bool | str | list[str]) -> list[str]:
        """The words of a command line that say the same. Raises FlagError for a value that is none of this flag."""
        key = self.keys[0]
        if self.is_switch:
            if not isinstance(value, bool):
                raise FlagError(f"{key} is a switch: write true or false")
            return [self.name] if value else []
        shown = self.action.metavar if isinstance(self.action.metavar, str) else "a value"
        if isinstance(value, bool):
            raise FlagError(f"{key} takes {shown}, not {str(value).lower()}")
        texts = [value] if isinstance(value, str) else value
        if isinstance(value, list) and not self.is_repeated:
            texts = [",".join(value)]  # as a list is typed
        for text in texts:
            try:
                self.parser.check_value(self.action, text)
            except FlagError as error:
                raise FlagError(f"{key}: {error}") from error
        return [f"{self.name}={text}" for text in texts] if self.is_flag else texts


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
