"""From the settings of a rank to its place in a group: it says what it serves, and learns where experts are.

This comes before weights are read, so that ranks that do not fit together say so at once.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from headrace import logs
from headrace.exit_status import EXIT_RANK_LOST
from headrace.models import UnsupportedModelError, check_ranks, dtype_of_weights
from headrace.models.deepseek import Deepseek
from headrace.models.deepseek_weights import Share
from headrace.settings.values import SettingsError
from headrace.settings.worker import unnamed
from headrace.version import VERSION
from headrace.wire.frames import PROTOCOL, Group
from headrace.worker.parallel.environment import NO_RUN_ID, GroupEnvironment
from headrace.worker.parallel.group import RankGroup
from headrace.worker.parallel.rebalance import Rebalancer
from headrace.worker.parallel.rebalanced import RebalanceConfig
from headrace.worker.parallel.rendezvous import Met, meet
from headrace_kernels.moe.balance import GroupShape, balanced_slots, layer_placements
from headrace_kernels.moe.placed import PlacedDispatch
from headrace_kernels.moe.placement import LayerPlacement
from headrace_kernels.moe.transport import RankLost
from headrace_kernels.transport.choose import MANY_ROWS, ChosenWays, choose
from headrace_kernels.transport.ways import ExpertsShape, GroupSite, ways

if TYPE_CHECKING:
    from headrace.models import DType, Model
    from headrace.models.config import ModelConfig
    from headrace.models.load.checkpoint import Checkpoint
    from headrace.settings.worker import StepSizes, WorkerSettings
    from headrace_kernels.moe.transport import Transport

log = logging.getLogger(__name__)

MOST_NAME = 200  # letters of a group's name


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """This rank's place in its group."""

    lockstep: RankGroup
    share: Share
    worker: str  # name of this rank among the workers of a fleet
    told: Group  # what routers are told
    ranks_here: int  # that share the memory of this machine
    start_timeout_s: float
    transport: Transport
    rebalance: RebalanceConfig | None  # None: experts stay where they are

    def rebalancer(self, model: Model) -> Rebalancer | None:
        """What moves the experts of the loaded model between steps."""
        if self.rebalance is None:
            return None
        assert isinstance(model, Deepseek), "check_ranks was asked"
        return Rebalancer(self.transport, model.placed_layers, self.rebalance)

    def ready(self) -> None:
        """Wait until all ranks are; from then on each shows that it lives."""
        self.all_have("a model to serve")
        self.lockstep.show_life()

    def all_have(self, what: str) -> None:
        """Wait until all ranks have come so far."""
        self._meet(what, 0)

    def least(self, what: str, here: int) -> int:
        """The least that any rank has."""
        least = min(self._meet(what, here))
        if least < here:
            log.info(
                "%s: %d here, %d in the group, as another rank has room for no more",
                what,
                here,
                least,
            )
        return least

    def _meet(self, what: str, here: int) -> list[int]:
        facts = self.lockstep.meet_facts({what: here}, timeout_s=self.start_timeout_s)
        return [int(one[what]) for one in facts]


def join(
    environment: GroupEnvironment,
    settings: WorkerSettings,
    checkpoint: Checkpoint,
    sizes: StepSizes,
    device: torch.device,
) -> GroupPlace:
    """Raises `SettingsError`, `GroupMismatch`, `GroupFailed` and OSError."""
    ranks, config = environment.size, checkpoint.config
    moves = settings.ep_rebalance_rounds > 0
    try:
        check_ranks(config, ranks, settings.ep_redundant, moves=moves)
    except UnsupportedModelError as error:
        raise SettingsError(str(error)) from error
    rebalance = rebalance_config(config, ranks, settings)
    start_timeout_s = float(settings.ep_start_timeout_s)
    log.info(
        "rank %d of %d: waiting for the others at %s:%d for at most %.0f s",
        *(environment.rank, ranks, environment.host, environment.port, start_timeout_s),
    )
    serves = what_it_serves(settings, checkpoint, sizes, device)
    met = meet(environment, group_name(environment, settings.name), serves, start_timeout_s)
    timeout_s = settings.ep_timeout_ms / 1e3
    lockstep = RankGroup(environment.rank, ranks, met.links, timeout_s=timeout_s)
    lockstep.on_lost(partial(end_start, lockstep))
    log.info("the group %s has met: %d ranks", met.name, ranks)
    chosen = choose_ways(met, lockstep, settings, config, sizes, device)
    lockstep.carry_by(chosen)
    kind = " and ".join(dict.fromkeys(chosen.names))
    log.info("rows go by %s: %s", kind, json.dumps(chosen.report))
    make = chosen.dispatch
    dispatch = make if rebalance is None else partial(PlacedDispatch, make=make)
    layers = placements(config, ranks, settings.ep_redundant, mtp=settings.mtp > 0)
    mine = met.ranks[environment.rank]
    return GroupPlace(
        lockstep=lockstep,
        share=Share(rank=environment.rank, layers=layers, dispatch=dispatch, native=chosen.native),
        worker=f"{met.name}-rank-{environment.rank}",
        told=Group(
            id=met.name, rank=environment.rank, size=ranks, epoch=met.epoch, transport=chosen.told
        ),
        ranks_here=sum(one.host == mine.host for one in met.ranks),
        start_timeout_s=start_timeout_s,
        transport=cast("Transport", chosen.ways[0].rounds),
        rebalance=rebalance,
    )


def rebalance_config(
    config: ModelConfig, ranks: int, settings: WorkerSettings
) -> RebalanceConfig | None:
    """When experts move, and between which places; None where they do not."""
    if settings.ep_rebalance_rounds == 0:
        return None
    assert config.deepseek is not None, "check_ranks was asked"
    slots, left = divmod(config.deepseek.experts + settings.ep_redundant, ranks)
    assert left == 0, "check_ranks was asked"
    shape = GroupShape(ranks=ranks, slots=slots)
    return RebalanceConfig(shape=shape, rounds_of_window=settings.ep_rebalance_rounds)


def end_start(lockstep: RankGroup) -> None:
    """A rank is gone while weights are read here, which nothing else would interrupt."""
    if threading.current_thread() is threading.main_thread():
        return  # which waits for that rank, and raises
    try:
        lockstep.check()
    except RankLost as lost:
        log.error("the group did not start: %s", lost)  # noqa: TRY400
        logs.end_process(EXIT_RANK_LOST)


def what_it_serves(
    settings: WorkerSettings, checkpoint: Checkpoint, sizes: StepSizes, device: torch.device
) -> dict[str, str]:
    """All that has to be the same on each rank, by the words that a person knows it by."""
    prints = checkpoint.fingerprints()
    dtype = cast("DType", settings.dtype)
    serves = {
        "version of Headrace": f"{VERSION} (protocol {PROTOCOL})",
        "model": prints.weights,
        "tokenizer": prints.tokenizer,
        "chat template": prints.chat_template,
        "device": device.type,
        "--dtype": dtype_of_weights(checkpoint.config, dtype, device.type),
        "--kv-dtype": settings.kv_dtype,
        "--block-tokens": sizes.block_tokens,
        "--max-batched-tokens": sizes.max_batched_tokens,
        "--max-sequences": sizes.max_sequences,
        "--context-tokens": settings.context_tokens or "the model's",
        "--prompt-wait-rounds": settings.prompt_wait_rounds,
        "--mtp": settings.mtp,
        "--mtp-verify": settings.mtp_verify,
        "--mtp-fixed": settings.mtp_fixed,
        "--role": settings.role,
        "--ep-combine": settings.ep_combine,
        "--ep-timeout-ms": settings.ep_timeout_ms,  # in which ranks show that they live
        "--ep-transport": settings.ep_transport,
        "--ep-redundant": settings.ep_redundant,
        "--ep-rebalance-rounds": settings.ep_rebalance_rounds,
    }
    return {what: str(value) for what, value in serves.items()}


def group_name(environment: GroupEnvironment, name: str) -> str:
    """`--name`, or that of the run: the ranks of a group have one, also after a restart."""
    if name != unnamed() or environment.run == NO_RUN_ID:
        return name[:MOST_NAME]
    return environment.run[:MOST_NAME]


def placements(
    config: ModelConfig, ranks: int, redundant: int, *, mtp: bool
) -> Mapping[int, LayerPlacement]:
    """Where the experts of each layer are before any load is known."""
    deepseek = config.deepseek
    assert deepseek is not None, "check_ranks was asked"
    layers = range(deepseek.dense_layers, config.num_layers + mtp)
    even = LayerPlacement.even(deepseek.experts, ranks)
    if redundant:
        slots = (deepseek.experts + redundant) // ranks
        loads = np.ones((1, deepseek.experts))
        shape = GroupShape(ranks=ranks, slots=slots)
        [even] = layer_placements(balanced_slots(loads, shape), deepseek.experts)
    return dict.fromkeys(layers, even)


def choose_ways(
    met: Met,
    lockstep: RankGroup,
    settings: WorkerSettings,
    config: ModelConfig,
    sizes: StepSizes,
    device: torch.device,
) -> ChosenWays:
    """How rows go between the ranks. Raises ValueError where a named way is not there, and RankLost."""
    assert config.deepseek is not None, "check_ranks was asked"
    rank, ranks, combine = lockstep.rank, lockstep.ranks, settings.ep_combine
    name = dtype_of_weights(config, cast("DType", settings.dtype), device.type)
    shape = ExpertsShape(
        hidden=config.hidden_size,
        experts=config.deepseek.experts,
        top_k=config.deepseek.experts_per_token,
        dtype=torch.float32 if device.type == "cpu" else getattr(torch, name),
        device=device,
        combine=combine,
        most_rows=max(sizes.max_batched_tokens, MANY_ROWS),
    )
    site = GroupSite(
        rank=rank,
        ranks=ranks,
        one_host=met.one_host,
        shape=shape,
        memory=Path(f"/dev/shm/headrace-group-{met.epoch:x}-{met.secret[:16]}"),
        store=met.store,
        deadline_s=settings.ep_timeout_ms / 1e3,
        meeting_s=float(settings.ep_start_timeout_s),
        watch=lockstep.watch,
        on_lost=lockstep.missed,
        carries_experts=settings.ep_rebalance_rounds > 0,
    )
    forced = None if settings.ep_transport == "auto" else settings.ep_transport
    return choose(
        ways(site, forced),
        shape,
        rank=rank,
        ranks=ranks,
        meet=partial(lockstep.meet_facts, timeout_s=float(settings.ep_start_timeout_s)),
        forced=forced,
    )
