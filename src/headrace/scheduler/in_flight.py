"""Plans between launch and commit, and what their results make of the sequences they name."""

from collections import deque
from dataclasses import dataclass

from headrace.core.ids import SequenceId, SlotId
from headrace.core.messages import Finish, StepTrace
from headrace.core.plan import Chunk, ChunkResult, Drawn, StepPlan, StepResult
from headrace.scheduler.budget import TimeBudget
from headrace.scheduler.cost import StepShape
from headrace.scheduler.draft import StepDraft
from headrace.scheduler.sequence import Sequence
from headrace.scheduler.sequence_table import SequenceTable


@dataclass(slots=True, frozen=True)
class Launched:
    """A plan in flight and what was expected of it."""

    plan: StepPlan
    planned_at: float
    shape: StepShape
    num_decoding: int
    is_awaited: bool
    predicted: float
    room: float | None
    cause: str
    saves: list[tuple[Sequence, SlotId, int]]


class InFlight:
    """Plans in flight, committed in the order of their launch."""

    def __init__(self, roster: SequenceTable, budget: TimeBudget) -> None:
        self.num_steps = 0
        self.last_step: StepTrace | None = None
        self._roster = roster
        self._budget = budget
        self._launched: deque[Launched] = deque()
        self._ended_at = 0.0  # the last step
        self._was_busy = False  # whether it left something to do

    @property
    def is_empty(self) -> bool:
        return not self._launched

    def launch(self, draft: StepDraft, now: float) -> StepPlan:
        cause = draft.cause
        if draft.is_awaited:
            cause = self._budget.expect_miss(draft.shape, cause)
        model = self._budget.model
        launched = Launched(
            plan=draft.build(self._roster.take_ended()),
            planned_at=now,
            shape=draft.shape,
            num_decoding=draft.num_decoding,
            is_awaited=draft.is_awaited,
            predicted=model.predict(draft.shape) if model.is_measured else 0.0,
            room=draft.room,
            cause=cause,
            saves=draft.saves,
        )
        self._launched.append(launched)
        return launched.plan

    @property
    def predicted_s(self) -> float:
        return self._launched[-1].predicted if self._launched else 0.0

    def oldest(self) -> StepPlan:
        return self._launched[0].plan

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> None:
        launched = self._launched.popleft()
        assert launched.plan is plan
        self.num_steps += 1
        named = [self._roster[sequence_id] for sequence_id in _named(plan)]
        for chunk, chunk_result in zip(plan.chunks, result.chunks, strict=True):
            self._commit_chunk(chunk, chunk_result)
        for sequence, slot_id, end in launched.saves:
            self._roster.memory.saved(slot_id, sequence.token_ids, sequence.chain, end)
        self._roster.quarantine.step_was_good(named)
        self._learn(launched, result.seconds, now)

    def _learn(self, launched: Launched, seconds: float, now: float) -> None:
        elapsed = now - self._began_at(launched)
        self._step_ended(now)
        self._budget.took(launched.shape, seconds, elapsed, launched.is_awaited, launched.cause)
        self.last_step = StepTrace(
            num_decoding=launched.num_decoding,
            num_prompt_tokens=launched.shape.num_prompt_tokens,
            predicted=launched.predicted,
            actual=seconds,
            elapsed=elapsed,
            room=launched.room,
            cause=launched.cause,
        )

    def _began_at(self, launched: Launched) -> float:
        """What a stream waits for: from the step before, if there was no pause between them."""
        return self._ended_at if self._was_busy else max(launched.planned_at, self._ended_at)

    def _step_ended(self, now: float) -> None:
        self._ended_at = now
        self._was_busy = len(self._roster) > 0

    def _commit_chunk(self, chunk: Chunk, result: ChunkResult) -> None:
        named = [self._roster[i] for i in chunk.draws or (chunk.sequence_id,)]
        sequence, end = named[0], chunk.start + chunk.length
        for computed in named:
            computed.num_in_flight -= 1
            computed.num_computed = end
        num_public = min(end, sequence.num_tokens)
        memory = self._roster.memory
        memory.publish(sequence.held, sequence.token_ids, sequence.chain, num_public)
        if sequence.outcome is None:
            self._report(sequence, chunk, result)
        if not chunk.draws:
            self._roster.close_if_over(sequence)
            return
        for drawing, drawn in zip(named, result.drawn, strict=True):
            self._commit_draw(drawing, drawn)

    def _report(self, sequence: Sequence, chunk: Chunk, result: ChunkResult) -> None:
        if sequence.num_reported < sequence.num_prompt:
            self._roster.outbox.computed(sequence, chunk.start, result)
        family = sequence.family
        if family is not None and family.waiting and sequence.num_computed >= sequence.num_prompt:
            self._roster.scatter(family)
        if sequence.num_computed == sequence.max_total:
            self._roster.end(sequence, Finish.LENGTH)  # nothing was to be drawn

    def _commit_draw(self, sequence: Sequence, drawn: Drawn) -> None:
        sequence.num_pending -= 1
        if drawn.error is not None:
            self._roster.end(sequence, Finish.ERROR, drawn.error)
        for token_id in drawn.token_ids:
            if sequence.outcome is not None:
                break
            sequence.token_ids.append(token_id)
            self._roster.outbox.token(sequence, token_id, drawn)
            finish = sequence.end_reason()
            if finish is not None:
                self._roster.end(sequence, finish)
        self._roster.close_if_over(sequence)

    def suspect(self, plan: StepPlan, message: str) -> None:
        """The oldest plan raised: hold its sequences; one that was alone in it is to blame."""
        assert self.oldest() is plan
        quarantine = self._roster.quarantine
        for chunk in plan.chunks:
            for sequence_id in chunk.draws or (chunk.sequence_id,):
                sequence = self._roster.living(sequence_id)
                if sequence is not None:
                    quarantine.suspect(sequence, chunk.start + chunk.length)
        (first, *others) = _named(plan)
        blamed = self._roster.living(first)
        if blamed is not None and not others:
            quarantine.failed_alone()
            self._roster.end(blamed, Finish.ERROR, message)

    def drop(self, now: float) -> None:
        """All plans in flight count for nothing: their sequences wait again, as if preempted."""
        dropped, self._launched = self._launched, deque()
        for sequence_id in dict.fromkeys(i for launched in dropped for i in _named(launched.plan)):
            sequence = self._roster[sequence_id]
            sequence.num_in_flight = 0
            if sequence.outcome is None:
                self._roster.preempt(sequence)
            else:
                self._roster.close_if_over(sequence)
        for launched in dropped:
            self._roster.tell_again(launched.plan.ended)
            for _, slot_id, _ in launched.saves:
                self._roster.memory.not_saved(slot_id)
        self._step_ended(now)


def _named(plan: StepPlan) -> list[SequenceId]:
    """The sequences that a plan computes or draws for, each once."""
    return [i for chunk in plan.chunks for i in chunk.draws or (chunk.sequence_id,)]
