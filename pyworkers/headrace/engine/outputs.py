"""What routers are told of the sequences of a step, and what becomes of those that ended with it."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from headrace.engine.admission import Admission
from headrace.engine.errors import RequestError, not_finite, nothing_allowed
from headrace.engine.pooling import Floats
from headrace.engine.requests import Requests
from headrace.engine.result import EndedSequence, StepResult
from headrace.engine.sampling.verify import Chosen, ChosenRows
from headrace.engine.sequence import Sequence
from headrace.engine.stages import Stages
from headrace.engine.step.row_counts import Ints
from headrace.engine.step.rows import places_of
from headrace.wire.frames import Finish, Freed, Output, TokenLogprob
from headrace.wire.output_columns import Outputs


class OutputBuilder:
    """Writes into step results. `pinned` are exports whose lease begins with the end of the step."""

    def __init__(self, stages: Stages, admission: Admission, requests: Requests) -> None:
        self._stages = stages
        self._admission = admission
        self._requests = requests
        self.pinned: list[Sequence] = []

    def tokens(
        self, chosen: ChosenRows, there: NDArray[np.bool_] | None, result: StepResult
    ) -> None:
        """Sequences got tokens, which they have already; or none, and fail, unless they were put off.

        `there`: who has its row; `None`: all.
        """
        work, plain = chosen.work, None
        some, links, requests, link, (drafted, accepted) = self._stages.columns.core.told(
            work.batch_rows,
            chosen.places,
            there,
            finish=chosen.finish,
            counts=chosen.counts,
            drafted=chosen.drafted,
            accepted=chosen.accepted,
        )
        if some is not None or chosen.logprobs:
            plain = np.ones(len(chosen), dtype=np.bool_) if some is None else some
            plain[list(chosen.logprobs)] = False
        if plain is None:  # so it is in most steps
            outputs = Outputs(
                requests, chosen.counts, chosen.ids, chosen.drafted, chosen.accepted, {}
            )
            result.drafted += drafted
            result.accepted += accepted
            self._tell(outputs, links, link, result)
            return
        said = plain.copy()
        special: dict[int, Output] = {}
        for row in places_of(~plain).tolist():
            if row in chosen.put_off:
                continue
            sequence = work.sequence(chosen.places.item(row))
            if self._requests.get(sequence.key) is not sequence:
                continue
            links[row], requests[row] = sequence.key
            output = self._say_of(chosen.row(row), result)
            if output is not None:
                special[row] = output
                said[row] = True
        outputs = Outputs(
            requests,
            np.where(plain, chosen.counts, 0),
            chosen.ids[plain.repeat(chosen.counts)],
            chosen.drafted,
            chosen.accepted,
            special,
        )
        outputs = outputs.where(said)
        result.drafted += int(outputs.drafted.sum())
        result.accepted += int(outputs.accepted.sum())
        self._tell(outputs, links[said], None, result)

    def _tell(self, outputs: Outputs, links: Ints, link: int | None, result: StepResult) -> None:
        """Each link what is of its requests; `link` if all are known to be of that one."""
        if link is not None:
            result.of(link).columns = outputs
            return
        for each in np.unique(links).tolist():
            result.of(each).columns = outputs.where(links == each)

    def _say_of(self, chosen: Chosen, result: StepResult) -> Output | None:
        """Of one that got its first token, or its last, or more than tokens, or none."""
        sequence = chosen.sequence
        if not chosen.ids:
            failure = not_finite() if chosen.stuck is None else nothing_allowed(chosen.stuck)
            self.fail(sequence, failure, result)
            return None
        output = self._output(chosen, chosen.finish, result)
        self._end(sequence, chosen.finish, result)
        if sequence.export is not None and chosen.finish is None:
            self._pin(sequence, result)
        return output

    def scored(self, sequence: Sequence, entries: list[TokenLogprob], result: StepResult) -> None:
        """More of its prompt's log-probabilities; they are all there is where nothing is to be generated."""
        assert sequence.prompt_logprobs is not None
        if any(math.isnan(entry.logprob) for entry in entries):
            self.fail(sequence, not_finite(), result)
            return
        sequence.prompt_logprobs += entries
        if sequence.limit == sequence.prompt_len == sequence.computed:
            self._say(sequence, "length", result)

    def pooled(self, sequence: Sequence, rows: Floats, result: StepResult) -> None:
        """More of its prompt's hidden states; once they are all there, their vector is its answer."""
        assert sequence.pooled is not None
        if not np.isfinite(rows).all():
            self.fail(sequence, not_finite("hidden states"), result)
            return
        sequence.pooled.add(rows)
        if sequence.prompt_len == sequence.computed:
            self._say(sequence, "length", result)

    def late(self, sequence: Sequence, result: StepResult) -> None:
        """Its deadline passed."""
        sequence.prompt_logprobs = None  # perhaps not complete
        self._say(sequence, "cancelled", result)

    def fail(self, sequence: Sequence, error: RequestError, result: StepResult) -> None:
        result.of(sequence.key.link).failed.append(error.frame(sequence.key.request))
        ended = EndedSequence.of(sequence, error=str(error.kind), why=error.message)
        result.ended.append(ended)
        self.free(sequence, result)

    def free(self, sequence: Sequence, result: StepResult) -> None:
        blocks = self._requests.end(sequence)
        if blocks is not None:  # otherwise `KvImports.ended` says it
            freed = Freed(request=sequence.key.request, blocks=blocks)
            result.of(sequence.key.link).freed.append(freed)

    def _say(self, sequence: Sequence, finish: Finish, result: StepResult) -> None:
        """It ends without a token."""
        output = self._output(Chosen(sequence, [], None, finish, 0, 0), finish, result)
        result.of(sequence.key.link).said.append(output)
        self._end(sequence, finish, result)

    def _output(self, chosen: Chosen, finish: Finish | None, result: StepResult) -> Output:
        sequence = chosen.sequence
        first = not sequence.answered
        if first and finish != "cancelled":
            result.begun.append(sequence.key)
        output = Output(
            request=sequence.key.request,
            ids=chosen.ids,
            logprobs=chosen.logprobs,
            finish=finish,
            cached_tokens=sequence.cached_tokens if first else None,
            prompt_logprobs=sequence.prompt_logprobs if first else None,
            drafted=chosen.drafted,
            accepted=chosen.accepted,
            pooled=None
            if sequence.pooled is None or finish != "length"
            else sequence.pooled.vector(),
        )
        sequence.prompt_logprobs = None  # sent, and not wanted again after a preemption
        self._stages.columns.answered(sequence)
        return output

    def _end(self, sequence: Sequence, finish: Finish | None, result: StepResult) -> None:
        if finish is not None:
            late = finish == "cancelled"
            error = "deadline_exceeded" if late else None
            ended = EndedSequence.of(sequence, None if late else finish, error)
            result.ended.append(ended)
            if finish != "cancelled" and sequence.export is None and sequence.pooled is None:
                self._admission.note_answer(sequence.total - sequence.prompt_len)
            self.free(sequence, result)

    def _pin(self, sequence: Sequence, result: StepResult) -> None:
        """The rest of the answer is another worker's: keep the blocks for it."""
        assert sequence.export is not None
        result.ended.append(EndedSequence.of(sequence, "prefilled"))
        if sequence.export.released:
            self.free(sequence, result)
        else:
            self._stages.park(sequence)
            self.pinned.append(sequence)
