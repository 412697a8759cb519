"""The command `headrace`: reads arguments and calls what they name.

Heavy imports wait until they are needed, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from itertools import pairwise
from pathlib import Path

from headrace import logs, settings
from headrace.cli import keys
from headrace.cli.parser import Parser
from headrace.cli.supervise import die_with_supervisor
from headrace.errors import CannotRun
from headrace.exit_status import EXIT_CONFIG, EXIT_USAGE
from headrace.extras import needs

SERVE_EXAMPLES = """\
examples:
  headrace serve                                the default model, on http://127.0.0.1:8000
  headrace serve ./Llama-3.2-1B --workers 2     a Hugging Face folder, two workers
  headrace serve --prefill 1 --decode 2         prompts on one worker, answers on two others
  headrace serve smollm2-r1                     the default model on the code path of DeepSeek-R1
  headrace serve model.gguf --dtype int8        a GGUF file, int8 weights
  headrace serve --router-args="--policy session-hash --log-level debug"

Ctrl-C lets running answers finish; a second one stops within 2 s, a third at once.
Exit status: 0 after a drain; 1 if nothing is left that could serve; 2 if flags (also those in
--router-args), key files or the model are refused; 78 if this machine lacks what they need (an extra, a GPU)
or a worker cannot do what it was told; 128 and the signal's number after a second signal.
"""

WORKER_EXAMPLES = """\
examples:
  headrace worker ./Llama-3.2-1B --router 10.0.0.1:8001
  headrace worker --router unix:/run/headrace.sock --secret-file /run/secrets/headrace --dtype int8
"""

CHAT_EXAMPLES = """\
examples:
  headrace chat
  headrace chat --url http://10.0.0.1:8000 --system "Answer in one sentence." --stats
  echo "What is the capital of France?" | headrace chat
"""

DRAIN_EXAMPLES = """\
examples:
  headrace drain worker-0 --budget 30s
  headrace drain decode-1 --hand-over 0 --url unix:/run/headrace-admin.sock --json
  headrace drain decode-1 --url http://10.0.0.1:8000 --admin-key-file ~/headrace-admin.key
"""

CONVERT_EXAMPLES = """\
examples:
  headrace convert smollm2 --as deepseek_v3 --mtp --out ./smollm2-dsv3
  headrace convert ./Llama-3.2-1B --as deepseek_v3 --paired --out ./llama-dsv3

The answers stay the same: every weight goes, unchanged, to a place of the other family.
"""

EXPLAIN_EXAMPLES = """\
examples:
  headrace explain req-5f0c...      the X-Request-ID of its answer
  headrace explain my-id --url http://10.0.0.1:8000 --json
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 0, 1 (failed), 2 (wrong arguments), 78 (not on this machine), 130 (Ctrl-C)."""
    die_with_supervisor()
    arguments = list(sys.argv[1:] if argv is None else argv)
    typed = arguments[0] if arguments else ""
    try:
        if typed in NATIVE:  # their flags are their own
            return NATIVE[typed](arguments[1:])
        _check_router_args(arguments)
        parser = _parser()
        of_command = parser.commands.get(typed)
        if of_command is not None:
            hint = _router_hint if typed == "serve" else None
            of_command.refuse_unknown(arguments[1:], hint)
        else:
            parser.refuse_unknown(arguments[:1])
        args, words = parser.parse_known_args(arguments)
        if words:
            (of_command or parser).error(f"unrecognized arguments: {' '.join(words)}")
        typed = args.typed
        command: Callable[[argparse.Namespace], int] = args.command
        return command(args)
    except settings.SettingsError as error:
        print(f"headrace {typed}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except CannotRun as error:
        print(f"headrace {typed}: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except KeyboardInterrupt:
        return 130


def _parser() -> Parser:
    parser = Parser(
        prog="headrace",
        description="Serve language models from a fleet of workers as one OpenAI-compatible "
        "endpoint.",
        epilog="`headrace COMMAND --help` tells more about a command.",
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(
        name: str, run: Callable[[argparse.Namespace], int], summary: str, examples: str = ""
    ) -> Parser:
        description = summary[0].upper() + summary[1:] + "."
        added = commands.add_parser(name, help=summary, description=description, epilog=examples)
        added.set_defaults(command=run, typed=name)
        parser.commands[name] = added
        return added

    serve = command("serve", _serve, "router and workers on this machine", SERVE_EXAMPLES)
    _add_serve_arguments(serve)
    # for their lines of help: `main` hands these commands on before anything is parsed here
    command("router", _version_command, "the router alone; workers dial in")
    worker = command("worker", _worker, "one worker for a router", WORKER_EXAMPLES)
    settings.add_model_arguments(worker)
    settings.add_link_arguments(worker)
    keys.refuse(worker, "--secret", "--secret-file FILE or the variable HEADRACE_SECRET")
    chat = command("chat", _chat, "talk to a running server", CHAT_EXAMPLES)
    _add_chat_arguments(chat)
    explain = command("explain", _explain, "why a request went where it went", EXPLAIN_EXAMPLES)
    _add_explain_arguments(explain)
    drain = command("drain", _drain, "ask a worker to leave in good order", DRAIN_EXAMPLES)
    _add_drain_arguments(drain)
    fetch = command("fetch", _fetch, "get a model now, so that `serve` starts offline")
    _add_fetch_arguments(fetch)
    convert = command(
        "convert", _convert, "re-express a llama model as another family", CONVERT_EXAMPLES
    )
    _add_convert_arguments(convert)
    command("bench", _version_command, "load, trace replay, comparison and plots")
    command("mock", _version_command, "workers without a model, by the hundred")
    command("sim", _version_command, "the scheduler over a trace, in virtual time")
    command("version", _version_command, "print the version")
    return parser


def _check_router_args(arguments: list[str]) -> None:
    """Raise SettingsError for a value that argparse would take for a flag: it would say that there is none."""
    for flag, value in pairwise(arguments):
        if flag == "--router-args" and value.startswith("-") and " " not in value:
            raise settings.SettingsError(
                f"--router-args: write an equals sign before flags: {_as_router_args(value)}"
            )


def _router_hint(unknown: list[str]) -> str:
    """How `serve` is told what only the router knows. The router prints its help itself, so a process is asked."""
    command = [sys.executable, "-m", "headrace", "router", "--help"]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    flags = set(re.findall(r"^ +(?:-\w, )?(--[\w-]+)", told, re.MULTILINE))
    for word in unknown:
        if word.partition("=")[0] in flags:
            return f"; flags of the router are given as {_as_router_args(word)}"
    return ""


def _as_router_args(flag: str) -> str:
    """An example of `--router-args`. It repeats no value: that may be a key."""
    return f'--router-args="{flag.partition("=")[0]} ..."'


def _add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Server")
    group.add_argument(
        "--host",
        default="127.0.0.1",
        help="address for clients; 0.0.0.0 is all, and needs --api-key-file (default: %(default)s)",
    )
    group.add_argument(
        "--port",
        type=settings.port_number,
        default=8000,
        help="port for clients; 0 takes a free one (default: %(default)s)",
    )
    group.add_argument(
        "--workers",
        type=settings.positive,
        metavar="N",
        help="worker processes, each with a copy of the model (default: 1)",
    )
    group.add_argument(
        "--prefill",
        type=settings.positive,
        metavar="N",
        help="instead of --workers, with --decode: workers that compute prompts",
    )
    group.add_argument(
        "--decode",
        type=settings.positive,
        metavar="N",
        help="workers that generate what follows a prompt of those, or do it all where that is quicker",
    )
    group.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="keys of clients, one a line: KEY or TENANT KEY (or set HEADRACE_API_KEY; default: everybody is served)",
    )
    keys.refuse(parser, "--api-key", keys.API_KEY_FROM)
    group.add_argument(
        "--allow-anonymous-clients",
        action="store_true",
        help="serve everybody who can reach --host, although other machines can and there are no keys",
    )
    group.add_argument(
        "--admin-key-file",
        type=Path,
        metavar="FILE",
        help="keys of operators, for drains and /workers (or set HEADRACE_ADMIN_KEY; default: without any keys, "
        "processes of this machine)",
    )
    group.add_argument(
        "--admin-listen",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="another address for operators: unix:PATH, which asks for no key, or HOST:PORT; may be given again",
    )
    group.add_argument(
        "--allowed-hosts",
        action="append",
        default=[],
        metavar="NAMES",
        help="names, with commas between them, under which clients without a key reach --host, or * for any (default: "
        "addresses, localhost, and the names of --host and of this machine)",
    )
    group.add_argument(
        "--allowed-origins",
        action="append",
        default=[],
        metavar="ORIGINS",
        help="web origins, such as https://chat.example.com, whose pages may send requests without a key, or * for any "
        "(default: its own)",
    )
    group.add_argument(
        "--drain-timeout",
        type=settings.seconds,
        default=30.0,
        metavar="SECONDS",
        help="how long running answers may go on after Ctrl-C (default: 30)",
    )
    group.add_argument(
        "--router-args",
        default="",
        metavar='"ARGS"',
        help="further flags for the router, after an equals sign; `headrace router --help` lists them",
    )
    settings.add_model_arguments(parser)


def _add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        help="where the server is (default: %(default)s)",
    )
    parser.add_argument("--model", metavar="NAME", help="(default: the first that is served)")
    parser.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    keys.add_api_key(parser)
    parser.add_argument("--temperature", type=float, metavar="T", help="(default: the model's own)")
    parser.add_argument("--max-tokens", type=settings.positive, metavar="N", help="of one answer")
    parser.add_argument(
        "--stats", action="store_true", help="after each answer, time to first token and tokens/s"
    )


def _add_explain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request_id", metavar="REQUEST_ID", help="X-Request-ID of its answer")
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        help="where the server is, or unix:PATH of its --admin-listen (default: %(default)s)",
    )
    keys.add_api_key(parser)
    keys.add_admin_key(parser)
    parser.add_argument("--json", action="store_true", help="all that is known, as JSON")


def _add_drain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("worker", metavar="WORKER", help="its name, as GET /workers lists it")
    parser.add_argument(
        "--budget",
        type=settings.duration,
        default=30.0,
        metavar="TIME",
        help="for what it runs to end, such as 30s, 2m or 500ms; the rest goes on elsewhere (default: 30s)",
    )
    parser.add_argument(
        "--hand-over",
        type=settings.count,
        default=4096,
        metavar="BLOCKS",
        help="cached blocks that others take over at most, the hottest first; 0 is none (default: %(default)s)",
    )
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        help="where the server is, or unix:PATH of its --admin-listen (default: %(default)s)",
    )
    keys.add_admin_key(parser)
    keys.refuse(parser, "--api-key", keys.ADMIN_KEY_FROM)
    parser.add_argument("--json", action="store_true", help="the result as JSON")


def _add_fetch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="left out: the default model")
    # `serve` runs this command before its workers: errors then name `serve`, and stdout gets what workers will make of
    # the model rather than its place
    hidden = argparse.SUPPRESS
    parser.add_argument("--for", dest="typed", choices=("serve",), default="fetch", help=hidden)
    parser.add_argument("--device", choices=settings.DEVICES, default="auto", help=hidden)
    parser.add_argument("--dtype", choices=settings.DTYPES, default="auto", help=hidden)
    parser.add_argument("--context-tokens", type=settings.positive, help=hidden)


def _add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a llama: a folder, a .gguf file, a hub id; smollm2 is the default model",
    )
    parser.add_argument(
        "--as", dest="family", required=True, choices=("deepseek_v3",), help="the other family"
    )
    parser.add_argument(
        "--paired",
        action="store_true",
        help="store each routed expert twice and let a router choose by the token: more like a real mixture",
    )
    head = parser.add_mutually_exclusive_group()
    head.add_argument(
        "--mtp",
        action="store_true",
        help="add the multi-token-prediction head that comes with headrace; for smollm2",
    )
    head.add_argument(
        "--mtp-head", metavar="FILE", help="add a head trained by `python -m headrace.train_mtp`"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="a folder that is made")


def _serve(args: argparse.Namespace) -> int:
    from headrace.cli import serve

    return serve.run(args)


def _router(arguments: list[str]) -> int:
    from headrace import _core

    return _core.router_main(["headrace router", *arguments])


def _bench(arguments: list[str]) -> int:
    if arguments[:1] == ["plot"]:
        from headrace.cli import plot

        return plot.run(arguments[1:])
    from headrace import _core

    return _core.bench_main(["headrace bench", *arguments])


def _mock(arguments: list[str]) -> int:
    from headrace import _core

    return _core.bench_main(["headrace", "mock", *arguments])


def _sim(arguments: list[str]) -> int:
    from headrace import _core

    return _core.bench_main(["headrace", "sim", *arguments])


# Commands that are programs in Rust and read their own arguments.
NATIVE = {"router": _router, "bench": _bench, "mock": _mock, "sim": _sim}


def _worker(args: argparse.Namespace) -> int:
    checked = settings.worker_settings(args)
    logs.never_wait()
    with needs("worker"):
        from headrace.worker import main
    return main.run(checked, alone=True)


def _chat(args: argparse.Namespace) -> int:
    from headrace.cli import chat

    return chat.run(args)


def _explain(args: argparse.Namespace) -> int:
    from headrace.cli import explain

    return explain.run(args)


def _drain(args: argparse.Namespace) -> int:
    from headrace.cli import drain

    return drain.run(args)


def _fetch(args: argparse.Namespace) -> int:
    from headrace.cli import serve

    logs.never_wait()
    return serve.fetch(args)


def _convert(args: argparse.Namespace) -> int:
    from headrace.cli import convert

    return convert.run(args)


def _version_command(_args: argparse.Namespace) -> int:
    print(_version())
    return 0


def _version() -> str:
    try:
        return f"headrace {metadata.version('headrace')}"
    except metadata.PackageNotFoundError:  # run from a source folder
        return "headrace (not installed)"
