"""The command `headrace`: reads arguments and calls what they name.

Heavy imports wait until they are needed, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence

from headrace import logs
from headrace.cli import plain_flags
from headrace.cli.children.process import die_with_supervisor
from headrace.cli.client import keys
from headrace.cli.config_file import InForce, first_config, in_force
from headrace.cli.parser import Parser
from headrace.errors import CannotRun, ConfigError
from headrace.exit_status import EXIT_CONFIG, EXIT_USAGE
from headrace.extras import needs
from headrace.settings import router, values
from headrace.settings.config_file import TABLES
from headrace.settings.fleet import FLEET_FLAGS
from headrace.settings.plan import PLAN_FLAGS
from headrace.settings.table import Flag, add_flags
from headrace.settings.worker import WORKER_FLAGS, add_model, worker_settings
from headrace.version import VERSION

SERVE_EXAMPLES = """\
examples:
  headrace serve                                the default model, on http://127.0.0.1:8000
  headrace serve ./Llama-3.2-1B --workers 2     a Hugging Face folder, two workers
  headrace serve --prefill 1 --decode 2         prompts on one worker, answers on two others
  headrace serve smollm2-r1                     the default model on the code path of DeepSeek-R1
  headrace serve model.gguf --dtype int8        a GGUF file, int8 weights
  headrace serve --policy session-hash --log-level debug

Ctrl-C lets running answers finish; a second one stops within 2 s, a third at once.
Exit status: 0 after a drain; 1 if nothing is left that could serve; 2 if flags, key files or the model are
refused; 78 if this machine lacks what they need (an extra, a GPU) or a worker cannot do what it was told;
128 and the signal's number after a second signal.
"""

SERVE_USAGE = "headrace serve [FLAGS] [MODEL]"
WORKER_USAGE = "headrace worker [FLAGS] [MODEL]"
SECRET_FROM = "--secret-file FILE or the variable HEADRACE_SECRET"

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

KEY_USAGE = "headrace key new [NAME] [FLAGS]"
KEY_EXAMPLES = """\
examples:
  headrace key new ci --rpm 60 --tpm 100000 --streams 8 --expires 2027-01-01
  headrace key new alice --models SmolLM2-135M-Instruct --file keys.txt

The line belongs into the router's --api-key-file. It has the digest of the key: who reads the file learns no key.
A router that runs takes a changed file by itself.
"""

CONVERT_EXAMPLES = """\
examples:
  headrace convert smollm2 --as deepseek_v3 --mtp --out ./smollm2-dsv3
  headrace convert ./Llama-3.2-1B --as deepseek_v3 --paired --out ./llama-dsv3

The answers stay the same: every weight goes, unchanged, to a place of the other family.
"""

PLAN_USAGE = (
    "headrace plan --trace FILE --gpu GPU --slo ttft=TIME,tpot=TIME --price DOLLARS [FLAGS]"
)
PLAN_EXAMPLES = """\
examples:
  headrace plan --trace T --gpu h200 --slo ttft=2s,tpot=80ms --price 2.5
  headrace plan --trace T --gpu gb200 --slo ttft=5s,tpot=20ms --price 6 --speed 40 --picture plan.png
  headrace plan --trace T --gpu h100 --slo ttft=2s,tpot=50ms --price 2 --ep 32,72 --mtp 1 --json

The trace is one that `headrace sim` takes. Nothing is measured here; the result has error bars.
Exit status: 0 with a plan; 2 if flags or the trace are refused, the model does not fit or a limit is out of reach.
"""

TOP_EXAMPLES = """\
examples:
  headrace top
  headrace top --once                                   one snapshot, for scripts and tickets
  headrace top --url unix:/run/headrace-admin.sock
  headrace top --url http://10.0.0.1:8000 --admin-key-file ~/headrace-admin.key

It shows what the page at / of the router shows. Into a pipe goes one snapshot a second. Ctrl-C leaves.
"""

EXPLAIN_EXAMPLES = """\
examples:
  headrace explain req-5f0c...      the X-Request-ID of its answer
  headrace explain my-id --url http://10.0.0.1:8000 --json
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 0, 1 (failed), 2 (wrong arguments), 78 (not on this machine), 130 (Ctrl-C)."""
    die_with_supervisor()
    arguments = first_config(sys.argv[1:] if argv is None else argv)
    typed = arguments[0] if arguments else ""
    of_command: Parser | None = None
    given = InForce({}, [])
    try:
        if typed in OWN_ARGUMENTS:
            return OWN_ARGUMENTS[typed](arguments[1:])
        parser = make_parser(typed)
        of_command = parser.commands.get(typed)
        if of_command is not None:
            of_command.refuse_unknown(arguments[1:], lambda unknown: elsewhere(typed, unknown))
            if typed in TABLES:
                given = in_force(of_command, typed, arguments[1:])
                arguments[1:] = given.words
        else:
            parser.refuse_unknown(arguments[:1])
            parser.refuse_command(arguments[:1])
        args, words = parser.parse_known_args(arguments, argparse.Namespace(given=given))
        if words:
            (of_command or parser).error(f"unrecognized arguments: {' '.join(words)}")
        typed = args.typed
        command: Callable[[argparse.Namespace], int] = args.command
        return command(args)
    except values.FlagError as error:
        (of_command or make_parser(typed)).error(given.located(str(error)))
    except values.SettingsError as error:
        print(f"headrace {typed}: {given.located(str(error))}", file=sys.stderr)
        return EXIT_USAGE
    except ConfigError as error:  # its text is whole, with the usage
        print(given.located(str(error)), end="", file=sys.stderr)
        return EXIT_USAGE
    except CannotRun as error:
        print(f"headrace {typed}: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except KeyboardInterrupt:
        return 130


def make_parser(typed: str) -> Parser:
    """The parser of every command. That of `serve` has the router's flags where `serve` is what was typed."""
    parser = Parser(
        prog="headrace",
        description="Serve language models from a fleet of workers as one OpenAI-compatible "
        "endpoint.",
        epilog="`headrace COMMAND --help` tells more about a command.",
    )
    parser.add_argument("--version", action="version", version=f"headrace {VERSION}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(
        name: str,
        run: Callable[[argparse.Namespace], int],
        summary: str,
        examples: str = "",
        usage: str | None = None,
    ) -> Parser:
        description = summary[0].upper() + summary[1:] + "."
        added = commands.add_parser(
            name, help=summary, description=description, epilog=examples, usage=usage
        )
        added.set_defaults(command=run, typed=name)
        if name in TABLES and name != "router":  # which has the flag in its own table
            plain_flags.add_config(added, name)
        parser.commands[name] = added
        return added

    serve = command(
        "serve", _serve, "router and workers on this machine", SERVE_EXAMPLES, SERVE_USAGE
    )
    if typed == "serve":
        _add_serve_arguments(serve)
    # for their lines of help: `main` hands these commands on before anything is parsed here
    of_router = command("router", _version_command, "the router alone; workers dial in")
    if typed == "router":
        add_flags(of_router, router.router_flags().values())
    worker = command("worker", _worker, "one worker for a router", WORKER_EXAMPLES, WORKER_USAGE)
    add_model(worker)
    add_flags(worker, WORKER_FLAGS.values())
    keys.refuse(worker, "--secret", SECRET_FROM)
    chat = command("chat", _chat, "talk to a running server", CHAT_EXAMPLES)
    plain_flags.add_chat(chat)
    explain = command("explain", _explain, "why a request went where it went", EXPLAIN_EXAMPLES)
    plain_flags.add_explain(explain)
    top = command("top", _top, "the fleet and its traffic, live in a terminal", TOP_EXAMPLES)
    plain_flags.add_top(top)
    drain = command("drain", _drain, "ask a worker to leave in good order", DRAIN_EXAMPLES)
    plain_flags.add_drain(drain)
    key = command("key", _key, "draw an API key for a router", KEY_EXAMPLES, KEY_USAGE)
    plain_flags.add_key(key)
    fetch = command("fetch", _fetch, "get a model now, so that `serve` starts offline")
    plain_flags.add_fetch(fetch)
    convert = command(
        "convert", _convert, "re-express a llama model as another family", CONVERT_EXAMPLES
    )
    plain_flags.add_convert(convert)
    plan = command(
        "plan", _plan, "GPUs and price of a fleet for a trace", PLAN_EXAMPLES, PLAN_USAGE
    )
    add_flags(plan, PLAN_FLAGS.values())
    command("config", _version_command, "what a file of configuration says, and what is in force")
    command("bench", _version_command, "load, trace replay, comparison and plots")
    command("mock", _version_command, "workers without a model, by the hundred")
    command("sim", _version_command, "the scheduler over a trace, in virtual time")
    command("version", _version_command, "print the version")
    return parser


def elsewhere(command: str, typed: list[str]) -> str:
    """How somebody is told that flags are not of `command`, but of others; empty where they are not."""
    if command not in ("serve", "worker", "router"):
        return ""
    owners = {
        "serve": {flag.name for flag in serve_flags()},
        "worker": {name for flag in WORKER_FLAGS.values() for name in (flag.name, *flag.also)},
        "router": set(router.router_flags()),
    }
    told = ""
    for flag in typed:
        found = [f"`headrace {one}`" for one, flags in owners.items() if flag in flags]
        if found and flag not in owners[command]:
            told += f"; {flag} is a flag of {' and '.join(found)}"
    return told


def serve_flags() -> list[Flag]:
    """All flags of `serve`: its own, those of its workers, and those of its router. What two sides need is one flag."""
    of_router = router.serve_flags()
    shared = {flag.name for flag in of_router}
    of_workers = [f for f in WORKER_FLAGS.values() if f.in_serve and f.name not in shared]
    return [*FLEET_FLAGS.values(), *of_workers, *of_router]


def _add_serve_arguments(parser: Parser) -> None:
    add_model(parser)
    add_flags(parser, serve_flags())
    keys.refuse(parser, "--api-key", keys.API_KEY_FROM)
    keys.refuse(parser, "--secret", SECRET_FROM)
    parser.refuse(
        "--router-args", "it is gone: give the router's flags directly, as in --policy kv"
    )
    parser.refuse("--drain-timeout", "it is gone: give --drain-timeout-ms, in milliseconds")


def _serve(args: argparse.Namespace) -> int:
    from headrace.cli import serve

    return serve.run(args, SERVE_USAGE)


def _router(arguments: list[str]) -> int:
    from headrace import _core

    status = _core.router_main(["headrace router", *arguments])
    if status == EXIT_USAGE:
        names = [word.partition("=")[0] for word in arguments]
        if told := elsewhere("router", names):
            print(f"headrace router{told}".replace(";", ":", 1), file=sys.stderr)
    return status


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


def _config(arguments: list[str]) -> int:
    from headrace.cli import config

    return config.run(arguments, make_parser)


# Commands that read their own arguments. All but one are programs in Rust.
OWN_ARGUMENTS = {
    "router": _router,
    "bench": _bench,
    "mock": _mock,
    "sim": _sim,
    "config": _config,
}


def _worker(args: argparse.Namespace) -> int:
    checked = worker_settings(args)
    logs.never_wait()
    # Read when torch is loaded: ranks tell in a line what torch has pages of stack for. What fails is raised, too.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    with needs("cpu"):
        from headrace.worker import main
    status = main.run(checked, alone=True)
    # The worker has given back what it had. An orderly end of the interpreter would have nanobind print a long list of
    # leaks: modules of triton, which ranks import, still hold objects of its native module then.
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    logs.end_process(status)


def _chat(args: argparse.Namespace) -> int:
    from headrace.cli.client import chat

    return chat.run(args)


def _explain(args: argparse.Namespace) -> int:
    from headrace.cli.client import explain

    return explain.run(args)


def _top(args: argparse.Namespace) -> int:
    from headrace.cli.client import top

    return top.run(args)


def _drain(args: argparse.Namespace) -> int:
    from headrace.cli.client import drain

    return drain.run(args)


def _plan(args: argparse.Namespace) -> int:
    from headrace.cli import plan

    return plan.run(args)


def _key(args: argparse.Namespace) -> int:
    from headrace.cli import key

    return key.run(args)


def _fetch(args: argparse.Namespace) -> int:
    from headrace.cli.serving import model

    logs.never_wait()
    return model.fetch(args)


def _convert(args: argparse.Namespace) -> int:
    from headrace.cli import convert

    return convert.run(args)


def _version_command(_args: argparse.Namespace) -> int:
    print(f"headrace {VERSION}")
    return 0
