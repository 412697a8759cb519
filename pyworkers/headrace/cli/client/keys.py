"""Keys that commands send, from files or the environment. No command line takes one: all users can read those."""

from __future__ import annotations

import argparse
import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.settings.values import SettingsError

if TYPE_CHECKING:
    import ssl

    from headrace.cli.parser import Parser

API_KEY_FROM = "--api-key-file FILE or the variable HEADRACE_API_KEY"
SETTINGS = ("name", "models", "rpm", "tpm", "streams", "expires", "only")
"""Words before a `=` that follow a key and are none."""
ADMIN_KEY_FROM = "--admin-key-file FILE or the variable HEADRACE_ADMIN_KEY"


def read_key(flag: str, path: Path | None, variable: str) -> str | None:
    """The first key of a file (lines of KEY or TENANT KEY), otherwise the variable's. Raises SettingsError.

    What may stand after a key is in `router/src/config/keys/line.rs`.
    """
    if path is None:
        return os.environ.get(variable) or None
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise SettingsError(f"{flag}: cannot read {path}: {reason}") from error
    for line in text.splitlines():
        words = list(itertools.takewhile(lambda word: not word.startswith("#"), line.split()))
        before = itertools.takewhile(lambda word: word.partition("=")[0] not in SETTINGS, words)
        if words and (key := list(before)[-1:]):
            if key[0].startswith(("blake3:", "sha256:")):
                raise SettingsError(
                    f"{flag}: {path} begins with the digest of a key, from which nobody learns the key; name a file "
                    "that begins with the key itself"
                )
            return key[0]
    raise SettingsError(f"{flag}: {path} holds no key; write one a line")


def api_key(args: argparse.Namespace) -> str | None:
    """What `add_api_key` took. Raises SettingsError."""
    return read_key("--api-key-file", args.api_key_file, "HEADRACE_API_KEY")


def admin_key(args: argparse.Namespace) -> str | None:
    """What `add_admin_key` took. Raises SettingsError."""
    return read_key("--admin-key-file", args.admin_key_file, "HEADRACE_ADMIN_KEY")


def add_tls(parser: Parser) -> None:
    """How a server with https:// is recognised, and how this command is."""
    parser.add_argument(
        "--tls-ca",
        type=Path,
        metavar="FILE",
        help="Certificates (PEM) that the server's is checked with. [default: those of the system]",
    )
    parser.add_argument(
        "--tls-cert",
        type=Path,
        metavar="FILE",
        help="Certificate (PEM) to show to a server that asks for one. Needs --tls-key.",
    )
    parser.add_argument(
        "--tls-key", type=Path, metavar="FILE", help="Private key (PEM) of --tls-cert."
    )


def tls(args: argparse.Namespace) -> ssl.SSLContext | None:
    """What `add_tls` took; None for what `http.client` does by itself. Raises SettingsError."""
    if (args.tls_cert is None) != (args.tls_key is None):
        raise SettingsError("--tls-cert and --tls-key go together")
    if args.tls_ca is None and args.tls_cert is None:
        return None
    from headrace.wire.tls import tls_context

    identity = None if args.tls_cert is None else (args.tls_cert, args.tls_key)
    try:
        return tls_context(args.tls_ca, identity)
    except ValueError as error:
        raise SettingsError(str(error)) from error


def add_api_key(parser: Parser) -> None:
    """The key of a client."""
    parser.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="File whose first key is sent. [variable: HEADRACE_API_KEY, which holds the key]",
    )
    parser.variables["--api-key-file"] = "HEADRACE_API_KEY"
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
    parser.variables["--admin-key-file"] = "HEADRACE_ADMIN_KEY"


def refuse(parser: Parser, flag: str, instead: str) -> None:
    """Let a flag that would take a secret name what to use instead."""
    parser.refuse(
        flag, f"it is not taken: every user of this machine can read command lines; use {instead}"
    )
