"""Checked arguments of `headrace serve`, and ports that are free."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path

from headrace.cli.children.ranks import rank_name
from headrace.settings.values import SettingsError

RELOADED = ("--api-key-file", "--admin-key-file", "--config", "--tls-cert", "--worker-tls-cert")
"""Flags of the router whose files are read again while it serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """Checked arguments of `headrace serve`; `port` is a real port."""

    host: str
    port: int
    roles: tuple[str, ...]  # of each worker; a name is its role's with a number
    model: str | None
    worker_argv: list[str]
    router_argv: list[str]
    drain_timeout_s: float
    router_reads: tuple[
        str, ...
    ] = ()  # flags that stand in the file of configuration alone, as they may change
    worker_listen: str | None = None  # for workers of other machines
    device: str = "auto"
    dtype: str = "auto"
    context_tokens: int | None = None
    ranks: int = 1  # of each worker: processes that share the experts of one model
    redundant: int = 0  # slots for second copies of experts
    rebalances: bool = False  # experts move between the ranks
    admin: Path | None = None  # where the router tells of its workers, once there is a folder
    secret: str | None = field(default=None, repr=False)  # for the children; None: they have it

    @property
    def names(self) -> list[str]:
        """Of the workers: worker-0, or prefill-0 and decode-0, each kind counted from 0."""
        kinds = ["worker" if role == "both" else role for role in self.roles]
        return [f"{kind}-{kinds[:place].count(kind)}" for place, kind in enumerate(kinds)]

    def members(self, worker: str) -> list[str]:
        """The processes of a worker, by their names: itself, or the ranks of a group."""
        if self.ranks == 1:
            return [worker]
        return [rank_name(worker, rank) for rank in range(self.ranks)]

    @property
    def generating(self) -> set[str]:
        """The workers that answers can come from: prompts alone are no service."""
        pairs = zip(self.names, self.roles, strict=True)
        return {name for name, role in pairs if role != "prefill"}

    @property
    def reach(self) -> str:
        """An address at which this machine reaches the router."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)

    @property
    def reloads(self) -> bool:
        """Whether the router reads files again that SIGHUP tells of."""
        return any(word.partition("=")[0] in RELOADED for word in self.router_argv)

    @property
    def url(self) -> str:
        tls = any(word.partition("=")[0] == "--tls-cert" for word in self.router_argv)
        host = f"[{self.reach}]" if ":" in self.reach else self.reach
        return f"{'https' if tls else 'http'}://{host}:{self.port}"


def free_address(address: str) -> str:
    """`address`, with a free port where it is HOST:0. Raises SettingsError if the router could not listen there."""
    host, _, port = address.rpartition(":")
    if address.startswith("unix:"):
        return address
    return f"{host}:{free_port(host.strip('[]'), int(port))}"


def free_port(host: str, port: int) -> int:
    """`port`, or a free one for 0. Raises SettingsError if the router could not listen there.

    Chosen here rather than by the router, so that a restarted router listens where the first did.
    """
    try:
        kind, _, _, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(kind, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
            return probe.getsockname()[1]
    except socket.gaierror as error:
        raise SettingsError(f"--host {host}: {error.strerror}") from error
    except OSError as error:
        why = error.strerror or str(error)
        raise SettingsError(f"cannot listen on {host}:{port}: {why}") from error
