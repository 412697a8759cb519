"""A table of flags: from its rows come the parser, what was typed as checked values, and the command line of a child.

A row stands beside the field that it fills: `mtp: int = setting("--mtp", ...)` in a dataclass. What was typed is kept
as text, too, and goes to other processes as it was typed: nothing is read, written out and read again.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from headrace.settings.values import FlagError, Whole, shortened

ALIKE = 0.75  # share of common letters from which a word is taken for a misspelt one; a guess


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One row: what is typed, what it does, and how its value is read."""

    name: str  # with its dashes
    group: str  # heading of the help
    help: str  # sentences: what it does, and the unit
    value: str | None = None  # what stands for the value in the help; None: the flag takes none
    choices: tuple[str, ...] = ()  # all values there are; empty where there are others
    default: str | None = None  # for the help; None: without the flag nothing is set
    read: Callable[[str], Any] = str  # raises ArgumentTypeError; bounds are checked here
    also: tuple[str, ...] = ()  # other spellings
    repeated: bool = False  # may be given several times
    variable: str | None = None  # holds the value where the flag is not given
    of_variable: Callable[[str], Any] = str  # reads that value; raises ArgumentTypeError
    means: bool = True  # of a flag without a value: what its field becomes
    in_serve: bool = False  # `serve` takes it, too, and hands it to its workers
    reloads: bool = False  # takes effect at SIGHUP where a file of configuration sets it

    def checked(self, text: str | None) -> Any:
        """The value of the field. Raises ArgumentTypeError."""
        if text is None:
            return self.means
        if self.choices and text not in self.choices:
            near = nearest([text], self.choices, 0.5)  # they are few
            hint = f"; did you mean {near[0]}?" if near else ""
            listed = ", ".join(self.choices)
            raise argparse.ArgumentTypeError(f"{shortened(text)} is not one of {listed}{hint}")
        return self.read(text)

    def described(self) -> str:
        """The help, with what every flag tells in the same words."""
        parts = [self.help]
        if self.choices and self.value is not None:
            parts.append(f"[one of: {', '.join(self.choices)}]")
        if self.repeated:
            parts.append("[may be repeated]")
        if self.variable is not None:
            parts.append(f"[variable: {self.variable}]")
        if self.default is not None:
            parts.append(f"[default: {self.default}]")
        return " ".join(parts)


def setting(
    name: str,
    *,
    default: Any = None,
    default_factory: Callable[[], Any] | None = None,
    shown: str | None = None,
    **row: Any,
) -> Any:
    """A field of a table. `shown` is the default in words, where the value itself does not say it."""
    if shown is None and row.get("value") is not None and default is not None:
        shown = str(default)
    metadata = {"flag": Flag(name=name, default=shown, **row)}
    if default_factory is not None:
        return field(default_factory=default_factory, metadata=metadata)
    return field(default=default, metadata=metadata)


class Table(Protocol):
    """A dataclass, some of whose fields are rows."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


def rows(table: type[Table]) -> dict[str, Flag]:
    """The flags of a table by the field that each fills."""
    fields = dataclasses.fields(table)
    return {one.name: one.metadata["flag"] for one in fields if "flag" in one.metadata}


def check_values(values: object, table: type[Table]) -> None:
    """Raise ValueError if `values`, which may never have been texts, has one that the flag of its row would refuse."""
    for name, flag in rows(table).items():
        value = getattr(values, name)
        if value is None:
            continue
        if flag.choices and value not in flag.choices:
            raise ValueError(f"{name} is {value!r}, it must be one of {', '.join(flag.choices)}")
        if isinstance(flag.read, Whole) and not flag.read.holds(value):
            raise ValueError(f"{name} is {value}, it must be {flag.read.least} to {flag.read.most}")


@dataclass(slots=True)
class Typed:
    """What was typed: the texts of each flag in their order, None for a flag that takes no value."""

    texts: dict[str, list[str | None]] = field(default_factory=dict[str, "list[str | None]"])

    def argv(self, flags: Iterable[Flag]) -> list[str]:
        """Those of `flags` that were typed, as a command line."""
        return [
            flag.name if text is None else f"{flag.name}={text}"
            for flag in flags
            for text in self.texts.get(flag.name, ())
        ]

    def last(self, name: str) -> str | None:
        """The value of a flag; None if it was not given."""
        return self.texts.get(name, [None])[-1]

    def __contains__(self, name: str) -> bool:
        return name in self.texts


def typed(args: argparse.Namespace) -> Typed:
    """What the flags of tables were given in `args`."""
    kept: Typed | None = getattr(args, _KEPT, None)
    return kept if kept is not None else Typed()


_KEPT = "typed_flags"


class Keep(argparse.Action):
    """Checks a value and keeps its text."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, *, flag: Flag, **rest: Any
    ) -> None:
        nargs = 0 if flag.value is None else None
        super().__init__(option_strings, dest, nargs=nargs, default=argparse.SUPPRESS, **rest)
        self.flag = flag

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        del parser, option_string  # argparse gives them to every action
        flag, kept = self.flag, typed(namespace)
        if flag.name in kept and not flag.repeated:
            raise argparse.ArgumentError(self, "it was given twice; give it once")
        text = values if isinstance(values, str) else None
        try:
            flag.checked(text)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentError(self, str(error)) from error
        kept.texts.setdefault(flag.name, []).append(text)
        setattr(namespace, _KEPT, kept)


def add_flags(parser: argparse.ArgumentParser, flags: Iterable[Flag]) -> None:
    """Let `parser` take these flags, each under the heading of its group."""
    groups: dict[str, argparse._ArgumentGroup] = {}  # pyright: ignore[reportPrivateUsage]  argparse names no other
    for flag in flags:
        if flag.group not in groups:
            groups[flag.group] = parser.add_argument_group(flag.group)
        groups[flag.group].add_argument(
            flag.name,
            *flag.also,
            action=Keep,
            flag=flag,
            metavar=flag.value,
            help=flag.described().replace("%", "%%"),
        )


def values_of(table: type[Table], args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `table` that flags or variables of the environment set. Raises FlagError."""
    kept = typed(args)
    found: dict[str, Any] = {}
    for name, flag in rows(table).items():
        origin = flag.name
        try:
            if flag.name in kept:
                found[name] = flag.checked(kept.last(flag.name))
            elif flag.variable is not None and (text := os.environ.get(flag.variable)):
                origin = flag.variable
                found[name] = flag.of_variable(text)
        except argparse.ArgumentTypeError as error:
            raise FlagError(f"{origin}: {error}") from error
    return found


def nearest(words: Iterable[str], known: Iterable[str], alike: float = ALIKE) -> list[str]:
    """For each word the known one that is most like it, where there is such a one."""
    known = list(known)
    near = [difflib.get_close_matches(word[:100], known, n=1, cutoff=alike) for word in words]
    return [best for one in near for best in one]
