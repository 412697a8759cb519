"""The flags of commands that have no table of flags: those that ask a server, and those that handle keys and models."""

from __future__ import annotations

import argparse
from pathlib import Path

from headrace.cli.client import keys
from headrace.cli.config_file import CONFIG
from headrace.cli.parser import Parser
from headrace.settings import values
from headrace.settings.config_file import CONFIG_VARIABLE
from headrace.settings.worker import DEVICES, DTYPES


def add_config(parser: Parser, command: str) -> None:
    """The flag of all that have a table in a file of configuration."""
    parser.add_argument(
        CONFIG,
        metavar="FILE",
        help=f"File with flags, in TOML: a key of the table [{command}] is a flag without its dashes. Flags that are "
        f"typed and variables count before the file. [variable: {CONFIG_VARIABLE}]",
    )


def add_chat(parser: Parser) -> None:
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        help="Where the server is. [default: %(default)s]",
    )
    parser.add_argument(
        "--model", metavar="NAME", help="Model to talk to. [default: the first that is served]"
    )
    parser.add_argument(
        "--system", metavar="TEXT", help="System message of the conversation. [default: none]"
    )
    keys.add_api_key(parser)
    keys.add_tls(parser)
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="Temperature of sampling. 0 takes the likeliest token. [default: the model's own]",
    )
    parser.add_argument(
        "--max-tokens",
        type=values.positive,
        metavar="N",
        help="Tokens of one answer at most. [default: as many as fit]",
    )
    parser.add_argument(
        "--stats",
        action="store_true",
        help="After each answer, show its time to first token and its tokens per second.",
    )


def add_explain(parser: Parser) -> None:
    parser.add_argument("request_id", metavar="REQUEST_ID", help="The X-Request-ID of the answer.")
    _add_url(parser)
    keys.add_api_key(parser)
    keys.add_admin_key(parser)
    keys.add_tls(parser)
    parser.add_argument("--json", action="store_true", help="Print all that is known, as JSON.")


def _add_url(parser: Parser) -> None:
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        help="Where the server is: a URL, or unix:PATH of its --admin-listen. [default: %(default)s]",
    )


def add_top(parser: Parser) -> None:
    _add_url(parser)
    keys.add_admin_key(parser)
    keys.add_tls(parser)
    keys.refuse(parser, "--api-key", keys.ADMIN_KEY_FROM)
    parser.add_argument("--once", action="store_true", help="Print one snapshot and end.")
    parser.add_argument(
        "--json",
        action="store_true",
        help="Print what the router sends, one JSON document on a line, instead of a table.",
    )


def add_drain(parser: Parser) -> None:
    parser.add_argument(
        "worker", metavar="WORKER", help="Name of the worker, as GET /workers lists it."
    )
    parser.add_argument(
        "--budget",
        type=values.duration,
        default=30.0,
        metavar="TIME",
        help="Time that running answers get to end, with a unit: 30s, 2m or 500ms, at most an hour. The others go on "
        "at other workers. [default: 30s]",
    )
    parser.add_argument(
        "--hand-over",
        type=values.count,
        default=4096,
        metavar="BLOCKS",
        help="Cached blocks that other workers take over at most, the hottest first. 0 hands none over. [default: "
        "%(default)s]",
    )
    _add_url(parser)
    keys.add_admin_key(parser)
    keys.add_tls(parser)
    keys.refuse(parser, "--api-key", keys.ADMIN_KEY_FROM)
    parser.add_argument("--json", action="store_true", help="Print the result as JSON.")


def add_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("new",), help="new draws a key.")
    parser.add_argument("name", nargs="?", metavar="NAME", help="Name of the key in /metrics.")
    for flag, value, text in (
        (
            "--tenant",
            "TENANT",
            "Whose key it is. Keys of one tenant share caches. [default: its own]",
        ),
        ("--models", "NAMES", "Models that it may use, with commas between them. [default: all]"),
        ("--rpm", "N", "Requests that it may send in a minute. [default: any number]"),
        (
            "--tpm",
            "N",
            "Tokens of prompts and answers that it may use in a minute. [default: any number]",
        ),
        ("--streams", "N", "Answers that it may have at a time. [default: any number]"),
        (
            "--expires",
            "DAY",
            "Day, such as 2027-01-01, from which on it is no key any more. [default: none]",
        ),
    ):
        parser.add_argument(flag, metavar=value, help=text)
    parser.add_argument(
        "--file",
        type=Path,
        metavar="FILE",
        help="File to which the line is added; then only the key is printed. [default: both are printed]",
    )


def add_fetch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="A hub id, or a folder or file to check. [default: SmolLM2-135M-Instruct]",
    )
    # `serve` runs this command before its workers: errors then name `serve`, and stdout gets what workers will make of
    # the model rather than its place
    hidden = argparse.SUPPRESS
    parser.add_argument("--for", dest="typed", choices=("serve",), default="fetch", help=hidden)
    parser.add_argument("--device", choices=DEVICES, default="auto", help=hidden)
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help=hidden)
    parser.add_argument("--context-tokens", type=values.positive, help=hidden)
    parser.add_argument("--ep", type=values.positive, default=1, help=hidden)
    parser.add_argument("--ep-redundant", type=values.count, default=0, help=hidden)
    parser.add_argument("--ep-moves", action="store_true", help=hidden)


def add_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="A llama model: a folder, a .gguf file or a hub id. smollm2 is the default model.",
    )
    parser.add_argument(
        "--as",
        dest="family",
        required=True,
        choices=("deepseek_v3",),
        help="Family to write the model down as.",
    )
    parser.add_argument(
        "--paired",
        action="store_true",
        help="Store each routed expert twice and let the model's router choose by the token, as in a real mixture.",
    )
    head = parser.add_mutually_exclusive_group()
    head.add_argument(
        "--mtp",
        action="store_true",
        help="Add the head for multi-token prediction that comes with headrace. For smollm2.",
    )
    head.add_argument(
        "--mtp-head", metavar="FILE", help="Add a head that `python -m headrace.train_mtp` trained."
    )
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="Folder to make. It must not exist."
    )
