"""The training loop: Muon, warm-up and cosine; a state file to go on from, the same bits however often it stops."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from headrace.mtp_training.batches import TrainBatch, Vocabulary, batch_plan, make_batch
from headrace.mtp_training.loss import Distill
from headrace.mtp_training.module import HeadModule
from headrace.mtp_training.writer import Written

SECOND_PASS_FROM, THIRD_PASS_FROM = 0.5, 0.8  # shares of the steps; guesses
POINT_STEPS = 10  # of the curve


class StateError(ValueError):
    """The state file is not one of this run; the text says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    epochs: float = 3.0
    batch_rows: int = 3072  # padded
    learning_rate: float = 5e-4
    warm_up: float = 0.05  # share of all steps
    passes: int = 3  # drafts in a row, at the end; they join one after the other
    pass_weight: float = 0.7  # of a pass, relative to the one before it
    hidden_weight: float = 0.5  # of the distance to the model's own hidden state
    weight_decay: float = 0.02
    clip: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Point:
    """Means over the steps since the last point."""

    step: int
    loss: float
    by_pass: list[float]  # cross-entropy in nats, of each draft that was trained


def steps_of(lengths: np.ndarray[Any, np.dtype[np.int64]], s: TrainSettings) -> list[Any]:
    """The sequences of each step."""
    plan: list[Any] = []
    for epoch in range(math.ceil(s.epochs)):
        batches = batch_plan(lengths, s.batch_rows, s.seed * 1000 + epoch)
        share = min(1.0, s.epochs - epoch)
        plan += batches[: max(1, round(share * len(batches)))]
    return plan


def learning_rate(step: int, steps: int, s: TrainSettings) -> float:
    warm = max(1, round(s.warm_up * steps))
    if step < warm:
        return s.learning_rate * (step + 1) / warm
    share = (step - warm) / max(1, steps - warm)
    return s.learning_rate * (0.02 + 0.98 * (1 + math.cos(math.pi * share)) / 2)


def passes_of(step: int, steps: int, s: TrainSettings) -> int:
    """A pass more costs as much as a whole step without it, and learns little before the first one is good."""
    share = step / max(1, steps)
    if share < SECOND_PASS_FROM:
        return 1
    return min(2, s.passes) if share < THIRD_PASS_FROM else s.passes


def optimizers_of(head: HeadModule, s: TrainSettings) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the norms.

    Measured on held-out text after 24 steps from the same start, 3.16 nats: Muon at 4e-4 gives 2.83, AdamW at 5e-4
    3.12; Muon's steps take a quarter longer.
    """
    matrices = [p for p in head.parameters() if p.ndim == 2]
    vectors = [p for p in head.parameters() if p.ndim == 1]
    return [
        torch.optim.Muon(
            matrices,
            momentum=0.95,
            weight_decay=s.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(vectors, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train(
    head: HeadModule,
    embedding: torch.Tensor,
    draft_head: torch.Tensor,
    sequences: Sequence[Written],
    vocabulary: Vocabulary,
    settings: TrainSettings,
    state_path: Path,
    *,
    data_digest: str,
    save_every: int,
    progress: Callable[[int, int, Point | None], None],
) -> list[Point]:
    """Train `head` in place and return the curve. Goes on from `state_path` if it is there. Raises `StateError`.

    `embedding` [vocab, hidden] and `draft_head` [draft vocabulary, hidden] are the model's. The state is saved every
    `save_every` steps.
    """
    device = draft_head.device
    identity = _identity(settings, data_digest, head, vocabulary)
    lengths = np.array([len(s.tokens) - 2 for s in sequences], np.int64)
    plan = steps_of(lengths, settings)
    optimizers = optimizers_of(head, settings)
    curve: list[Point] = []
    recent: list[list[float]] = []  # loss and cross-entropies of the steps since the last point
    done = 0
    if state_path.exists():
        state = _load_state(state_path, identity)
        head.load_state_dict(state["head"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        recent = state["recent"]
        curve = [Point(*point) for point in state["curve"]]
        done = state["step"]

    def save(step: int) -> None:
        state = {
            "identity": identity,
            "step": step,
            "head": head.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            "recent": recent,
            "curve": [(p.step, p.loss, p.by_pass) for p in curve],
        }
        _save_state(state_path, state)

    if not done:
        save(0)  # so that what the head starts from is not worked out again
    for step in range(done, len(plan)):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, len(plan), settings)
        batch = make_batch([sequences[i] for i in plan[step]], vocabulary, str(device))
        passes = passes_of(step, len(plan), settings)
        loss, by_pass = _loss(head, embedding, draft_head, batch, passes, settings)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), settings.clip)
        for optimizer in optimizers:
            optimizer.step()
        recent.append([loss.item(), *by_pass])
        now, last = step + 1, step + 1 == len(plan)
        point = None
        if len(recent) == POINT_STEPS or last or passes_of(now, len(plan), settings) != passes:
            mean_loss, *means = np.mean(recent, axis=0).tolist()
            point = Point(now, mean_loss, means)
            curve.append(point)
            recent.clear()
        if now % save_every == 0 or last:
            save(now)
        progress(now, len(plan), point)
    return curve


def _loss(
    head: HeadModule,
    embedding: torch.Tensor,
    draft_head: torch.Tensor,
    batch: TrainBatch,
    passes: int,
    s: TrainSettings,
) -> tuple[torch.Tensor, list[float]]:
    """The loss of a step, and the cross-entropy of each pass."""
    embedded = functional.embedding(batch.tokens, embedding)
    with torch.autocast(draft_head.device.type, torch.bfloat16):
        outputs = head.unroll(embedded, batch.hidden, passes)
    loss = embedded.new_zeros(())
    by_pass: list[float] = []
    weights = [s.pass_weight**m for m in range(passes)]
    for m, out in enumerate(outputs):
        # A draft needs the m tokens before its own to be answers too.
        counts = batch.answers.clone()
        counts[:, m:] &= batch.answers[:, : counts.shape[1] - m]
        counts[:, :m] = False
        x = out[counts]
        rows = max(1, len(x))
        cross_entropy = Distill.apply(x, draft_head, batch.ids[counts], batch.p[counts]) / rows
        distance = functional.smooth_l1_loss(x, batch.target[counts]) if len(x) else 0.0
        loss = loss + weights[m] / sum(weights) * (cross_entropy + s.hidden_weight * distance)
        by_pass.append(float(cross_entropy.detach()))
    return loss, by_pass


def _identity(s: TrainSettings, data_digest: str, head: HeadModule, vocabulary: Vocabulary) -> str:
    """What has to be equal for a state to be gone on from."""
    shape = json.dumps([asdict(s), asdict(head.shape), data_digest]).encode()
    return hashlib.sha256(shape + vocabulary.ids.tobytes()).hexdigest()[:16]


def _save_state(path: Path, state: dict[str, Any]) -> None:
    """All or nothing."""
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def _load_state(path: Path, identity: str) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True)
        found = state["identity"]
    except Exception as error:
        raise StateError(
            f"{path}: not a training state ({error}); delete it to begin anew"
        ) from error
    if found != identity:
        raise StateError(
            f"{path}: it belongs to other settings or data ({found}, expected {identity}); "
            "delete it to begin anew"
        )
    return state
