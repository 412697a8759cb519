"""Keys that commands send, from files or the environment. No command line takes one: all users can read those."""

from __future__ import annotations

import argparse
import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.settings.values import SettingsError

if TYPE_CHECKING:
    from headrace.cli.parser import Parser

API_KEY_FROM = "--api-key-file FILE or the variable HEADRACE_API_KEY"
ADMIN_KEY_FROM = "--admin-key-file FILE or the variable HEADRACE_ADMIN_KEY"


def read_key(flag: str, path: Path | None, variable: str) -> str | None:
    """The first key of a file (lines of KEY or TENANT KEY), otherwise the variable's. Raises SettingsError."""
    if path is None:
        return os.environ.get(variable) or None
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise SettingsError(f"{flag}: cannot read {path}: {reason}") from error
    for line in text.splitlines():
        words = list(itertools.takewhile(lambda word: not word.startswith("#"), line.split()))
        if words:
            return words[-1]
    raise SettingsError(f"{flag}: {path} holds no key; write one a line")


def api_key(args: argparse.Namespace) -> str | None:
    """What `add_api_key` took. Raises SettingsError."""
    return read_key("--api-key-file", args.api_key_file, "HEADRACE_API_KEY")


def admin_key(args: argparse.Namespace) -> str | None:
    """What `add_admin_key` took. Raises SettingsError."""
    return read_key("--admin-key-file", args.admin_key_file, "HEADRACE_ADMIN_KEY")


def add_api_key(parser: Parser) -> None:
    """The key of a client."""
    parser.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="File whose first key is sent. [variable: HEADRACE_API_KEY, which holds the key]",
    )
    refuse(parser, "--api-key", API_KEY_FROM)


def add_admin_key(parser: Parser) -> None:
    """The key of an operator."""
    parser.add_argument(
        "--admin-key-file",
        type=Path,
        metavar="FILE",
        help="File with the key of an operator, for a router that asks for it. [variable: HEADRACE_ADMIN_KEY, which "
        "holds the key]",
    )


def refuse(parser: Parser, flag: str, instead: str) -> None:
    """Let a flag that would take a secret name what to use instead."""
    parser.refuse(
        flag, f"it is not taken: every user of this machine can read command lines; use {instead}"
    )
