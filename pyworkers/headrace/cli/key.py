"""`headrace key new`: draw an API key, and write the line by which a router knows it without the key itself."""

from __future__ import annotations

import argparse
import hashlib
import os
import secrets
from pathlib import Path

from headrace.errors import ConfigError
from headrace.settings.values import SettingsError

PREFIX = "hr-"  # so that people and scanners see what it is
RANDOM_BYTES = 32


def run(args: argparse.Namespace) -> int:
    """Draw a key; the exit status. Raises SettingsError for a line that a router would refuse."""
    key = PREFIX + secrets.token_urlsafe(RANDOM_BYTES)
    line = line_of(key, args)
    if args.file is None:
        print(f"key   {key}\nline  {line}")
        return 0
    append(args.file, line)
    print(key)
    return 0


def line_of(key: str, args: argparse.Namespace) -> str:
    """The line of a file of keys that stands for `key` with what was typed."""
    from headrace import _core

    digest = f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"
    settings = {
        "name": args.name,
        "models": args.models,
        "rpm": args.rpm,
        "tpm": args.tpm,
        "streams": args.streams,
        "expires": args.expires,
    }
    given = [f"{name}={value}" for name, value in settings.items() if value is not None]
    tenant = [] if args.tenant is None else [args.tenant]
    for word in (*tenant, *given):
        if len(word.split()) != 1 or "#" in word:
            raise SettingsError(f"{word!r} is not one word of a line: it has a space or a #")
    line = " ".join([*tenant, digest, *given])
    try:
        _core.check_key_line(line)
    except ConfigError as error:
        raise SettingsError(str(error).removeprefix("--api-key-file: ")) from error
    return line


def append(file: Path, line: str) -> None:
    """Add `line` to a file of keys, which belongs to this user alone where it is new."""
    try:
        opened = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(opened, "r+") as keys:
            before = keys.read()
            keys.write(f"{'' if not before or before.endswith(chr(10)) else chr(10)}{line}\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise SettingsError(f"--file: cannot write {file}: {reason}") from error
