"""Model families: one file each, all behind `Model`. `load_model` chooses by the checkpoint's `model_type`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from headrace_kernels.batch import Batch, DraftBatch

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from headrace.models.config import ModelConfig
    from headrace.models.deepseek_weights import Share
    from headrace.models.load.checkpoint import Checkpoint
    from headrace.models.step_memory import StepMemory
    from headrace_kernels.ops import Fence, KvPool, Progress, Results

__all__ = [
    "Batch",
    "DType",
    "DraftBatch",
    "KvDType",
    "Model",
    "UnsupportedModelError",
    "check_ranks",
    "dtype_of_weights",
    "load_model",
]

DType = Literal["auto", "float32", "bfloat16", "float16", "int8"]
KvDType = Literal["auto", "fp8"]  # of the cache; auto: as the values, "fp8": e4m3 with the scale 1

# Measured with SmolLM2-135M (bench/results/engine_forward.json): a third of float32's time for a lone sequence and a
# quarter of its memory, for 0.4 % more perplexity. Other families do the same for the same reason.
AUTO_CPU: DType = "int8"


class UnsupportedModelError(ValueError):
    """The checkpoint asks for something that no family here computes; the text names it."""


class Model(Protocol):
    """A model with its paged KV cache. One thread uses it at a time."""

    config: ModelConfig
    vocab_size: int
    context_tokens: int  # the longest sequence that the positions of this model allow
    block_tokens: int
    kv_block_bytes: int  # of one block over all layers, keys and values
    kv_layout: (
        str  # names the bytes of a block: equal strings mean that blocks can be copied across
    )
    dtype_name: str  # what "auto" became
    ahead_on: torch.device | None  # where passes go on after they returned; None: they return done
    answers_apart: bool  # rows of an answer are computed by other arithmetic than those of a prompt
    drafts: bool  # whether `draft` can be called
    pooled_width: int  # floats of a row of `pooled`; 0 where a forward pools none
    draft_token_ids: NDArray[np.int32] | None  # of the columns of draft logits; None: all tokens

    def step_memory(self, *, rows: int, answers: int, context_tokens: int, mtp: bool) -> StepMemory:
        """What a step takes beside weights and cache; `answers` are the rows that are sampled, drafts included."""
        ...

    def record_steps(self) -> None:
        """From now on start the kernels of a decode step at once, where the device can; results are the same bits."""
        ...

    def allocate_kv(self, num_blocks: int) -> None:
        """Make the cache hold `num_blocks` blocks; what it held before is gone."""
        ...

    def kv_pool(self) -> KvPool:
        """Where the blocks are, for those who copy them from worker to worker. After `allocate_kv`."""
        ...

    def forward(self, batch: Batch, progress: Progress | None = None) -> Results:
        """Store the KV of every row and return the logits of `batch.logit_rows`.

        `progress` is told of each layer group whose KV is written; it costs a little, so it is given
        only where somebody waits for that.
        The result is float32 `[len(logit_rows), vocab_size]`, an array or, on a device, a tensor, and is valid until
        the next forward. A row's logits do not depend, to the bit, on which other rows are in the batch.
        It may return, or raise, while the device still computes.
        """
        ...

    def draft(self, batch: DraftBatch) -> Results:
        """Store the drafting layer's KV of every row, and guess the token after each of `batch.logit_rows`.

        The result is float32 `[len(logit_rows), draft tokens]`, valid until the next forward or draft. The rows stay
        readable for a chained pass. A guess costs nothing but time where it is wrong.
        """
        ...

    def pooled(self) -> Results:
        """The hidden states of `batch.pool_rows` of the last forward, as the head reads them: after the last norm.

        Float32 `[len(pool_rows), pooled_width]`, on the model's device, valid until the next forward. Like a row's
        logits they depend on no other row of the batch.
        """
        ...

    def fence(self) -> Fence | None:
        """Passed when the device has done all that it was given so far; `None` where it has already."""
        ...


def dtype_of_weights(config: ModelConfig, dtype: DType, device_type: str) -> str:
    """The dtype of the weights on "cpu" or "cuda": `dtype`, or for "auto" what the device computes best.

    Raises `UnsupportedModelError` for one that the device has no kernels for.
    """
    if device_type == "cpu":
        return AUTO_CPU if dtype == "auto" else dtype
    name = config.dtype if dtype == "auto" else dtype
    if name == "int8":
        raise UnsupportedModelError("int8 weights are supported on the CPU only")
    return name


def check_ranks(
    config: ModelConfig, ranks: int, redundant: int = 0, *, moves: bool = False
) -> None:
    """Raise `UnsupportedModelError` where a group of so many ranks cannot share the experts of a model.

    `redundant` slots of each layer are for second copies of experts. Where experts move, all ranks need as many slots.
    """
    deepseek = config.deepseek
    if deepseek is None:
        raise UnsupportedModelError(
            f"a {config.model_type} has no experts that {ranks} ranks could share: serve it with --workers, "
            "without --ep or torchrun"
        )
    if ranks > deepseek.experts:
        raise UnsupportedModelError(
            f"{ranks} ranks for {deepseek.experts} experts: give at most --ep {deepseek.experts}"
        )
    slots = deepseek.experts + redundant
    fitting = min(redundant + -slots % ranks, deepseek.experts * (ranks - 1))
    if redundant and redundant != fitting:
        raise UnsupportedModelError(
            f"--ep-redundant {redundant}: {deepseek.experts} experts and {redundant} more slots do not divide "
            f"by {ranks} ranks with at most {deepseek.experts} slots each; give --ep-redundant {fitting}"
        )
    if moves and redundant != fitting:
        raise UnsupportedModelError(
            f"--ep-rebalance-rounds: {deepseek.experts} experts do not divide by {ranks} ranks; "
            f"give --ep-redundant {fitting}"
        )


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: DType,
    device: str,
    block_tokens: int,
    mtp: bool = False,
    kv_dtype: KvDType = "auto",
    share: Share | None = None,
) -> Model:
    """Load the weights of `checkpoint` for `device` ("cpu", "cuda", "cuda:1"); with `mtp` the layer that drafts too.

    With `share` these are the weights of one rank of a group, after `check_ranks`.

    Raises `UnsupportedModelError` for an architecture or an option of it that is not implemented, and
    `ModelFileError` where the checkpoint is broken or lacks what is asked for.
    """
    model_type = checkpoint.config.model_type
    if model_type == "llama":
        from headrace.models.llama import load_llama

        if mtp:
            raise UnsupportedModelError(
                f"{checkpoint.path}: a llama has no layer for multi-token prediction; serve it without"
            )
        if kv_dtype != "auto":
            raise UnsupportedModelError(f"a KV cache in {kv_dtype} is not supported by llama")
        return load_llama(checkpoint, dtype=dtype, device=device, block_tokens=block_tokens)
    if model_type == "deepseek_v3":
        from headrace.models.deepseek import load_deepseek

        return load_deepseek(
            checkpoint,
            dtype=dtype,
            device=device,
            block_tokens=block_tokens,
            mtp=mtp,
            kv_dtype=kv_dtype,
            share=share,
        )
    raise UnsupportedModelError(
        f"model_type {model_type!r} is not supported; supported: deepseek_v3, llama"
    )
