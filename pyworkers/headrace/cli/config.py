"""`headrace config`: what a file of configuration says, and what is in force for a command and where it comes from."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable, Sequence

from headrace.cli.client.terminal import leave_stdout
from headrace.cli.config_file import CONFIG, InForce, check_table, first_config, in_force
from headrace.cli.parser import Option, Parser
from headrace.errors import ConfigError
from headrace.settings import router
from headrace.settings.config_file import TABLES, config_path, read_config
from headrace.settings.fleet import FleetSettings
from headrace.settings.table import nearest, typed, values_of
from headrace.settings.values import FlagError, SettingsError, shortened
from headrace.settings.worker import worker_settings

EXAMPLES = """\
examples:
  headrace config check headrace.toml
  headrace config show --config headrace.toml               each command that the file has a table for
  headrace config show serve --config headrace.toml --policy session-hash

What `show` prints is such a file again. Behind each value stands where it comes from; defaults are comments.
Secrets are not shown. Exit status: 0, or 2 for what the command would refuse.
"""

MakeParser = Callable[[str], Parser]
"""The parser of all commands, with all flags of the one that is named."""


def run(arguments: Sequence[str], make_parser: MakeParser) -> int:
    """`show` or `check`; the exit status."""
    parser = Parser(
        prog="headrace config",
        description="Show what is in force, or check a file.",
        usage="headrace config show [COMMAND [FLAGS]] | check FILE",
        epilog=EXAMPLES,
    )
    parser.add_argument("action", choices=("show", "check"), help="What to do.")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args(first_config(arguments))
    try:
        if args.action == "check":
            return _check(args.rest, make_parser)
        return _show(args.rest, make_parser)
    except SettingsError as error:
        parser.error(str(error))


def _show(arguments: list[str], make_parser: MakeParser) -> int:
    arguments = first_config(arguments)
    if arguments and not arguments[0].startswith("-"):
        commands = [arguments.pop(0)]
    else:
        commands = _commands_of_file(arguments)
    shown: list[str] = []
    for command in commands:
        parser = _command_parser(command, make_parser)
        parser.refuse_unknown(arguments)
        found = in_force(parser, command, arguments)
        for name, texts in found.typed.items():
            if (option := parser.option(name.removeprefix("--"))) and not option.is_switch:
                for text in texts:
                    _check_typed(option, text)
        shown.append("\n".join([f"[{command}]", *map(_line(found), parser.options())]))
    try:
        print("\n\n".join(shown), flush=True)
    except BrokenPipeError:
        leave_stdout()
    return 0


def _commands_of_file(arguments: list[str]) -> list[str]:
    """The tables of the file that `arguments` name, where nothing else does."""
    path = config_path(_config_typed(arguments))
    if path is None:
        raise FlagError(f"name a command, such as serve, or a file with {CONFIG} FILE")
    commands = list(dict.fromkeys(setting.command for setting in read_config(path)))
    if not commands:
        raise FlagError(f"{path} sets nothing; name a command, such as serve")
    return commands


def _config_typed(arguments: list[str]) -> str | None:
    parser = Parser(prog="headrace config show", usage="headrace config show [COMMAND [FLAGS]]")
    parser.add_argument(CONFIG, metavar="FILE")
    return parser.parse_args(arguments).config


def _command_parser(command: str, make_parser: MakeParser) -> Parser:
    if command not in TABLES:
        near = nearest([command], TABLES)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise FlagError(
            f"{shortened(command)} is no command that a file of configuration has a table for{hint}"
        )
    return make_parser(command).commands[command]


def _check_typed(option: Option, text: str | None) -> None:
    if text is None:
        raise FlagError(f"{option.name} needs a value")
    try:
        option.words(text)
    except FlagError as error:
        raise FlagError(f"--{error}") from error


def _line(found: InForce) -> Callable[[Option], str]:
    """How a flag is shown: its value and its origin."""

    def line(option: Option) -> str:
        key, variable = option.keys[0], option.variable
        text = os.environ.get(variable) if variable else None
        if not option.is_flag and found.typed_words:
            return _pair(key, _toml(found.typed_words[0]), "typed")
        if option.name in found.typed:
            texts = found.typed[option.name]
            value = "true" if option.is_switch else _texts(option, [one or "" for one in texts])
            return _pair(key, value, option.name)
        if text:
            if key.endswith("-file"):  # the variable holds what the file would
                return f"# {key}: the variable {variable} holds the secret, which is not shown"
            return _pair(key, _toml(text), str(variable))
        if (setting := found.file.get(option.name)) is not None:
            value = setting.value
            if isinstance(value, bool):
                return _pair(key, str(value).lower(), setting.place)
            return _pair(
                key, _texts(option, [value] if isinstance(value, str) else value), setting.place
            )
        default = "false" if option.is_switch else option.default
        return f"# {key}: {default or 'none'} (default)"

    return line


def _pair(key: str, value: str, origin: str) -> str:
    return f"{key} = {value}  # {origin}"


def _texts(option: Option, texts: list[str]) -> str:
    if option.is_repeated:
        return f"[{', '.join(map(_toml, texts))}]"
    return _toml(",".join(texts))


def _toml(text: str) -> str:
    """A number as it is, anything else in quotes."""
    is_number = re.fullmatch(r"-?(0|[1-9][0-9]{0,17})(\.[0-9]+)?", text)
    return text if is_number else json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _check(arguments: list[str], make_parser: MakeParser) -> int:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise FlagError("check takes one FILE")
    path = arguments[0]
    settings = read_config(path)
    for command in dict.fromkeys(setting.command for setting in settings):
        parser = _command_parser(command, make_parser)
        found = check_table(parser, command, settings)
        try:
            _check_whole(parser, command, found)
        except SettingsError as error:
            raise SettingsError(found.located(str(error))) from error
        except ConfigError as error:  # its text is whole, with the usage
            first = str(error).split("\n", 1)[0].removeprefix("error: ")
            raise SettingsError(found.located(first)) from error
    keys = "one key" if len(settings) == 1 else f"{len(settings)} keys"
    print(f"{path}: {keys}, nothing is wrong")
    return 0


def _check_whole(parser: Parser, command: str, found: InForce) -> None:
    """What is right by itself may be wrong together. Files that the flags name are read."""
    if command not in ("serve", "worker", "router"):
        return
    args = parser.parse_args(found.words)
    if command != "router":
        worker_settings(args)
    if command == "serve":
        FleetSettings(**values_of(FleetSettings, args)).roles()
        router.check_router(typed(args), parser.format_usage())
    if command == "router":
        router.check_alone(typed(args), parser.format_usage())
