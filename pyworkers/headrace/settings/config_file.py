"""The file of `--config`: a table for each command, a key for each flag. It is read in Rust, for the router as well."""

from __future__ import annotations

import os
from dataclasses import dataclass

from headrace.errors import ConfigError
from headrace.settings.values import FlagError

CONFIG_VARIABLE = "HEADRACE_CONFIG"
TABLES = (
    "serve",
    "router",
    "worker",
    "chat",
    "explain",
    "top",
    "drain",
    "key",
    "fetch",
    "convert",
    "plan",
)
"""Commands that have a table. Those that measure have none, so that the command line beside a result says all."""


@dataclass(frozen=True, slots=True)
class FileSetting:
    """A key of a file, and its value as a flag can be given it: a switch, a text or several."""

    command: str
    key: str
    place: str  # FILE:LINE
    value: bool | str | list[str]


def read_config(path: str) -> list[FileSetting]:
    """In the order of the lines. Raises FlagError, with the line where there is one."""
    from headrace import _core  # not at the top: commands without a file do without

    try:
        settings = _core.read_config(path)
    except ConfigError as error:
        raise FlagError(str(error)) from error
    return [
        FileSetting(one["command"], one["key"], f"{path}:{one['line']}", one["value"])
        for one in settings
    ]


def config_path(typed: str | None) -> str | None:
    """The file that counts: the one of `--config`, else that of the environment."""
    return typed or os.environ.get(CONFIG_VARIABLE) or None
