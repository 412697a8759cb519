"""What it is worth that the ranks of a group begin their prompts together, simulated.

    python -m bench.engine.prompt_balance --out bench/results/prompt_balance.json

Eight ranks with the step costs of DeepSeek-R1 on H200 (bench/presets/h200.json). A step takes as long as that of its
slowest rank. Each rank has traffic of its own: either so many requests at once, each followed by the next (closed), or
requests that come at random, at a share of the rate at which the ranks would be full (open). Prompts of 500 to 3,500
tokens, answers of 100 to 700, drawn evenly. The policy is the engine's own, `engine/prompt_balance.py`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.helpers import report
from headrace.engine.prompt_balance import PromptBalance
from headrace.engine.step.lockstep import RankLoad

RANKS = 8
SEED = 23
PRESET = report.ROOT / "bench/presets/h200.json"
PROMPT, ANSWER = (500, 3_500), (100, 700)
WAITS = (0, 1, 2, 4, 8, 16, 32)
ROUNDS = 12_000
WARM = 2_000  # rounds before anything counts


@dataclass(slots=True)
class Request:
    came_ms: float
    prompt: int
    answer: int
    computed: int = 0
    made: int = 0
    first_ms: float = 0.0


@dataclass(slots=True)
class Cost:
    """Milliseconds of a step of one rank."""

    fixed_ms: float
    prefill_ms: float
    context_ms: float
    row_ms: float
    kv_ms: float

    def of(self, prompts: list[tuple[Request, int]], decoding: list[Request]) -> float:
        tokens = sum(count for _, count in prompts)
        context = sum(count * (it.computed + count / 2) for it, count in prompts)
        kv = sum(it.prompt + it.made for it in decoding)
        rows = len(decoding)
        ms = self.prefill_ms * tokens + self.context_ms * context
        return ms + (self.fixed_ms + self.row_ms * rows + self.kv_ms * kv)


@dataclass(slots=True)
class Rank:
    """One engine: first come first served, prompts in chunks, as many sequences as rows."""

    draw: random.Random
    most_sequences: int
    chunk: int
    waiting: deque[Request] = field(default_factory=deque[Request])
    running: list[Request] = field(default_factory=list[Request])

    def request(self, now_ms: float) -> Request:
        return Request(now_ms, self.draw.randint(*PROMPT), self.draw.randint(*ANSWER))

    def plan(self, *, opens: bool) -> tuple[list[tuple[Request, int]], list[Request]]:
        decoding = [it for it in self.running if it.computed == it.prompt]
        budget = self.chunk - len(decoding)
        prompts: list[tuple[Request, int]] = []
        for it in self.running:
            count = min(it.prompt - it.computed, budget)
            if count > 0:
                prompts.append((it, count))
                budget -= count
        while opens and self.waiting and budget > 0 and len(self.running) < self.most_sequences:
            it = self.waiting.popleft()
            self.running.append(it)
            count = min(it.prompt, budget)
            prompts.append((it, count))
            budget -= count
        return prompts, decoding

    def load(self, prompts: list[tuple[Request, int]], decoding: list[Request]) -> RankLoad:
        tokens = sum(count for _, count in prompts)
        in_flight = sum(it.prompt - it.computed for it in self.running)
        return RankLoad(
            rows=tokens + len(decoding),
            prompt_tokens=tokens,
            waiting_tokens=in_flight - tokens + sum(it.prompt for it in self.waiting),
        )


def simulate(cost: Cost, most_rounds: int, traffic: dict[str, float], chunk: int) -> dict[str, Any]:
    """Some thousand rounds of a group."""
    sequences = int(traffic["sequences"])
    ranks = [Rank(random.Random(f"{SEED} {i}"), sequences, chunk) for i in range(RANKS)]
    arrivals = [_arrivals(rank.draw, traffic) for rank in ranks]
    coming = [next(times) for times in arrivals]
    if "rate" not in traffic:
        for rank in ranks:
            rank.waiting.extend(rank.request(0.0) for _ in range(sequences))
    balance = PromptBalance(most_rounds)
    now_ms, began_ms = 0.0, 0.0
    ended: list[Request] = []
    tokens, long_steps, even, busiest = 0, 0, 0, 0
    for number in range(ROUNDS):
        if number == WARM:
            ended.clear()
            began_ms, tokens, long_steps, even, busiest = now_ms, 0, 0, 0, 0
        for i, rank in enumerate(ranks):
            while coming[i] <= now_ms:
                rank.waiting.append(rank.request(coming[i]))
                coming[i] = next(arrivals[i])
        plans = [rank.plan(opens=balance.open) for rank in ranks]
        loads = [rank.load(*plan) for rank, plan in zip(ranks, plans, strict=True)]
        balance.agreed(loads)
        step_ms = max(cost.of(*plan) for plan in plans)
        if not any(load.rows for load in loads):
            step_ms = max(min(coming) - now_ms, 0.0)
        now_ms += step_ms
        long_steps += any(load.prompt_tokens for load in loads)
        even += sum(load.prompt_tokens for load in loads)
        busiest += RANKS * max(load.prompt_tokens for load in loads)
        for rank, (prompts, decoding) in zip(ranks, plans, strict=True):
            tokens += _advance(rank, prompts, decoding, now_ms, ended, again="rate" not in traffic)
    ttft = sorted(it.first_ms - it.came_ms for it in ended)
    tpot = [(it.made - 1, it) for it in ended]
    steps = ROUNDS - WARM
    return {
        "most_rounds": most_rounds,
        "tokens_per_s_and_rank": tokens / (now_ms - began_ms) * 1e3 / RANKS,
        "ttft_mean_ms": sum(ttft) / len(ttft),
        "ttft_p99_ms": ttft[int(len(ttft) * 0.99)],
        "step_mean_ms": (now_ms - began_ms) / steps,
        "steps_with_prompts": long_steps / steps,
        "prompt_balance": even / busiest,
        "requests": len(tpot),
    }


def _advance(
    rank: Rank,
    prompts: list[tuple[Request, int]],
    decoding: list[Request],
    now_ms: float,
    ended: list[Request],
    *,
    again: bool,
) -> int:
    """What a step gave; returns how many tokens of answers."""
    made = len(decoding)
    for it in decoding:
        it.made += 1
    for it, count in prompts:
        it.computed += count
        if it.computed == it.prompt:
            it.made, it.first_ms = 1, now_ms
            made += 1
    for it in [it for it in rank.running if it.made >= it.answer]:
        rank.running.remove(it)
        ended.append(it)
        if again:
            rank.waiting.append(rank.request(now_ms))
    return made


def _arrivals(draw: random.Random, traffic: dict[str, float]) -> Iterator[float]:
    now_ms = 0.0
    while True:
        now_ms += draw.expovariate(traffic["rate"]) if "rate" in traffic else float("inf")
        yield now_ms


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    preset = json.loads(PRESET.read_text())
    cost = Cost(**preset["cost"])
    chunk = preset["batched_tokens"]
    figures: dict[str, Any] = {"ranks": RANKS, "rounds": ROUNDS - WARM, "chunk": chunk}
    for name, sequences in (("closed, 32 a rank", 32), ("closed, 128 a rank", 128)):
        traffic = {"sequences": float(sequences)}
        figures[name] = [simulate(cost, n, traffic, chunk) for n in WAITS]
        full = figures[name][0]["tokens_per_s_and_rank"] / (sum(ANSWER) / 2) / 1e3  # a ms
        for share in (0.3, 0.6, 0.9):
            open_name = f"open, {share} of that"
            figures[f"{name}; {open_name}"] = [
                simulate(cost, n, {"sequences": 4.0 * sequences, "rate": share * full}, chunk)
                for n in WAITS
            ]
    report.write(arguments.out, report.rounded(figures))


if __name__ == "__main__":
    main()
