"""What routers are told of the sequences of a step, and what becomes of those that ended with it."""

from __future__ import annotations

import math

from headrace.engine.errors import FailureKind, RequestError
from headrace.engine.requests import Requests
from headrace.engine.result import StepResult
from headrace.engine.schedule import Scheduler
from headrace.engine.sequence import Sequence
from headrace.engine.verify import Chosen
from headrace.frames import Finish, Freed, Output, TokenLogprob


class Answering:
    """Writes into step results. `pinned` are exports whose lease begins with the end of the step."""

    def __init__(self, scheduler: Scheduler, requests: Requests) -> None:
        self._scheduler = scheduler
        self._requests = requests
        self.pinned: list[Sequence] = []

    def tokens(self, chosen: Chosen, result: StepResult) -> None:
        """A sequence got tokens, which it has already; or none, and fails."""
        sequence = chosen.sequence
        if not chosen.ids:
            self.fail(sequence, _not_finite(), result)
            return
        result.drafted += chosen.drafted
        result.accepted += chosen.accepted
        self._say(chosen, chosen.finish, result)
        if sequence.export is not None and chosen.finish is None:
            self._pin(sequence, result)

    def scored(self, sequence: Sequence, entries: list[TokenLogprob], result: StepResult) -> None:
        """More of its prompt's log-probabilities; they are all there is where nothing is to be generated."""
        assert sequence.prompt_logprobs is not None
        if any(math.isnan(entry.logprob) for entry in entries):
            self.fail(sequence, _not_finite(), result)
            return
        sequence.prompt_logprobs += entries
        if sequence.limit == sequence.prompt_len == sequence.computed:
            self._say(_nothing(sequence), "length", result)

    def late(self, sequence: Sequence, result: StepResult) -> None:
        """Its deadline passed."""
        sequence.prompt_logprobs = None  # perhaps not complete
        self._say(_nothing(sequence), "cancelled", result)

    def fail(self, sequence: Sequence, error: RequestError, result: StepResult) -> None:
        result.of(sequence.key.link).failed.append(error.frame(sequence.key.request))
        self.free(sequence, result)

    def free(self, sequence: Sequence, result: StepResult) -> None:
        blocks = self._requests.end(sequence)
        if blocks is not None:  # otherwise `pulled` or `pull_failed` says it
            freed = Freed(request=sequence.key.request, blocks=blocks)
            result.of(sequence.key.link).freed.append(freed)

    def _say(self, chosen: Chosen, finish: Finish | None, result: StepResult) -> None:
        sequence = chosen.sequence
        first = not sequence.answered
        output = Output(
            request=sequence.key.request,
            ids=chosen.ids,
            logprobs=chosen.logprobs,
            finish=finish,
            cached_tokens=sequence.cached_tokens if first else None,
            prompt_logprobs=sequence.prompt_logprobs if first else None,
            drafted=chosen.drafted,
            accepted=chosen.accepted,
        )
        sequence.answered = True
        sequence.prompt_logprobs = None  # sent, and not wanted again after a preemption
        result.of(sequence.key.link).outputs.append(output)
        if finish is not None:
            if finish != "cancelled" and sequence.export is None:
                self._scheduler.note_answer(len(sequence.generated))
            self.free(sequence, result)

    def _pin(self, sequence: Sequence, result: StepResult) -> None:
        """The rest of the answer is another worker's: keep the blocks for it."""
        assert sequence.export is not None
        if sequence.export.released:
            self.free(sequence, result)
        else:
            self._scheduler.park(sequence)
            self.pinned.append(sequence)


def _nothing(sequence: Sequence) -> Chosen:
    return Chosen(sequence, [], None, None, 0, 0)


def _not_finite() -> RequestError:
    return RequestError(FailureKind.ENGINE, "the model's logits are not finite")
