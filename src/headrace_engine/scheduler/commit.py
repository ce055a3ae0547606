"""Tracks the steps in flight, and applies the result of each step to the step's sequences."""

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
    """Holds the launched steps, and commits the steps in launch order."""

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
        self.num_drafted = self.num_drafted_right = 0
        self._table = table
        self._quarantine = quarantine
        self._memory = memory
        self._outputs = outputs
        self._restores = restores
        self._budget = budget
        self._steps: deque[PlannedStep] = deque()
        # The time at which the last step ended, in seconds.
        self._ended_at = 0.0
        # Whether any sequence was left after the last step.
        self._was_busy = False

    @property
    def is_empty(self) -> bool:
        return not self._steps

    def launch(self, step: PlannedStep) -> StepPlan:
        self._steps.append(step)
        return step.launch(self._table.take_ended())

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> StepTrace | None:
        """Apply the result of the oldest step; return the step's trace if the step was timed."""
        step = self._steps.popleft()
        assert step.plan is plan
        if plan.loads:
            for load in plan.loads:
                self._commit_load(load)
            num_bytes = sum(len(part.numbers) for load in plan.loads for part in load.segments)
            if num_bytes:
                self._restores.copied(num_bytes, result.load_seconds, now)
        for encoded in plan.encoded:
            self._commit_encoded(encoded)
        for chunk, named, drawn in zip(plan.chunks, step.named, result.chunks, strict=True):
            self._commit_chunk(chunk, named, drawn)
        for sequence, slot_id, end in step.saves:
            num_prompt = sequence.num_prompt
            self._memory.saved(slot_id, sequence.token_ids, sequence.chain, end, num_prompt)
        if self._quarantine.suspects or self._quarantine.num_failed_alone:
            self._quarantine.step_was_good()
        return self._learn(step, result, now)

    def _commit_load(self, load: Load) -> None:
        sequence = self._table[load.sequence_id]
        sequence.commit_tokens(load.end)
        self._memory.publish(sequence.held, sequence.token_ids, sequence.chain, load.end)
        if sequence.outcome is None and sequence.num_reported >= 0:
            self._report(sequence, load.start, ChunkResult())
        self._table.close_if_over(sequence)

    def _commit_encoded(self, chunk: EncodeChunk) -> None:
        sequence = self._table[chunk.sequence_id]
        sequence.commit_units(chunk.end - chunk.start)
        if sequence.outcome is None:
            self._report(sequence, 0, ChunkResult())
        self._table.close_if_over(sequence)

    def _commit_chunk(self, chunk: Chunk, named: list[Sequence], result: ChunkResult) -> None:
        """Apply the result of a chunk that belongs to `named[0]`.

        All sequences in `named` draw tokens from the chunk's last row of logits.
        """
        sequence = named[0]
        lease, block_size = sequence.lease, self._memory.layout.block_size
        assert lease is not None

        # 1. Count the chunk's tokens and the correct guesses as processed.
        end = chunk.start + chunk.length - len(chunk.guess)
        if chunk.guess:
            end += self._commit_guess(sequence, chunk, result.drawn[0])
        for computed in named:
            computed.commit_tokens(end)
        if sequence.outcome is None:
            if sequence.num_reported < sequence.num_shown:
                self._report(sequence, chunk.start, result)
            family = sequence.family
            if family is not None and family.waiting and end >= sequence.num_prompt:
                self._table.queue_siblings(family)
            # The sequence has its full length, so no token was drawn.
            if end == sequence.max_total:
                finish = FinishReason.ERROR if result.error is not None else FinishReason.LENGTH
                sequence.decide(finish, result.error or "", result.vector)

        # 2. Append the drawn tokens to each sequence, up to a token that ends the sequence.
        for drawing, drawn in zip(named if chunk.draws else (), result.drawn, strict=True):
            drawing.commit_draw(drawn.forced, drawn.state)
            last = len(drawn.token_ids) - 1
            for number, token_id in enumerate(drawn.token_ids):
                if drawing.outcome is not None:
                    break
                finish_reason = drawing.append(token_id)
                logprobs = drawn.logprobs and drawn.logprobs.row(number)
                state = drawn.state if number == last else b""
                self._outputs.tokens.append(NewToken(drawing.id, token_id, logprobs, state))
                if finish_reason is not None:
                    drawing.decide(finish_reason)
            if drawn.error is not None and drawing.outcome is None:
                drawing.decide(FinishReason.ERROR, drawn.error)

        # 3. Publish the full blocks to the prefix cache, and close the sequences that have an
        # outcome. If prefixes are stored on disk, `publish` also offers blocks that were public
        # before.
        num_public = min(end, len(sequence.token_ids)) - sequence.num_to_recompute
        has_filled = num_public >= (lease.num_published + 1) * block_size
        if has_filled or self._memory.offers is not None:
            self._memory.publish(lease, sequence.token_ids, sequence.chain, num_public)
        for computed in named:
            if computed.outcome is not None:
                self._table.close_if_over(computed)

    def _commit_guess(self, sequence: Sequence, chunk: Chunk, drawn: Drawn) -> int:
        """Return how many guessed tokens were correct; wrong guesses do not count as processed.

        If a wrong guess changed a recurrent state, the state from before the chunk is restored.
        In this case, the chunk's known tokens and the correct guesses have to be processed again.
        """
        num_right = max(0, len(drawn.token_ids) - 1)
        num_to_recompute = 0
        if chunk.slot_id != NO_SLOT and num_right < len(chunk.guess):
            num_to_recompute = chunk.num_known + num_right
        sequence.commit_guess(num_right, num_to_recompute)
        guessed = Guessed(sequence.id, len(chunk.guess), num_right, chunk.is_drafted)
        self._outputs.guessed.append(guessed)
        self.num_guessed += len(chunk.guess)
        self.num_accepted += num_right
        if chunk.is_drafted:
            self.num_drafted += len(chunk.guess)
            self.num_drafted_right += num_right
        return num_right

    def _report(self, sequence: Sequence, start: int, result: ChunkResult) -> None:
        """Report the prompt's progress, unless this progress was reported before a preemption.

        `start` is the index of the first token in the processed chunk.
        """
        processed = sequence.num_processed
        if processed <= sequence.num_reported:
            return
        sequence.report(processed)
        if not sequence.is_reporter:
            return
        self._outputs.progress.append(PromptAdvance(sequence.id, processed))
        if result.prompt_logprobs is not None:
            rows = PromptLogprobs(sequence.id, start + 1, result.prompt_logprobs)
            self._outputs.prompt_logprobs.append(rows)

    def _learn(self, step: PlannedStep, result: StepResult, now: float) -> StepTrace | None:
        # Streams wait from the end of the last step on. If no sequence was left after the last
        # step, the wait starts when this step is planned.
        began_at = self._ended_at if self._was_busy else max(step.planned_at, self._ended_at)
        elapsed = now - began_at
        self._ended_at, self._was_busy = now, len(self._table) > 0
        self.num_steps += 1
        if not result.is_timed:
            return None
        drafting = 0.0 if step.shape.drafted is None else result.draft_seconds
        computing = result.seconds - sum(result.encode_seconds) - result.load_seconds - drafting
        times = StepTimes(computing, result.encode_seconds, elapsed, result.load_seconds, drafting)
        self._budget.learn_step(step.shape, times, step.is_awaited, step.cause)
        if self._budget.rows is not None and step.only_decodes:
            self._budget.rows.observe(step.num_decoding, step.shape.num_new, elapsed - drafting)
        return StepTrace(
            num_decoding=step.num_decoding,
            num_prompt_tokens=step.shape.num_prompt_tokens,
            predicted=step.predicted,
            actual=result.seconds,
            elapsed=elapsed,
            room=step.room,
            cause=step.cause,
            stall_target=step.stall_target,
        )

    def suspect(self, plan: StepPlan, message: str) -> None:
        """Make all sequences of the oldest plan suspects, because the plan raised an exception.

        If the plan has only one sequence, that sequence is to blame and ends with `message`.
        """
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
        """Drop all steps in flight; their sequences wait again, as after a preemption."""
        dropped, self._steps = self._steps, deque()
        for sequence_id in dict.fromkeys(i for step in dropped for i in step.plan.named):
            sequence = self._table[sequence_id]
            sequence.leave_plans()
            if sequence.outcome is None:
                self._table.preempt(sequence)
            else:
                self._table.close_if_over(sequence)
        for step in dropped:
            self._table.give_back_ended(step.plan.ended)
            for _, slot_id, _ in step.saves:
                self._memory.not_saved(slot_id)
        self._ended_at, self._was_busy = now, len(self._table) > 0
