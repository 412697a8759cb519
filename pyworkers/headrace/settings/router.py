"""The router's flags in `headrace serve`. Their table and their checks are the router's own, in Rust."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from headrace.settings.fleet import SERVER
from headrace.settings.table import Flag
from headrace.settings.values import FlagError

if TYPE_CHECKING:
    from headrace.settings.table import Typed

WORKER_LISTEN = "--worker-listen"
# Where workers of this machine dial in is the business of `serve`, and a file of configuration has a table for it.
NOT_IN_SERVE = ("--worker-socket", "--config")


@cache
def router_flags() -> dict[str, Flag]:
    """Every flag of `headrace router` by its name."""
    from headrace import _core  # not at the top: the help of other commands does without

    return {
        row["name"]: Flag(
            name=row["name"],
            also=tuple(row["also"]),
            group=row["group"] or SERVER,
            help=row["help"],
            value=row["value"],
            choices=tuple(row["choices"]),
            default=row["default"],
            repeated=row["repeated"],
            variable=row["variable"],
            reloads=row["reloads"],
        )
        for row in _core.router_flags()
    }


def serve_flags() -> list[Flag]:
    """The router's flags as `serve` takes them."""
    flags = {name: flag for name, flag in router_flags().items() if name not in NOT_IN_SERVE}
    flags[WORKER_LISTEN] = replace(
        flags[WORKER_LISTEN],
        default="none: only the workers that serve starts",
        help="Address at which workers of other machines dial in, besides those that serve starts: HOST:PORT, or "
        "unix:PATH. They need the secret of --secret-file, or a certificate that --worker-tls-client-ca vouches for.",
    )
    return list(flags.values())


def handed_on(read_by_router: Collection[str] = ()) -> list[Flag]:
    """The flags that the router of `serve` gets as they were typed; of the others `serve` makes something.

    `read_by_router`: flags that the router reads from a file of configuration itself.
    """
    made = ("--port", "--config", WORKER_LISTEN)
    flags = [flag for name, flag in router_flags().items() if name not in made]
    return [flag for flag in flags if flag.name not in read_by_router]


def value_of(kept: Typed, name: str) -> str:
    """What was typed for a flag of the router, or else its default."""
    text = kept.last(name) if name in kept else router_flags()[name].default
    assert text is not None, f"{name} has no default"
    return text


def check_router(kept: Typed, usage: str) -> None:
    """Raise ConfigError for flags that the router would refuse, and FlagError for those that serve nothing here.

    The text of ConfigError is whole: it ends with `usage`.
    """
    from headrace import _core

    flags = kept.argv(router_flags().values())
    private = [] if WORKER_LISTEN in kept else [f"{WORKER_LISTEN}=unix:a-private-folder"]
    _core.check_router([*flags, *private], usage)
    if WORKER_LISTEN in kept and not workers_know(kept):
        raise FlagError(
            f"{WORKER_LISTEN}: workers that join there must know a secret: give --secret-file FILE or set "
            "HEADRACE_SECRET, or certificates for workers and --worker-tls-client-ca FILE, or add "
            "--allow-anonymous-workers if everybody who can reach that address may be sent prompts"
        )


def check_alone(kept: Typed, usage: str) -> None:
    """Raise ConfigError for flags that `headrace router` would refuse. The text ends with `usage`."""
    from headrace import _core

    _core.check_router(kept.argv(router_flags().values()), usage)


def workers_know(kept: Typed) -> bool:
    """Whether workers have by themselves what lets them join: a secret that was typed, certificates, or nothing at all.

    Those that `serve` starts come through a private socket, without TLS.
    """
    if "--secret-file" in kept or os.environ.get("HEADRACE_SECRET"):
        return True
    need_none = "--worker-tls-client-ca" in kept or "--allow-anonymous-workers" in kept
    return WORKER_LISTEN in kept and need_none
