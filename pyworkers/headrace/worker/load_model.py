"""From settings to a model in an engine, and what routers are told about it."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, cast

from headrace._core import HASH_SCHEME, GrammarVocabulary
from headrace.engine.admission import QUEUE_RULE
from headrace.engine.cache.block_hash import KeyedBlockHasher
from headrace.engine.cache.memory import allocate_kv, blocks_wanted, kv_blocks
from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.timed_steps import time_steps
from headrace.engine.warm_up import WarmUp, all_begin, warm_up
from headrace.errors import ContextTooLong
from headrace.settings.engine import engine_values
from headrace.settings.values import split_names
from headrace.settings.worker import check_context, step_sizes
from headrace.version import VERSION
from headrace.wire.frames import PROTOCOL, Capacity, Fingerprints, Hello
from headrace.worker.device import choose_device, load_torch
from headrace.worker.step_prior import device_name, known_or_timed
from headrace_kernels.torch_if_loaded import type_of

if TYPE_CHECKING:
    from headrace.models import DType, KvDType
    from headrace.settings.worker import WorkerSettings
    from headrace.wire.frames import Role
    from headrace.worker.parallel.environment import GroupEnvironment
    from headrace.worker.parallel.group import RankGroup

log = logging.getLogger(__name__)

QUIET_S = 3.0  # a model that loads sooner shows no bar


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to serve, and what routers are told about it."""

    engine: Engine
    document: bytes
    hello: Hello
    group: RankGroup | None = None  # whose rank this worker is


def load(settings: WorkerSettings, environment: GroupEnvironment | None = None) -> Loaded:
    """Read the model, make its KV cache and compile its kernels: all of it, or as a rank of the group of `environment`.

    Raises `ValueError` where a setting cannot work, and `GroupFailed` and `RankLost` where a group does not come to be.
    """
    from headrace.models import load_model
    from headrace.models.load.progress import ProgressBar
    from headrace.models.load.source import resolve

    began = time.monotonic()
    device = choose_device(settings.device)
    if type_of(device) != "cpu":
        load_torch(f"--device {device}")
    sizes = step_sizes(settings, type_of(device))
    checkpoint = resolve(settings.model)
    # Sooner than weights are read.
    check_context(settings.context_tokens, checkpoint.config.context_tokens)
    joined = None
    if environment is None:
        if unused := settings.of_groups():
            log.warning(
                "no effect of %s: this worker is in no group, as WORLD_SIZE is 1 or not set",
                " and ".join(unused),
            )
    else:
        load_torch("a group of ranks")
        import torch

        from headrace.worker.parallel.joining import join as join_group

        if type_of(device) == "cuda":
            device = f"cuda:{environment.local_rank}"
        joined = join_group(environment, settings, checkpoint, sizes, torch.device(device))
    checkpoint.progress = bar = ProgressBar(f"loading {checkpoint.name}", quiet_s=QUIET_S)
    try:
        model = load_model(
            checkpoint,
            dtype=cast("DType", settings.dtype),
            kv_dtype=cast("KvDType", settings.kv_dtype),
            device=device,
            block_tokens=sizes.block_tokens,
            mtp=settings.mtp > 0,
            share=None if joined is None else joined.share,
        )
    finally:
        bar.close()
    context = min(model.context_tokens, settings.context_tokens or model.context_tokens)
    step = model.step_memory(
        rows=sizes.max_batched_tokens,
        answers=min(sizes.max_sequences * (1 + settings.mtp), sizes.max_batched_tokens),
        context_tokens=context,
        mtp=settings.mtp > 0,
    )
    if joined is not None:
        joined.all_have("weights")  # what is free is what they leave
    num_blocks = kv_blocks(
        settings.kv_memory_bytes,
        block_bytes=model.kv_block_bytes,
        most_blocks=blocks_wanted(
            context_tokens=context,
            sequences=sizes.max_sequences,
            block_tokens=sizes.block_tokens,
            device=device,
        ),
        device=device,
        step=step,
        sharers=1 if joined is None else joined.ranks_here,
    )
    if joined is not None:
        num_blocks = joined.least("KV blocks", num_blocks)
    check_cache(settings.context_tokens, num_blocks * sizes.block_tokens)
    allocate_kv(model, num_blocks, device)
    if settings.cuda_graphs:
        model.record_steps()
    lockstep = None if joined is None else joined.lockstep
    if model.ahead_on is None:
        log.info("no warm-up: on a CPU no kernel is compiled")
    else:
        warm_up(
            WarmUp(
                model=model,
                num_blocks=num_blocks,
                rows=sizes.max_batched_tokens,
                sequences=sizes.max_sequences,
            ),
            lockstep=lockstep,
        )
    prints = checkpoint.fingerprints()
    step_prior = known_or_timed(
        {
            "headrace": VERSION,
            "weights": prints.weights,
            "dtype": model.dtype_name,
            "kv": model.kv_layout,
            "device": device_name(device),
            "ranks": 1 if environment is None else environment.size,
            "rows": sizes.max_batched_tokens,
        },
        lambda: time_steps(
            model, num_blocks=num_blocks, rows=sizes.max_batched_tokens, lockstep=lockstep
        ),
        all_know=lambda known: all_begin(lockstep, known),
    )
    config = EngineConfig(num_blocks=num_blocks, **asdict(sizes), **engine_values(settings))
    # Until a router brings its key nothing is named: no request comes before its Welcome.
    document = checkpoint.doc()
    engine = Engine(
        model,
        config,
        KeyedBlockHasher(bytes(32), sizes.block_tokens),
        lockstep=lockstep,
        vocabulary=read_vocabulary(document),
    )
    if joined is not None and engine.rounds is not None:
        engine.rounds.between = joined.rebalancer(model)
        joined.ready()
    served = settings.served_model_name
    name, *aliases = [checkpoint.name] if served is None else split_names(served)
    unasked = ""
    if settings.dtype == "auto" and model.dtype_name == "int8":
        unasked = " (--dtype float32 leaves the weights as they are)"
    size_unasked = ""
    if settings.kv_memory_bytes is None:
        size_unasked = (
            f", which hold {num_blocks * sizes.block_tokens / context:.1f} times the context of {context} tokens "
            "(--kv-memory for another size)"
        )
    log.info(
        "%s in %s on %s%s; loaded in %.1f s; KV cache: %d blocks of %d tokens, %.0f MiB%s; at most %d answers at "
        "once, %d tokens in a step, which takes %s",
        name,
        model.dtype_name,
        device,
        unasked,
        time.monotonic() - began,
        num_blocks,
        sizes.block_tokens,
        num_blocks * model.kv_block_bytes / 2**20,
        size_unasked,
        sizes.max_sequences,
        sizes.max_batched_tokens,
        step,
    )
    hello = Hello(
        protocol=PROTOCOL,
        worker=settings.name if joined is None else joined.worker,
        epoch=time.time_ns() // 1_000_000,
        role=cast("Role", settings.role),
        model=name,
        fingerprints=Fingerprints(
            weights=prints.weights,
            tokenizer=prints.tokenizer,
            chat_template=prints.chat_template,
            kv_layout=model.kv_layout,
            hash_scheme=HASH_SCHEME,
            block_tokens=sizes.block_tokens,
        ),
        capacity=capacity(config),
        context_tokens=engine.context_tokens,
        kv_block_bytes=model.kv_block_bytes if settings.transfer else 0,
        dtype=model.dtype_name,
        aliases=aliases,
        pooled_width=model.pooled_width,
        step_prior=step_prior,
        queue_rule=QUEUE_RULE,
        group=None if joined is None else joined.told,
    )
    return Loaded(engine, document, hello, lockstep)


def read_vocabulary(document: bytes) -> GrammarVocabulary | None:
    """`None` for a tokenizer whose tokens have no text of their own: then no answer can be held to a grammar."""
    try:
        return GrammarVocabulary(document)
    except ValueError as error:
        log.warning("answers cannot be held to a grammar: %s", error)
        return None


def check_cache(typed: int | None, holds: int) -> None:
    """Raise `ContextTooLong` where somebody typed a longer context than the cache holds; unasked it is cut to that."""
    if typed is not None and typed > holds:
        raise ContextTooLong(typed, holds, "the KV cache holds", "a larger --kv-memory")


def capacity(config: EngineConfig) -> Capacity:
    return Capacity(
        blocks=config.num_blocks,
        sequences=config.max_sequences,
        batched_tokens=config.max_batched_tokens,
        waiting=config.max_waiting,
    )
