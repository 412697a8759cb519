"""What a placement is predicted to cost, written down a second time from `docs/design/placement.md`: plain sums over
steps and tokens, without any code of the router. `python tests/routing/formula.py` writes `estimates.json` anew; the
tests of both languages read it, `router/src/core/estimate/golden.rs` and `test_estimates.py`.
"""

import json
import math
import random
from pathlib import Path
from typing import Any

Values = dict[str, Any]
FILE = Path(__file__).with_name("estimates.json")
SHARE, HIDDEN, FULL = 0.1, 0.1, 0.99


def positions(start: float, tokens: float) -> float:
    """The places of `tokens` tokens from `start` on, added up."""
    return sum(range(int(start), int(start + tokens)))


class Worker:
    """A worker's load with its queue, and one demand."""

    def __init__(self, load: Values, queue: Values, demand: Values) -> None:
        self.load, self.queue, self.demand = load, queue, demand
        self.cost = load["cost"]
        self.uncached = max(demand["prompt_tokens"] - demand["cached_tokens"], 1)
        self.own = self.prompt(demand["cached_tokens"], self.uncached)
        self.prompts: list[Values] = queue.get("prompts", [])
        self.waiting = sum(prompt.get("prompts", 1) for prompt in self.prompts)
        self.others = load["occupied"] + load["group_rows"]

    def prompt(self, start: float, tokens: float) -> float:
        return self.cost["prefill_ms"] * tokens + self.cost["context_ms"] * positions(start, tokens)

    def around(self, rows: float, kv_tokens: float) -> float:
        return self.cost["fixed_ms"] + self.cost["row_ms"] * rows + self.cost["kv_ms"] * kv_tokens

    def group_step(self, number: float) -> float:
        """How long the others' step of this number is; 0 is the one that runs."""
        beside = self.load.get("group_prompt_ms", 0.0)
        more = beside if number < self.load.get("group_prompt_steps", 0.0) else 0.0
        return self.load["group_ms"] + more

    def raised(self, own: float, more: float, others: float) -> float:
        """By how much the longest step grows; what hides behind others counts a tenth, as it fills their time."""
        if others == 0:
            return more
        beyond = min(max(own + more - others, 0.0), more)
        hidden = more - beyond
        return beyond + HIDDEN * hidden * min((own + more) / others, 1.0)

    def shares(self, budget: float, left: list[float], behind: list[bool]) -> list[float]:
        """One step's tokens, prompt by prompt."""
        given = []
        rest = budget
        for wants, contested in zip(left, behind, strict=True):
            if wants <= rest:
                part = wants
            elif contested and self.queue["rule"] == "halves":
                part = math.ceil(rest / 2)
            else:
                part = rest
            given.append(part)
            rest -= part
        for i, wants in enumerate(left):
            more = min(wants - given[i], rest)
            given[i] += more
            rest -= more
        return given

    def line(self, *, with_own: bool) -> tuple[list[float], float, float]:
        """Step by step: when each prompt is done, when the last one begins, and what it makes the steps longer by."""
        load = self.load
        prompts = [dict(prompt) for prompt in self.prompts]
        if with_own:
            mine: Values = {"left": self.uncached, "from": self.demand["cached_tokens"]}
            if self.queue.get("awaits"):
                mine["awaits"] = self.queue["awaits"]
            prompts.append(mine)
        rows, kv = load["rows"], load["kv_tokens"]
        now = self.around(rows, kv)
        for prompt in self.prompts:
            running = prompt.get("running", 0)
            now += self.prompt(prompt["from"] - running, running)
        first = load["group_ms"] + (
            load.get("group_prompt_ms", 0.0) if load.get("group_prompt_steps", 0.0) > 0 else 0.0
        )
        now = max(max(now, first) - load["elapsed_ms"], 0.0)
        done = [-1.0] * len(prompts)
        for i, prompt in enumerate(prompts):
            if prompt["left"] == 0:
                done[i], rows, kv = now, rows + prompt.get("prompts", 1), kv + prompt["from"]
        began, raised, number = None, 0.0, 1
        while any(prompt["left"] > 0 for prompt in prompts):
            held = [
                "awaits" in prompt
                and prompts[prompt["awaits"]["place"]]["left"] > prompt["awaits"]["left"]
                for prompt in prompts
            ]
            ready: list[float] = [
                0 if wait else p["left"] for wait, p in zip(held, prompts, strict=True)
            ]
            behind = [any(p["left"] > 0 for p in prompts[i + 1 :]) for i in range(len(prompts))]
            given = self.shares(max(load["step_tokens"] - rows, 1), ready, behind)
            parts = [self.prompt(p["from"], n) for p, n in zip(prompts, given, strict=True)]
            ms = self.around(rows, kv) + sum(parts)
            others = self.group_step(number)
            if with_own and given[-1] > 0:
                began = now if began is None else began
                raised += self.raised(ms - parts[-1], parts[-1], others)
            now += max(ms, others)
            number += 1
            for i, (prompt, tokens) in enumerate(zip(prompts, given, strict=True)):
                prompt["left"] -= tokens
                prompt["from"] += tokens
                if tokens > 0 and prompt["left"] == 0:
                    done[i], rows, kv = now, rows + prompt.get("prompts", 1), kv + prompt["from"]
        return done, now if began is None else began, raised

    def in_order(self) -> tuple[float, float, float]:
        """Wait, own time and raise behind a backlog of which only the size is known."""
        load = self.load
        around = self.around(load["rows"], load["kv_tokens"])
        per_step = max(load["step_tokens"] - load["rows"], 1)
        ahead = load["backlog_tokens"] / per_step
        total = math.ceil((load["backlog_tokens"] + self.uncached) / per_step)
        works = load["backlog_tokens"] > 0 and load["backlog_runs"]
        start = 1.0 if self.others > 0 and not works else 0.0
        ahead_ms = self.lockstep(
            start,
            ahead,
            around,
            self.cost["prefill_ms"] * load["backlog_tokens"]
            + self.cost["context_ms"] * load["backlog_context"],
        )
        if works:
            wait = ahead_ms - min(load["elapsed_ms"], ahead_ms / max(ahead, 1.0))
        else:
            first = load["group_ms"]
            if load.get("group_prompt_steps", 0.0) > 0:
                first += load["group_prompt_ms"]
            rest = max(max(around, first) - load["elapsed_ms"], 0.0)
            wait = (rest if self.others > 0 else 0.0) + ahead_ms
        steps = total - ahead
        own = self.lockstep(start + ahead, steps, around, self.own)
        beside = min(max(load.get("group_prompt_steps", 0.0) - start - ahead, 0.0), steps)
        each = self.own / steps
        raised = beside * self.raised(
            around, each, load["group_ms"] + load.get("group_prompt_ms", 0.0)
        ) + (steps - beside) * self.raised(around, each, load["group_ms"])
        return wait, own, raised if load["group_ms"] > 0 else self.own

    def lockstep(self, start: float, steps: float, around: float, more: float) -> float:
        load = self.load
        if load["group_ms"] == 0 or steps <= 0:
            return steps * around + more
        each = around + more / steps
        beside = min(max(load.get("group_prompt_steps", 0.0) - start, 0.0), steps)
        slow = load["group_ms"] + load.get("group_prompt_ms", 0.0)
        return beside * max(each, slow) + (steps - beside) * max(each, load["group_ms"])

    def prompt_parts(self) -> tuple[float, float, float, float]:
        """Wait, own time, what the steps become longer by, and the delay of the prompts before it."""
        if not self.prompts:
            return *self.in_order(), 0.0
        without, _, _ = self.line(with_own=False)
        done, began, raised = self.line(with_own=True)
        delays = [
            max(late - soon, 0.0) * prompt.get("prompts", 1)
            for late, soon, prompt in zip(done, without, self.prompts, strict=False)
        ]
        return began, done[-1] - began, raised, sum(delays)

    def missing(self) -> float:
        used = self.load["blocks_used"]
        needed = self.demand["prompt_tokens"] / self.demand["block_tokens"]
        lacks = min(max(used + needed - self.load["blocks"], 0.0), used)
        return lacks / used if lacks > 0 else 0.0

    def answer(self) -> tuple[float, float, float]:
        """Wait for a row and for room, the tokens after the first, and what the row adds to steps."""
        load, demand = self.load, self.demand
        rows = min(load["occupied"] + 1, load["slots"])
        kv = (
            load["kv_tokens"]
            + load["backlog_tokens"]
            + load.get("arriving_tokens", 0.0)
            + demand["prompt_tokens"]
        )
        step = self.around(rows, kv)
        tpot = max(step, load["group_ms"]) / load["accepted"]
        tokens = max(demand["output_tokens"], 1)
        slot = max(load["occupied"] + 1 - load["slots"], 0) * tokens * tpot / load["slots"]
        room = self.queue.get("room_ms")
        if room is None:
            room = self.missing() * tokens * tpot / 2
        per_step = max(load["step_tokens"] - load["rows"], 1)
        begins = math.ceil((load["backlog_tokens"] + self.uncached) / per_step)
        steps = (tokens - 1) / load["accepted"]
        beside = min(max(load.get("group_prompt_steps", 0.0) - begins, 0.0), steps)
        slow = load["group_ms"] + load.get("group_prompt_ms", 0.0)
        longer = beside * max(slow - max(step, load["group_ms"]), 0.0)
        more = self.cost["row_ms"] + self.cost["kv_ms"] * demand["prompt_tokens"]
        row = self.raised(step - more, more, load["group_ms"]) * tokens / load["accepted"]
        return max(slot, room), (tokens - 1) * tpot + longer, row

    def evicted(self, tokens: float) -> float:
        """What others lose with the cached blocks that make room for so many tokens."""
        load, block = self.load, self.demand["block_tokens"]
        free = max(load["blocks"] - load["blocks_used"] - load.get("blocks_cached", 0), 0)
        blocks = min(max(tokens / block - free, 0), load.get("blocks_cached", 0))
        return load.get("reuse", 0.0) * blocks * block * self.cost["prefill_ms"]

    def saturation(self, tokens: float, service: float) -> float:
        """What those to come wait for blocks kept so long, as behind work that takes a part of the pool's time."""
        blocks = tokens / self.demand["block_tokens"]
        taken = min((self.load["blocks_used"] + blocks) / self.load["blocks"], FULL)
        return service * blocks / self.load["blocks"] * taken / (1 - taken)

    def estimate(self, role: str) -> Values:
        """All of it on a worker of this role; the prompt alone on one that only computes prompts."""
        wait, own, raised, delay = self.prompt_parts()
        later = self.load["pressure"] * self.own
        if role == "prefill":
            return {
                "queue_ms": wait + self.missing() * own,
                "prefill_ms": own,
                "transfer_ms": 0.0,
                "decode_ms": 0.0,
                "interference_ms": SHARE * self.load["group_rows"] * raised + delay + later,
                "saturation_ms": self.saturation(self.uncached, own),
            }
        room, decode, row = self.answer()
        share = 1.0 if role == "decode" else SHARE
        rows = max(self.others - self.waiting, 0.0)
        known = self.queue.get("room_ms") is not None
        tokens = self.uncached + max(self.demand["output_tokens"], 1)
        return {
            "queue_ms": max(wait, room) if known else wait + room,
            "prefill_ms": own,
            "transfer_ms": 0.0,
            "decode_ms": decode,
            "interference_ms": share * rows * raised
            + SHARE * self.others * row
            + delay
            + later
            + self.evicted(tokens),
            "saturation_ms": self.saturation(tokens, own + decode),
        }


def pair(prefill: Worker, decode: Worker, cost: list[float], block_bytes: float) -> Values:
    """One computes the prompt, the other one generates."""
    latency_ms, mib_ms, failing = cost
    source = prefill.estimate("prefill")
    room, decode_ms, row = decode.answer()
    block = decode.demand["block_tokens"]
    lacks = decode.uncached
    mib = math.ceil(lacks / block) * block_bytes / 2**20
    ttft = source["queue_ms"] + source["prefill_ms"]
    last = mib * min(min(prefill.uncached, prefill.load["step_tokens"]) / lacks, 1.0)
    begins = max(source["queue_ms"], room)
    alone = decode.estimate("decode")
    transfer = latency_ms + max(begins + mib_ms * mib - ttft, mib_ms * last)
    transfer += failing * (alone["queue_ms"] + alone["prefill_ms"])
    tokens = lacks + max(decode.demand["output_tokens"], 1)
    return {
        "queue_ms": source["queue_ms"],
        "prefill_ms": source["prefill_ms"],
        "transfer_ms": transfer,
        "decode_ms": decode_ms,
        "interference_ms": source["interference_ms"] + SHARE * decode.others * row,
        "saturation_ms": source["saturation_ms"] + decode.saturation(tokens, decode_ms),
    }


def a_load(draw: random.Random, kind: int) -> Values:
    """A worker with room, without a backlog but where `kind` asks for one."""
    rows = draw.randrange(0, 40)
    group = kind % 4 == 3
    return {
        "cost": {
            "fixed_ms": draw.choice([5.0, 12.0, 19.0]),
            "prefill_ms": draw.choice([0.02, 0.05, 0.11]),
            "context_ms": draw.choice([1e-6, 6e-6]),
            "row_ms": draw.choice([0.05, 0.16]),
            "kv_ms": draw.choice([1e-5, 5e-5]),
        },
        "step_tokens": draw.choice([512, 2048, 8192]),
        "slots": 64,
        "occupied": rows,
        "rows": rows,
        "kv_tokens": rows * draw.randrange(100, 3000),
        "backlog_tokens": 0,
        "backlog_context": 0.0,
        "arriving_tokens": draw.choice([0, 700]),
        "elapsed_ms": draw.choice([0.0, 3.5, 60.0, 4000.0]) if rows else 0.0,
        "backlog_runs": bool(rows) and draw.random() < 0.5,
        "blocks_used": draw.choice([100, 4000, 9000, 9900]),
        "blocks": 10_000,
        "blocks_cached": draw.choice([0, 90, 999]),
        "reuse": 0.4,
        "accepted": draw.choice([1.0, 1.7]),
        "group_ms": draw.choice([4.0, 70.0]) if group else 0.0,
        "group_rows": 9 if group else 0,
        "group_prompt_ms": 35.0 if group else 0.0,
        "group_prompt_steps": draw.choice([0, 2, 30]) if group else 0,
        "pressure": draw.choice([0.0, 1.5]),
    }


def a_queue(draw: random.Random, load: Values) -> Values:
    prompts: list[Values] = []
    for place in range(draw.randrange(1, 6)):
        prompt: Values = {"left": draw.choice([0, 40, 900, 3000, 9000]), "from": 0}
        running = draw.choice([0, 300]) if place == 0 else 0
        prompt["from"] = running + draw.choice([0, 160, 5000])
        if running:
            prompt["running"] = running
        if place and draw.random() < 0.3 and prompts[place - 1]["left"]:
            prompt["awaits"] = {"place": place - 1, "left": prompts[place - 1]["left"] // 2}
        if draw.random() < 0.15:
            prompt["prompts"] = 3
        prompts.append(prompt)
    queue: Values = {"rule": draw.choice(["halves", "halves", "fifo"]), "prompts": prompts}
    if draw.random() < 0.25 and prompts[0]["left"]:
        queue["awaits"] = {"place": 0, "left": prompts[0]["left"] // 3}
    waiting = sum(prompt.get("prompts", 1) for prompt in prompts)
    load["occupied"] += waiting
    load["backlog_tokens"] = sum(prompt["left"] + prompt.get("running", 0) for prompt in prompts)
    load["backlog_context"] = float(load["backlog_tokens"] * 700)
    load["backlog_runs"] = True
    return queue


def a_worker(draw: random.Random, kind: int) -> tuple[Values, Values, Values]:
    load = a_load(draw, kind)
    queue: Values = {"rule": "halves", "prompts": []}
    if kind % 3 == 0:
        queue = a_queue(draw, load)
    elif kind % 3 == 1 and load["occupied"]:  # of which only the size is known
        load["backlog_tokens"] = draw.choice([0, 700, 20_000])
        load["backlog_context"] = load["backlog_tokens"] * 900.0
        load["occupied"] += 2
    if kind % 5 == 0:
        queue["room_ms"] = draw.choice([0.5, 900.0])
    if kind % 7 == 0:  # no batch row is free
        load["occupied"] = load["slots"] + 6
        load["rows"] = load["slots"] - len(queue["prompts"])
    prompt = draw.choice([17, 1600, 6000, 20_000])
    demand = {
        "prompt_tokens": prompt,
        "cached_tokens": draw.choice([0, 0, prompt // 32 * 16]),
        "output_tokens": draw.choice([1, 100, 350.5]),
        "block_tokens": 16,
    }
    return load, queue, demand


def table() -> list[Values]:
    """All rows, with what is expected."""
    rows: list[Values] = []
    for kind in range(48):
        draw = random.Random(kind)
        role = ("both", "both", "decode", "prefill")[kind // 2 % 4]
        load, queue, demand = a_worker(draw, kind)
        row: Values = {"role": role, "load": load, "queue": queue, "demand": demand}
        row["estimate"] = Worker(load, queue, demand).estimate(role)
        rows.append(row)
    for kind in range(10):
        draw = random.Random(1000 + kind)
        source, target = a_worker(draw, kind), a_worker(draw, kind + 1)
        demand = dict(target[2], cached_tokens=source[2]["cached_tokens"])
        demand["cached_tokens"] = min(demand["cached_tokens"], demand["prompt_tokens"] - 1)
        source = (*source[:2], demand)
        cost = [draw.choice([0.0, 2.0]), draw.choice([0.02, 3.0]), draw.choice([0.0, 0.25])]
        row = {"role": "pair", "cost": cost, "block_bytes": 1_124_352}
        for name, (load, queue, wants) in (("prefill", source), ("decode", target)):
            row[name] = {"load": load, "queue": queue, "demand": wants}
        row["estimate"] = pair(Worker(*source), Worker(*target), cost, row["block_bytes"])
        rows.append(row)
    return rows


if __name__ == "__main__":
    lines = ",\n".join(json.dumps(row) for row in table())
    FILE.write_text(f"[\n{lines}\n]\n")
