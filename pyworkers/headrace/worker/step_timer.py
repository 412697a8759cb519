"""When to prepare the next step: late, so that what arrives meanwhile is in it, but before the one in flight ends."""

from __future__ import annotations

from headrace.engine.result import StepResult

WEIGHT = 1 / 8  # of the newest step
CERTAIN = 0.9  # of what a step is expected to take
LEAST_LEAD_S = 2e-3  # the event loop's clock may count whole milliseconds
# These are guesses.


class StepTimer:
    """How long steps take, and preparing them, as they did lately. Seconds."""

    def __init__(self) -> None:
        self._answers_s = 0.0  # of a step's answers, whatever their number
        self._prompt_token_s = 0.0
        self._prepare_s = 0.0

    def prepare_after_s(self, step: StepResult) -> float:
        """So long after the beginning of a step the next one is to be prepared; at once where nothing is known."""
        expected_s = self._prompt_token_s * step.prefill_tokens
        expected_s += self._answers_s if step.decode_rows else 0
        return max(CERTAIN * expected_s - 2 * self._prepare_s - LEAST_LEAD_S, 0.0)

    def prepared(self, took_s: float) -> None:
        """It took so long to have a step ready for the model."""
        self._prepare_s += WEIGHT * (took_s - self._prepare_s)

    def ended(self, step: StepResult, took_s: float) -> None:
        """A step has run so long."""
        if step.prefill_tokens == 0:
            self._answers_s += (took_s - self._answers_s) * (WEIGHT if self._answers_s else 1)
            return
        rest_s = max(took_s - (self._answers_s if step.decode_rows else 0), 0.0)
        token_s = rest_s / step.prefill_tokens
        self._prompt_token_s += (token_s - self._prompt_token_s) * (
            WEIGHT if self._prompt_token_s else 1
        )
