"""Chosen tokens that stay where the model computes: the next step begins before the host has read them.

Only for the most probable tokens: those that are drawn, or that a request has changed the logits for, the host chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from headrace_kernels.upload import upload

if TYPE_CHECKING:
    from headrace_kernels.ops import Fence, Results


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """Tokens on their way to the host."""

    ids: torch.Tensor
    best: torch.Tensor
    fence: Fence | None

    def read(self) -> NDArray[np.int64]:
        """Wait for them; -1 where the logits were not finite."""
        if self.fence is not None:
            self.fence.synchronize()
        return np.where(np.isfinite(self.best.numpy()), self.ids.numpy(), -1)


class TokenPool:
    """The newest token of each batch row on `device`; `fence` comes after all work given to that so far."""

    def __init__(
        self, batch_rows: int, device: torch.device, fence: Callable[[], Fence | None]
    ) -> None:
        self.newest = torch.zeros(batch_rows, dtype=torch.int32, device=device)
        self._fence = fence

    def put(self, batch_rows: list[int] | NDArray[np.int64], tokens: list[int]) -> None:
        """The host knows these."""
        at = upload(np.asarray(batch_rows, dtype=np.int64), self.newest.device)
        self.newest[at] = upload(np.asarray(tokens, dtype=np.int32), self.newest.device)

    def choose(self, logits: Results, batch_rows: NDArray[np.int64]) -> PendingTokens:
        """The most probable token of each row is the newest of its batch row."""
        assert isinstance(logits, torch.Tensor), "of a model that runs ahead"
        ids = logits.argmax(dim=1)
        best = logits.gather(1, ids[:, None])[:, 0]
        self.newest[upload(batch_rows, self.newest.device)] = ids.int()
        return PendingTokens(_to_host(ids), _to_host(best), self._fence())


def _to_host(values: torch.Tensor) -> torch.Tensor:
    """Without waiting for the device."""
    if values.device.type != "cuda":
        return values
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return pinned.copy_(values, non_blocking=True)
