"""The flags that only `headrace serve` has: which workers it starts on this machine."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.settings.parallel import MOST_RANKS
from headrace.settings.table import rows, setting
from headrace.settings.values import FlagError, Whole

SERVER = "Server"
MOST_PROCESSES = 1024
"""Workers of one machine: more is a slip of the finger. Each has a process and a copy of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """How many workers of each kind were typed. None is not typed."""

    workers: int | None = setting(
        "--workers",
        group=SERVER,
        value="N",
        read=Whole(1, MOST_PROCESSES),
        shown="1",
        help="Worker processes to start, each with a copy of the model.",
    )
    prefill: int | None = setting(
        "--prefill",
        group=SERVER,
        value="N",
        read=Whole(1, MOST_PROCESSES),
        help="Workers that only compute prompts. Needs --decode, and stands instead of --workers.",
    )
    decode: int | None = setting(
        "--decode",
        group=SERVER,
        value="N",
        read=Whole(1, MOST_PROCESSES),
        help="Workers that generate answers to the prompts of the --prefill workers, and do the whole request where "
        "that is quicker.",
    )

    ep: int | None = setting(
        "--ep",
        group=SERVER,
        value="RANKS",
        read=Whole(1, MOST_RANKS),
        shown="1",
        help="Ranks of each worker: processes that share the experts of a model and have all else whole. For DeepSeek "
        "models.",
    )

    def roles(self) -> tuple[str, ...]:
        """The role of each worker. Raises FlagError for numbers that make no service."""
        roles = self._roles()
        if (processes := len(roles) * (self.ep or 1)) > MOST_PROCESSES:
            raise FlagError(
                f"{len(roles)} workers of --ep {self.ep} are {processes} processes, at most {MOST_PROCESSES} are "
                "allowed"
            )
        return roles

    def _roles(self) -> tuple[str, ...]:
        if self.prefill is None and self.decode is None:
            return ("both",) * (self.workers or 1)
        if self.workers is not None:
            raise FlagError(
                "--workers N serves whole requests, --prefill N --decode N splits them: take one or the other"
            )
        if self.prefill is None or self.decode is None:
            lacks = "--prefill" if self.prefill is None else "--decode"
            given = "--decode" if self.prefill is None else "--prefill"
            raise FlagError(f"{given} needs {lacks}: neither kind serves alone")
        return ("prefill",) * self.prefill + ("decode",) * self.decode


FLEET_FLAGS = rows(FleetSettings)
