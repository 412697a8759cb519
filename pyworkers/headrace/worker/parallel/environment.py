"""What torchrun says of a group, read once from its variables and checked by name.

`headrace serve --ep N` sets the same variables for the ranks that it starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.settings.parallel import MOST_RANKS
from headrace.settings.values import SettingsError

NO_RUN_ID = "none"  # what torchrun says where nobody gave --rdzv-id


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEnvironment:
    """Where this process stands in its group, and where the group meets."""

    rank: int
    size: int
    local_rank: int
    local_size: int  # ranks on this machine
    host: str  # of the store, with `port`
    port: int
    run: str  # names this group among others that meet at the same store
    attempt: int  # how often torchrun has restarted the group
    store_is_there: bool  # torchrun's agent keeps the store; otherwise rank 0 does

    @property
    def keeps_store(self) -> bool:
        return self.rank == 0 and not self.store_is_there


def read_environment(variables: Mapping[str, str]) -> GroupEnvironment | None:
    """None where there is no group: `WORLD_SIZE` is 1 or not set. Raises SettingsError."""
    if "WORLD_SIZE" not in variables:
        return None
    size = _whole(variables, "WORLD_SIZE", 1, MOST_RANKS)
    if size == 1:
        return None
    local_size = _whole(variables, "LOCAL_WORLD_SIZE", 1, size, default=1)
    if not variables.get("MASTER_ADDR"):
        raise SettingsError(_lacks("MASTER_ADDR"))
    return GroupEnvironment(
        rank=_whole(variables, "RANK", 0, size - 1),
        size=size,
        local_rank=_whole(variables, "LOCAL_RANK", 0, local_size - 1, default=0),
        local_size=local_size,
        host=variables["MASTER_ADDR"],
        port=_whole(variables, "MASTER_PORT", 1, 65_535),
        run=variables.get("TORCHELASTIC_RUN_ID", NO_RUN_ID),
        attempt=_whole(variables, "TORCHELASTIC_RESTART_COUNT", 0, 2**31 - 1, default=0),
        store_is_there=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _whole(
    variables: Mapping[str, str], name: str, least: int, most: int, default: int | None = None
) -> int:
    text = variables.get(name)
    if text is None:
        if default is None:
            raise SettingsError(_lacks(name))
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and least <= int(text) <= most):
        of = f", as WORLD_SIZE is {variables['WORLD_SIZE']}" if name == "RANK" else ""
        raise SettingsError(
            f"{name} is {text[:40]!r}; it must be a whole number from {least} to {most}{of}"
        )
    return int(text)


def _lacks(name: str) -> str:
    return (
        f"WORLD_SIZE says that this worker is one of a group, and {name} is not set; start the group with torchrun or "
        "`headrace serve --ep`, or unset WORLD_SIZE"
    )
