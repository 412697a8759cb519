"""The settings of a rank: how the workers of a group share the experts of one model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from headrace.settings.table import Typed, rows, setting
from headrace.settings.values import FlagError, Whole, count

PARALLEL = "Expert parallelism"
EpCombine: TypeAlias = Literal["exact", "partial"]
EP_TRANSPORTS = ("auto", "shared-memory", "gloo", "symmetric-memory", "deep-ep")
MOST_RANKS = 1024
"""Of a group: more is a slip of the finger."""


@dataclass(frozen=True, kw_only=True)  # no slots: `WorkerSettings` has another base with some
class ParallelSettings:
    """What each rank of a group is told, all of them the same. A worker on its own says that it ignores them."""

    ep_combine: EpCombine = setting(
        "--ep-combine",
        group=PARALLEL,
        value="HOW",
        choices=get_args(EpCombine),
        default="exact",
        help="How the results of experts on several ranks are summed. exact sends each result back by itself, so that "
        "text does not depend on the ranks. partial sends one sum from each rank, which is fewer bytes.",
        in_serve=True,
    )
    ep_transport: str = setting(
        "--ep-transport",
        group=PARALLEL,
        value="TRANSPORT",
        choices=EP_TRANSPORTS,
        default="auto",
        help="What carries rows between ranks. With auto the ranks time shared memory and gloo at the start, and take "
        "the quickest. Shared memory is for ranks of one machine. symmetric-memory and deep-ep are for GPUs, and have "
        "not run on one yet.",
        in_serve=True,
    )
    ep_timeout_ms: int = setting(
        "--ep-timeout-ms",
        group=PARALLEL,
        value="MS",
        read=Whole(100),  # shorter, and a machine that pauses a process for a moment ends groups
        default=30_000,
        help="Time after which a rank is lost that others wait for in a step, or that gives no sign of life, and its "
        "group with it.",
        in_serve=True,
    )
    ep_start_timeout_s: int = setting(
        "--ep-start-timeout-s",
        group=PARALLEL,
        value="SECONDS",
        read=Whole(1, 86_400),
        default=600,
        help="Time that the first rank of a group waits for the last one: to be there, and once more to have loaded.",
        in_serve=True,
    )
    ep_redundant: int = setting(
        "--ep-redundant",
        group=PARALLEL,
        value="SLOTS",
        read=count,
        default=0,
        help="Slots of a layer, over all ranks, for second copies of experts. Experts and these slots have to divide "
        "by the ranks.",
        in_serve=True,
    )
    ep_rebalance_rounds: int = setting(
        "--ep-rebalance-rounds",
        group=PARALLEL,
        value="ROUNDS",
        read=count,
        default=0,
        help="Steps of a group after which its ranks compare how often each expert was chosen. They move experts "
        "if the wait that this saves is worth the move. 0: experts stay where they are.",
        in_serve=True,
    )

    def of_groups(self) -> list[str]:
        """The flags among these that were given another value than they have by themselves."""
        return [
            flag.name
            for name, flag in rows(ParallelSettings).items()
            if getattr(self, name) != ParallelSettings.__dataclass_fields__[name].default
        ]


def refuse_without_group(kept: Typed) -> None:
    """Raise FlagError where `serve` starts no group and was told how one should be."""
    if given := [flag.name for flag in rows(ParallelSettings).values() if flag.name in kept]:
        raise FlagError(
            f"there is one rank, which makes nothing of {' and '.join(given)}: give --ep too, at least 2, or leave "
            f"{'them' if len(given) > 1 else 'it'} out"
        )
