"""The scheduler's door: takes messages and results in, gives plans and outputs out; pure.

Knows token counts, never what tokens mean; time is an argument.
"""

from collections import deque

from headrace.core.config import SchedulerConfig
from headrace.core.ids import SequenceId
from headrace.core.layout import MemoryLayout
from headrace.core.messages import Cancel, Finish, Outputs, Status, Submit
from headrace.core.plan import Chunk, ChunkResult, Drawn, StepPlan, StepResult
from headrace.memory.memory import Memory
from headrace.scheduler.draft import StepDraft
from headrace.scheduler.intake import new_sequence, outcome_before_any_step
from headrace.scheduler.limits import Limits
from headrace.scheduler.outbox import Outbox
from headrace.scheduler.planner import Planner
from headrace.scheduler.queue import due_time
from headrace.scheduler.roster import Roster
from headrace.scheduler.sequence import Sequence

UNMEASURED_TOKENS_PER_S = 500.0
MAX_QUEUE_SHOWN = 64


class Scheduler:
    """Everything between a Submit and its terminal outcome, but for the computing."""

    def __init__(self, config: SchedulerConfig, layout: MemoryLayout, limits: Limits) -> None:
        self.max_model_len = limits.max_total(layout)
        self.memory = Memory(layout)
        self._config = config
        self._outbox = Outbox()
        self._roster = Roster(self.memory, self._outbox)
        self._planner = Planner(config, limits, self._roster)
        self._cancels: dict[SequenceId, Finish] = {}
        self._in_flight: deque[StepPlan] = deque()
        self._num_admitted = 0
        self._num_steps = 0

    @property
    def is_idle(self) -> bool:
        """Whether no sequence is left; outputs may still have to be taken."""
        return not self._roster

    @property
    def has_work(self) -> bool:
        """Whether plan() or take_outputs() may have something."""
        return bool(self._roster) or not self._outbox.is_empty

    @property
    def must_exit(self) -> bool:
        """Whether the engine should give way to a fresh one: sequence after sequence fails."""
        return self._roster.quarantine.is_hopeless

    def take_outputs(self) -> Outputs:
        return self._outbox.take()

    def status(self) -> Status:
        waiting = list(self._roster.waiting)
        return Status(
            num_running=len(self._roster.running),
            num_waiting=len(waiting),
            num_waiting_tokens=sum(sequence.num_tokens for sequence in waiting),
            blocks_free=self.memory.num_available,
            slots_free=self.memory.num_free_slots,
            num_steps=self._num_steps,
            queue=tuple(sequence.id for sequence in waiting[:MAX_QUEUE_SHOWN]),
        )

    def add(self, submit: Submit, now: float) -> None:
        """Take in all sequences of a stream; those that can never run end at once."""
        for new in submit.sequences:
            self._num_admitted += 1
            sequence = new_sequence(submit, new, self.max_model_len, self._num_admitted)
            self._roster.admit(sequence)
            outcome = outcome_before_any_step(sequence, self.max_model_len)
            if outcome is not None:
                self._roster.refuse(sequence, outcome)
                continue
            alone = sequence.num_tokens / UNMEASURED_TOKENS_PER_S
            sequence.due = due_time(submit.arrival, self._config.patience, alone, submit.priority)
            self._roster.enqueue(sequence)
            if submit.suspect:
                self._roster.quarantine.suspect(sequence, sequence.num_tokens)

    def cancel(self, cancel: Cancel) -> None:
        """Remember whom to end; the next plan acts on it."""
        for sequence_id in cancel.sequence_ids:
            if self._roster.living(sequence_id) is not None:
                self._cancels.setdefault(sequence_id, cancel.finish)

    def plan(self, now: float) -> StepPlan | None:
        """The next step; None if there is nothing to do before a commit or a message."""
        self._apply_cancels()
        quarantine = self._roster.quarantine
        is_last = not self._in_flight
        order = [self._planner.plan_together, self._planner.plan_alone]
        if quarantine.is_turn:
            order.reverse()
        for plan_step in order:
            draft = plan_step(now, is_last)
            if draft is not None and draft.num_chunks:
                quarantine.took_turn(alone=plan_step == self._planner.plan_alone)
                return self._launch(draft)
        return None

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """Take in the result of the oldest plan in flight."""
        launched = self._in_flight.popleft()
        assert launched is plan
        self._num_steps += 1
        sequences = [self._roster[chunk.sequence_id] for chunk in plan.chunks]
        for chunk, chunk_result in zip(plan.chunks, result.chunks, strict=True):
            self._commit_chunk(chunk, chunk_result)
        self._roster.quarantine.step_was_good(sequences)

    def fail(self, plan: StepPlan, message: str, now: float) -> None:
        """The oldest plan in flight raised: it and all plans launched after it count for nothing.

        Their sequences wait again; those of the failed plan are suspects, and one that was alone
        in it is to blame.
        """
        assert self._in_flight[0] is plan
        for chunk in plan.chunks:
            sequence = self._roster.living(chunk.sequence_id)
            if sequence is None:
                continue
            self._roster.quarantine.suspect(sequence, chunk.start + chunk.length)
            if len(plan.chunks) == 1:
                self._roster.quarantine.failed_alone()
                self._roster.end(sequence, Finish.ERROR, message)
        self._drop_plans_in_flight()

    def _apply_cancels(self) -> None:
        cancels, self._cancels = self._cancels, {}
        for sequence_id, finish in cancels.items():
            sequence = self._roster.living(sequence_id)
            if sequence is not None:
                self._roster.end(sequence, finish)

    def _launch(self, draft: StepDraft) -> StepPlan:
        plan = draft.build(self._roster.take_ended())
        self._in_flight.append(plan)
        return plan

    def _commit_chunk(self, chunk: Chunk, result: ChunkResult) -> None:
        sequence = self._roster[chunk.sequence_id]
        sequence.num_in_flight -= 1
        sequence.num_computed = chunk.start + chunk.length
        if sequence.outcome is None:
            self._outbox.computed(sequence, chunk.start, result)
            if sequence.num_computed == sequence.max_total:
                self._roster.end(sequence, Finish.LENGTH)  # nothing was to be drawn
        for sequence_id, drawn in zip(chunk.draws, result.drawn, strict=True):
            self._commit_draw(self._roster[sequence_id], drawn)
        self._roster.close_if_over(sequence)

    def _commit_draw(self, sequence: Sequence, drawn: Drawn) -> None:
        sequence.num_pending -= 1
        if sequence.outcome is not None:
            return
        if drawn.error is not None:
            self._roster.end(sequence, Finish.ERROR, drawn.error)
            return
        for token_id in drawn.token_ids:
            sequence.token_ids.append(token_id)
            self._outbox.token(sequence, token_id, drawn)
            finish = sequence.end_reason()
            if finish is not None:
                self._roster.end(sequence, finish)
                return

    def _drop_plans_in_flight(self) -> None:
        dropped, self._in_flight = self._in_flight, deque()
        named = {chunk.sequence_id for plan in dropped for chunk in plan.chunks}
        for sequence_id in sorted(named):
            sequence = self._roster[sequence_id]
            sequence.num_in_flight = 0
            if sequence.outcome is None:
                self._roster.preempt(sequence)
            else:
                self._roster.close_if_over(sequence)
        for plan in dropped:
            self._roster.tell_again(plan.ended)
