"""Reads the part of the Dockerfile language that the files here use. What it does not know is an error, not a guess."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

KNOWN = frozenset(
    {
        *("ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK"),
        *("RUN", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR"),
    }
)


class DockerfileError(Exception):
    """A line cannot be read; the message has its number."""


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction, with its arguments as text and its flags (`--from=build`) apart."""

    line: int
    name: str
    flags: tuple[str, ...]
    text: str

    def flag(self, name: str) -> list[str]:
        return [flag.partition("=")[2] for flag in self.flags if flag.startswith(f"--{name}=")]

    def exec_form(self) -> list[str] | None:
        """The words of `["a", "b"]`; none where a shell would read the text."""
        if not self.text.startswith("["):
            return None
        try:
            words = json.loads(self.text)
        except ValueError as error:
            raise DockerfileError(f"line {self.line}: {error}") from error
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise DockerfileError(f"line {self.line}: not a list of words")
        return words

    def words(self) -> list[str]:
        return self.exec_form() or self.text.split()


@dataclass(slots=True)
class Stage:
    """From one FROM to the next."""

    name: str
    base: str
    steps: list[Step] = field(default_factory=list)

    def last(self, instruction: str) -> Step | None:
        return next((step for step in reversed(self.steps) if step.name == instruction), None)


def logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines without comments, those that end with a backslash joined to the next."""
    parts: list[str] = []
    first = 0
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        first = first or number
        parts.append(line.rstrip("\\").strip() if line.endswith("\\") else line.strip())
        if not line.endswith("\\"):
            yield first, " ".join(parts)
            parts, first = [], 0
    if parts:
        raise DockerfileError(f"line {first}: the last line ends with a backslash")


def steps(text: str) -> Iterator[Step]:
    for number, line in logical_lines(text):
        name, _, rest = line.partition(" ")
        if name.upper() not in KNOWN:
            raise DockerfileError(f"line {number}: {name} is not known here")
        words, flags = rest.strip(), list[str]()
        while found := re.match(r"(--[a-z-]+(?:=\S+)?)\s+", words):
            flags.append(found[1])
            words = words[found.end() :]
        yield Step(number, name.upper(), tuple(flags), words)


def expand(text: str, values: dict[str, str]) -> str:
    """`$NAME` and `${NAME}` replaced. A name without a value is an error."""

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if name not in values:
            raise DockerfileError(f"{name} has no value")
        return values[name]

    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", value, text)


def assignments(text: str) -> dict[str, str]:
    """Of `A=1 B=2`."""
    return dict(word.split("=", 1) for word in text.split() if "=" in word)


def stages(text: str) -> list[Stage]:
    """All stages in their order; bases have the values of the ARGs above the first FROM in them."""
    found: list[Stage] = []
    defaults: dict[str, str] = {}
    for step in steps(text):
        if step.name == "FROM":
            base, _, name = step.text.partition(" AS ")
            found.append(Stage(name.strip() or str(len(found)), expand(base.strip(), defaults)))
        elif found:
            found[-1].steps.append(step)
        elif step.name == "ARG":
            name, _, value = step.text.partition("=")
            defaults[name] = value
        else:
            raise DockerfileError(f"line {step.line}: {step.name} stands before the first FROM")
    return found


def ignore_rules(text: str) -> list[tuple[bool, re.Pattern[str]]]:
    """Of a .dockerignore: whether a line takes a path back in, and the paths that it is about."""
    rules: list[tuple[bool, re.Pattern[str]]] = []
    for line in text.splitlines():
        pattern = line.strip()
        if not pattern or pattern.startswith("#"):
            continue
        back = pattern.startswith("!")
        parts = pattern.lstrip("!").strip("/").split("/")
        regex = "".join(
            "(?:.*/)?" if part == "**" else re.escape(part).replace(r"\*", "[^/]*") + "/"
            for part in parts
        )
        rules.append((back, re.compile(regex.removesuffix("/") + "(?:/.*)?")))
    return rules


def is_sent(path: PurePosixPath, rules: list[tuple[bool, re.Pattern[str]]]) -> bool:
    """True if a build sees the file: the last line that is about it decides."""
    verdicts = [back for back, pattern in rules if pattern.fullmatch(str(path))]
    return verdicts[-1] if verdicts else True


def sent_files(root: Path, source: str, rules: list[tuple[bool, re.Pattern[str]]]) -> list[Path]:
    """The files below `source` that a build sees, links included."""
    start = root / source
    found = [start] if start.is_file() or start.is_symlink() else sorted(start.rglob("*"))
    return [
        path
        for path in found
        if (path.is_symlink() or path.is_file())
        and is_sent(PurePosixPath(path.relative_to(root).as_posix()), rules)
    ]
