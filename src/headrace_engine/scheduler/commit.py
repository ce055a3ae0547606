"""Steps in flight, and what their results make of the sequences they name."""

from collections import deque

from headrace_common.messages import (
    FinishReason,
    Guessed,
    NewToken,
    PromptAdvance,
    PromptLogprobs,
    StepTrace,
)
from headrace_common.plan import (
    NO_SLOT,
    Chunk,
    ChunkResult,
    Drawn,
    EncodeChunk,
    Load,
    StepPlan,
    StepResult,
)
from headrace_engine.memory.memory import Memory
from headrace_engine.scheduler.budget import StepTimes, TimeBudget
from headrace_engine.scheduler.restores import Restores
from headrace_engine.scheduler.sequence import Sequence
from headrace_engine.scheduler.step import PlannedStep
from headrace_engine.scheduler.table import OutputBuffer, Quarantine, SequenceTable


class InFlight:
    """Steps between launch and commit; committed in the order of their launch."""

    def __init__(
        self,
        table: SequenceTable,
        quarantine: Quarantine,
        memory: Memory,
        outputs: OutputBuffer,
        restores: Restores,
        budget: TimeBudget,
    ) -> None:
        self.num_steps = 0
        self.num_guessed = self.num_accepted = 0
        self.last_step: StepTrace | None = None
        self._table = table
        self._quarantine = quarantine
        self._memory = memory
        self._outputs = outputs
        self._restores = restores
        self._budget = budget
        self._steps: deque[PlannedStep] = deque()
        self._ended_at = 0.0  # the last step
        self._was_busy = False  # whether it left something to do

    @property
    def is_empty(self) -> bool:
        return not self._steps

    @property
    def predicted_s(self) -> float:
        return self._steps[-1].allowed if self._steps else 0.0

    def launch(self, step: PlannedStep) -> StepPlan:
        self._steps.append(step)
        return step.launch(self._table.take_ended())

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> None:
        step = self._steps.popleft()
        assert step.plan is plan
        for load in plan.loads:
            self._commit_load(load)
        if num_bytes := sum(len(run.numbers) for load in plan.loads for run in load.runs):
            self._restores.copied(num_bytes, result.load_seconds, now)
        for encoded in plan.encoded:
            self._commit_encoded(encoded)
        for chunk, named, drawn in zip(plan.chunks, step.named, result.chunks, strict=True):
            self._commit_chunk(chunk, named, drawn)
        for sequence, slot_id, end in step.saves:
            num_prompt = sequence.num_prompt
            self._memory.saved(slot_id, sequence.token_ids, sequence.chain, end, num_prompt)
        self._quarantine.step_was_good()
        self._learn(step, result, now)

    def _commit_load(self, load: Load) -> None:
        sequence = self._table[load.sequence_id]
        sequence.num_in_flight -= 1
        sequence.num_computed = load.end
        self._memory.publish(sequence.held, sequence.token_ids, sequence.chain, load.end)
        if sequence.outcome is None and sequence.num_reported >= 0:
            self._report(sequence, load.start, ChunkResult())
        self._table.close_if_over(sequence)

    def _commit_encoded(self, chunk: EncodeChunk) -> None:
        sequence = self._table[chunk.sequence_id]
        sequence.num_in_flight -= 1
        sequence.num_units_computed += chunk.end - chunk.start
        if sequence.outcome is None:
            self._report(sequence, 0, ChunkResult())
        self._table.close_if_over(sequence)

    def _commit_chunk(self, chunk: Chunk, named: list[Sequence], result: ChunkResult) -> None:
        sequence, end = named[0], chunk.start + chunk.num_known
        if chunk.guess:
            end += self._commit_guess(sequence, chunk, result.drawn[0])
        for computed in named:
            computed.num_computed = end
        if sequence.outcome is None:
            self._commit_prompt(sequence, chunk, result)
        for drawing, drawn in zip(named if chunk.draws else (), result.drawn, strict=True):
            self._commit_draw(drawing, drawn)
        num_public = min(end, sequence.num_tokens) - sequence.num_again
        self._memory.publish(sequence.held, sequence.token_ids, sequence.chain, num_public)
        for computed in named:
            computed.num_in_flight -= 1
            self._table.close_if_over(computed)

    def _commit_guess(self, sequence: Sequence, chunk: Chunk, drawn: Drawn) -> int:
        """How many of the guessed tokens were right; the others were never computed.

        A state that took in a wrong one is as it was before the chunk.
        """
        num_right = max(0, len(drawn.token_ids) - 1)
        sequence.num_guessed = 0
        if chunk.slot_id != NO_SLOT and num_right < len(chunk.guess):
            sequence.num_again = chunk.num_known + num_right
        sequence.num_planned += num_right
        self._outputs.guessed.append(Guessed(sequence.id, len(chunk.guess), num_right))
        self.num_guessed += len(chunk.guess)
        self.num_accepted += num_right
        return num_right

    def _commit_prompt(self, sequence: Sequence, chunk: Chunk, result: ChunkResult) -> None:
        if sequence.num_reported < sequence.num_shown:
            self._report(sequence, chunk.start, result)
        family = sequence.family
        if family is not None and family.waiting and sequence.num_computed >= sequence.num_prompt:
            self._table.scatter(family)
        if sequence.num_computed == sequence.max_total:
            # nothing was to be drawn
            failed = result.error is not None
            finish = FinishReason.ERROR if failed else FinishReason.LENGTH
            self._table.end(sequence, finish, result.error or "", result.vector)

    def _report(self, sequence: Sequence, start: int, result: ChunkResult) -> None:
        """Tokens from `start` on are computed; what was reported once is not reported again."""
        processed = sequence.num_processed
        if processed <= sequence.num_reported:
            return
        sequence.num_reported = processed
        if not sequence.is_reporter:
            return
        self._outputs.progress.append(PromptAdvance(sequence.id, processed))
        if result.prompt_logprobs is not None:
            rows = PromptLogprobs(sequence.id, start + 1, result.prompt_logprobs)
            self._outputs.prompt_logprobs.append(rows)

    def _commit_draw(self, sequence: Sequence, drawn: Drawn) -> None:
        sequence.num_pending -= 1
        sequence.forced = drawn.forced
        for number, token_id in enumerate(drawn.token_ids):
            if sequence.outcome is not None:
                break
            sequence.token_ids.append(token_id)
            logprobs = drawn.logprobs and drawn.logprobs.row(number)
            self._outputs.tokens.append(NewToken(sequence.id, token_id, logprobs))
            finish = sequence.end_reason()
            if finish is not None:
                self._table.end(sequence, finish)
        if drawn.error is not None:
            self._table.end(sequence, FinishReason.ERROR, drawn.error)

    def _learn(self, step: PlannedStep, result: StepResult, now: float) -> None:
        # A stream waits from the end of the step before, unless nothing was to be done then.
        began_at = self._ended_at if self._was_busy else max(step.planned_at, self._ended_at)
        elapsed = now - began_at
        self._step_ended(now)
        self.num_steps += 1
        self.last_step = None
        if not result.is_timed:
            return
        computing = result.seconds - result.encode_seconds - result.load_seconds
        times = StepTimes(computing, result.encode_seconds, elapsed, result.load_seconds)
        self._budget.took(step.shape, times, step.is_awaited, step.cause)
        if step.only_decodes:
            self._budget.rows.observe(step.num_decoding, step.shape.num_new, elapsed)
        self.last_step = StepTrace(
            num_decoding=step.num_decoding,
            num_prompt_tokens=step.shape.num_prompt_tokens,
            predicted=step.predicted,
            actual=result.seconds,
            elapsed=elapsed,
            room=step.room,
            cause=step.cause,
        )

    def _step_ended(self, now: float) -> None:
        self._ended_at = now
        self._was_busy = len(self._table) > 0

    def suspect(self, plan: StepPlan, message: str) -> None:
        """The oldest plan raised: hold its sequences; one that was alone in it is to blame."""
        assert self._steps[0].plan is plan
        for chunk in plan.chunks:
            for sequence_id in chunk.draws or (chunk.sequence_id,):
                sequence = self._table.living(sequence_id)
                if sequence is not None:
                    self._quarantine.suspect(sequence, chunk.start + chunk.num_known)
        for load in plan.loads:
            if (sequence := self._table.living(load.sequence_id)) is not None:
                self._quarantine.suspect(sequence, load.end)
        for encoded in plan.encoded:
            if (sequence := self._table.living(encoded.sequence_id)) is not None:
                self._quarantine.suspect(sequence, sequence.num_planned + 1)
        (first, *others) = plan.named
        blamed = self._table.living(first)
        if blamed is not None and not others:
            self._quarantine.failed_alone()
            self._table.end(blamed, FinishReason.ERROR, message)

    def drop(self, now: float) -> None:
        """No step in flight counts: their sequences wait again, as if preempted."""
        dropped, self._steps = self._steps, deque()
        for sequence_id in dict.fromkeys(i for step in dropped for i in step.plan.named):
            sequence = self._table[sequence_id]
            sequence.num_in_flight = 0
            if sequence.outcome is None:
                self._table.preempt(sequence)
            else:
                self._table.close_if_over(sequence)
        for step in dropped:
            self._table.give_back_ended(step.plan.ended)
            for _, slot_id, _ in step.saves:
                self._memory.not_saved(slot_id)
        self._step_ended(now)
