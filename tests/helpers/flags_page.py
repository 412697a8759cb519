"""docs/flags.md, written from the tables of flags: `cd tests && python -m helpers.flags_page > ../docs/flags.md`."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.settings import router
from headrace.settings.fleet import FLEET_FLAGS
from headrace.settings.plan import PLAN_FLAGS
from headrace.settings.table import Flag
from headrace.settings.worker import WORKER_FLAGS

HEAD = """\
# Flags of `serve`, `worker`, `router` and `plan`

This page is written from the tables that the commands read, and `--help` shows the same:
`cd tests && python -m helpers.flags_page > ../docs/flags.md`. [Operations](operations.md) says how the commands are
used, [limits](limits.md) what each bound protects.

`headrace serve` takes its own flags, every flag of the router but `--worker-socket`, and the flags of a worker that are
marked with *s*; those go to every worker that it starts. `--secret-file`, `--log-level` and `--log-format` are given
once and reach the router and the workers. A flag is given once unless *repeatable* stands beside it, as `--flag VALUE`
or `--flag=VALUE`, and is never abbreviated. A wrong flag ends the command with status 2 before anything starts, and the
error has the nearest name. Every command but `bench`, `mock` and `sim` takes its flags from a file as well, `--config
FILE` ([configuration](config.md)).
"""


def page() -> str:
    of_router = [*router.router_flags().values()]
    listen = next(flag for flag in router.serve_flags() if flag.name == router.WORKER_LISTEN)
    return (
        "\n".join(
            [
                HEAD,
                "## `headrace serve` alone\n",
                *table([*FLEET_FLAGS.values(), listen]),
                "## `headrace worker`\n",
                *table(WORKER_FLAGS.values(), mark_serve=True),
                "## `headrace router`, and `headrace serve`\n",
                *table(of_router),
                "## `headrace plan`\n",
                *table(PLAN_FLAGS.values()),
            ]
        ).rstrip("\n")
        + "\n"
    )


def table(flags: Iterable[Flag], *, mark_serve: bool = False) -> list[str]:
    """One table for each group, in the order of the first flag of each."""
    groups: dict[str, list[Flag]] = {}
    for flag in flags:
        groups.setdefault(flag.group, []).append(flag)
    lines: list[str] = []
    for group, members in groups.items():
        lines += [f"**{group}**\n", "| flag | what it does | default |", "|---|---|---|"]
        lines += [row(flag, mark_serve=mark_serve) for flag in members]
        lines.append("")
    return lines


def row(flag: Flag, *, mark_serve: bool) -> str:
    value = "" if flag.value is None else f" {flag.value}"
    names = ", ".join(f"`{name}{value}`" for name in (flag.name, *flag.also))
    marks = ["s"] if mark_serve and flag.in_serve else []
    marks += ["repeatable"] if flag.repeated else []
    if marks:
        names += f" *{', '.join(marks)}*"
    parts = [flag.help]
    if flag.choices:
        parts.append(f"One of {', '.join(f'`{choice}`' for choice in flag.choices)}.")
    if flag.variable is not None and flag.variable not in flag.help:
        parts.append(f"Variable: `{flag.variable}`.")
    default = "" if flag.value is None else (flag.default or "none")
    return (
        "| "
        + " | ".join(cell.replace("|", r"\|") for cell in (names, " ".join(parts), default))
        + " |"
    )


if __name__ == "__main__":
    print(page(), end="")
