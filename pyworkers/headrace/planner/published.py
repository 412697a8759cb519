"""Published throughput of DeepSeek-V3 and R1, and what the model makes of the same settings.

No constant of the model was fitted to these figures, so each of them is a test. Their spread is the error of a plan.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from headrace.planner.model.gpus import GPUS
from headrace.planner.model.group import ExpertGroup
from headrace.planner.model.skew import REDUNDANT
from headrace.planner.quantile import quantile
from headrace.planner.rates import (
    STEP_TOKENS,
    Lengths,
    answer_ms,
    decode_of,
    mixed_ms,
    prefill_of,
    prompt_ms,
    rows_that_fit,
)

SOURCES = {
    "sglang-96": "SGLang, lmsys.org/blog/2025-05-05-large-scale-ep",
    "sglang-gb200-1": "SGLang, lmsys.org/blog/2025-06-16-gb200-part-1",
    "sglang-gb200-2": "SGLang, lmsys.org/blog/2025-09-25-gb200-part-2",
    "sglang-gb300": "SGLang and NVIDIA, lmsys.org/blog/2026-02-19-gb300-longctx",
    "sglang-mtp": "Eigen AI, lmsys.org/blog/2025-07-17-mtp",
    "ant-h20": "Ant Group, lmsys.org/blog/2025-09-26-sglang-ant-group, and sgl-project/sglang#11854",
    "deepseek-day6": "DeepSeek, open-infra-index, day 6",
    "vllm-wide-ep": "vLLM, blog.vllm.ai, large scale serving, 2025-12",
    "trtllm-r1": "TensorRT-LLM, How to get best performance on DeepSeek-R1",
    "trtllm-adp": "TensorRT-LLM, tech blog 10, attention data parallel balance",
    "mlperf": "MLPerf Inference 5.1 and 6.0, NVIDIA's submissions",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRate:
    """Tokens a second and GPU: of prompts in `prefill`, else of answers."""

    name: str
    gpu: str
    phase: str  # prefill, decode, mixed (both on each GPU), split (both, on GPUs of their own)
    published: float
    source: str
    ranks: int
    prompt: float
    weights: str
    linear: str
    kv: str
    answer: float = 0.0
    rows: int | None = None  # on each GPU; None: as many as fit, and keep `tpot_ms`
    tokens: float = STEP_TOKENS
    prefill_ranks: int = 0
    drafts: int = 0
    accepted: float = 1.0
    overlap: bool | None = None
    redundant: int = REDUNDANT
    rebalanced: bool = True
    tpot_ms: float | None = None
    assumed: Sequence[str] = ()  # what the source does not say
    note: str = ""

    def group(self, ranks: int) -> ExpertGroup:
        return ExpertGroup(
            gpu=GPUS[self.gpu],
            ranks=ranks,
            weights=self.weights,
            linear=self.linear,
            kv=self.kv,
            drafts=self.drafts,
            redundant=self.redundant,
            rebalanced=self.rebalanced,
        )

    def modelled(self) -> float:
        """The same figure, by the model."""
        group, lengths = self.group(self.ranks), Lengths(prompt=self.prompt, answer=self.answer)
        if self.phase == "prefill":
            return (
                1e3 * self.tokens / prefill_of(group, lengths, self.tokens, overlap=self.overlap).ms
            )
        rows = self.rows or self._most_rows(group, lengths)
        if self.phase == "decode":
            step = decode_of(group, lengths, rows, overlap=self.overlap)
            return 1e3 * rows * self.accepted / step.ms
        if self.phase == "mixed":
            return 1e3 * self.answer / mixed_ms(group, lengths, rows, self.accepted, self.tokens)
        prompts = prompt_ms(self.group(self.prefill_ranks), lengths, self.tokens)
        return 1e3 * self.answer / (prompts + answer_ms(group, lengths, rows, self.accepted))

    def _most_rows(self, group: ExpertGroup, lengths: Lengths) -> int:
        low, high = 1, max(rows_that_fit(group, lengths), 1)
        if self.tpot_ms is None:
            return high
        while low < high:  # steps never get shorter with more rows
            middle = (low + high + 1) // 2
            fast = decode_of(group, lengths, middle).ms / self.accepted <= self.tpot_ms
            low, high = (middle, high) if fast else (low, middle - 1)
        return low

    @property
    def ratio(self) -> float:
        """Published over modelled."""
        return self.published / self.modelled()


@functools.cache
def published_rates() -> tuple[PublishedRate, ...]:
    text = resources.files("headrace.planner").joinpath("data/published.json").read_text("utf-8")
    return tuple(PublishedRate(**row) for row in json.loads(text))


@functools.cache
def error_range() -> tuple[float, float]:
    """By what published figures are below and above modelled ones: the 10th and 90th percentile.

    Of the rows whose settings are published in full: the others say more of what was assumed than of the model.
    """
    ratios = [rate.ratio for rate in published_rates() if not rate.assumed]
    return quantile(ratios, 0.1), quantile(ratios, 0.9)
