"""What carries parcels between the ranks of a group, and how a step or the whole group can fail meanwhile.

The ranks of a group compute the same passes in the same order, and meet in each layer of experts. A *round* is what
they compute together: a step, and the passes that draft after it. Rounds are numbered from 1, alike on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    import torch

    from headrace import _core
    from headrace_kernels.moe.dispatch import Combine
    from headrace_kernels.moe.placement import Replicas

# Of as many rows each; of the same dtypes and widths on all ranks.
Columns: TypeAlias = "tuple[torch.Tensor, ...]"


class Span(NamedTuple):
    """Rows `start` to `end`, the last one not among them."""

    start: int
    end: int


class Arrived(NamedTuple):
    """What the ranks sent to this one. It stays as it is, whatever is exchanged afterwards."""

    columns: Columns  # rows in the order of the ranks that they come from
    counts: list[int]  # rows from each rank


class StepAborted(Exception):
    """A rank failed inside of a round: the round is over on all ranks, the group goes on with the next one."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} failed: {reason}")
        self.rank = rank
        self.reason = reason


class RankLost(Exception):
    """A rank is gone, or did not come in time: the group is over."""

    def __init__(self, rank: int, waited_for: str) -> None:
        super().__init__(f"rank {rank} is lost: {waited_for}")
        self.rank = rank
        self.waited_for = waited_for  # where it did not come, and how long it was waited for


class Transport(Protocol):
    """Carries parcels between the ranks of a group, which all call it in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    def begin(self, round_number: int) -> None:
        """A round begins. What is left of the one before, such as parcels after an abort, is void.

        Round 0 is before the first one that is computed: what ranks exchange when they meet.
        """
        ...

    def post(self, columns: Columns, parcels: Sequence[Span]) -> Callable[[], Arrived]:
        """Send each rank its parcel, these rows of all columns. The result waits for the parcels that come.

        Parcels may overlap. The columns must not change before the wait is over. Both raise `StepAborted` where a rank
        ended the round, and `RankLost` for the rank that did not send in time.
        """
        ...

    def abort(self, reason: str) -> None:
        """This rank failed: end the round for ranks that wait, or will wait, for its parcels. Never waits long.

        Where it sent all that it owed in this round, ranks that still are in the last exchange hear of it or not, and
        those that are through do not. No rank hears of it in another round.
        """
        ...

    def close(self) -> None:
        """Give everything back. Waiting ranks learn that this one is lost."""
        ...


OnLost: TypeAlias = Callable[[RankLost], None]
"""Is told of a lost rank, and may raise what names another one."""


@runtime_checkable
class NativeTransport(Protocol):
    """A `Transport` that recorded programs of the CPU also use by themselves, without Python."""

    def layer_exchange(
        self, home: Replicas, combine: Combine, on_lost: OnLost | None = None
    ) -> _core.SharedExchange | None:
        """What the program of one layer is given; `None` where the transport inside of this one is not native."""
        ...

    @property
    def waited_s(self) -> float:
        """Seconds that programs waited in it so far. What waits in `post` is not in it."""
        ...

    @property
    def waits_s(self) -> float:
        """So long a program waits in it now; 0 where none does. For any thread."""
        ...
