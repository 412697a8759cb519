"""What a file of configuration adds to a command line: words of the same parser, before those that were typed.

So a flag has one definition, and whatever reads the command line reads the file. Words are left out of flags that were
typed, or whose variable of the environment is set.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.settings.config_file import FileSetting, config_path, read_config
from headrace.settings.values import FlagError

if TYPE_CHECKING:
    from headrace.cli.parser import Option, Parser

CONFIG = "--config"


@dataclass(slots=True)
class InForce:
    """What a command is given, and from where."""

    typed: dict[str, list[str | None]]  # by the name of the flag
    typed_words: list[str]  # of arguments that are no flags
    file: dict[str, FileSetting] = field(default_factory=dict[str, FileSetting])
    words: list[str] = field(default_factory=list[str])  # of the whole command line
    path: str | None = None  # of the file

    def located(self, text: str) -> str:
        """An error with the place of the first flag of the file that it names."""
        named = (self.file.get(name) for name in re.findall(r"--[a-z][a-z0-9-]*", text))
        # arguments are no flags, and errors name what they are
        words = (
            one for name, one in self.file.items() if name[0] != "-" and str(one.value) in text
        )
        setting = next((one for one in (*named, *words) if one is not None), None)
        if setting is None:
            return text
        head, error, rest = text.rpartition("error: ")
        return f"{head}{error}{setting.place}: {rest}"


def given(args: argparse.Namespace) -> InForce:
    """What `main` found out of the command line of `args`."""
    return getattr(args, "given", InForce({}, []))


def first_config(arguments: Sequence[str]) -> list[str]:
    """The arguments with a `--config FILE` that stands before the command put behind it."""
    moved: list[str] = []
    rest = list(arguments)
    while rest and (rest[0] == CONFIG or rest[0].startswith(f"{CONFIG}=")):
        taken = 2 if rest[0] == CONFIG else 1
        moved += rest[:taken]
        rest = rest[taken:]
    return [*rest[:1], *moved, *rest[1:]] if rest else moved


def in_force(parser: Parser, command: str, arguments: Sequence[str]) -> InForce:
    """What `command` is given by `arguments`, the environment and the file that these name. Raises FlagError."""
    typed, words = parser.scan(arguments)
    found = InForce(typed, words)
    named = typed.get(CONFIG, [None])
    if len(named) > 1:
        raise FlagError(f"{CONFIG} was given twice; give it once")
    found.path = path = config_path(named[-1])
    settings = [] if path is None else read_config(path)
    added, last = _file_words(parser, command, settings, found)
    found.words = [*added, *arguments, *last]
    return found


def check_table(parser: Parser, command: str, settings: Iterable[FileSetting]) -> InForce:
    """A table as if its command were given nothing else. Raises FlagError."""
    found = InForce({}, [])
    added, last = _file_words(parser, command, settings, found)
    found.words = [*added, *last]
    return found


def _file_words(
    parser: Parser, command: str, settings: Iterable[FileSetting], found: InForce
) -> tuple[list[str], list[str]]:
    """Words before those that were typed, and after them; notes in `found` what counts."""
    before: list[str] = []
    after: list[str] = []
    seen: dict[str, str] = {}
    for setting in settings:
        if setting.command != command:
            continue
        try:
            option = parser.option(setting.key)
            if option is None:
                raise FlagError(parser.unknown_key(command, setting.key))
            words = option.words(setting.value)
            if option.name in seen:
                raise FlagError(f"{option.name} is set at {seen[option.name]} already; set it once")
        except FlagError as error:
            raise FlagError(f"{setting.place}: {error}") from error
        seen[option.name] = setting.place
        if not _is_set(option, found):
            found.file[option.name] = setting
            (before if option.is_flag else after).extend(words)
    return before, after


def _is_set(option: Option, found: InForce) -> bool:
    """Whether the command line or the environment says it."""
    if not option.is_flag:
        return bool(found.typed_words)
    return option.name in found.typed or bool(option.variable and os.environ.get(option.variable))
