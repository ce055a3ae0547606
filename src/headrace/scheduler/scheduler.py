"""The scheduler's door: takes messages and results in, gives plans and outputs out; pure.

Knows token counts, never what tokens mean; time is an argument.
"""

from collections import Counter
from collections.abc import Sequence as Chunks

from headrace.core.config import SchedulerConfig
from headrace.core.ids import SequenceId
from headrace.core.layout import MemoryLayout
from headrace.core.messages import Cancel, Finish, Outputs, Status, StepTrace, Submit
from headrace.core.plan import StepPlan, StepResult
from headrace.memory.memory import Memory
from headrace.scheduler.budget import TimeBudget
from headrace.scheduler.cost import StepShape
from headrace.scheduler.in_flight import InFlight
from headrace.scheduler.intake import Intake
from headrace.scheduler.limits import Limits
from headrace.scheduler.outbox import Outbox
from headrace.scheduler.planner import Planner
from headrace.scheduler.queue import due_time
from headrace.scheduler.sequence import Sequence
from headrace.scheduler.sequence_table import Reserve, SequenceTable

MAX_QUEUE_SHOWN = 64


def known_tokens(sequence: Sequence) -> int:
    """A start takes memory for what there is; answers grow block by block."""
    return sequence.num_tokens


class Scheduler:
    """Everything between a Submit and its terminal outcome, but for the computing."""

    def __init__(
        self,
        config: SchedulerConfig,
        layout: MemoryLayout,
        limits: Limits,
        reserve: Reserve = known_tokens,
    ) -> None:
        self.max_model_len = limits.max_total(layout)
        self.memory = Memory(layout)
        self._patience = config.patience
        self._outbox = Outbox()
        self._roster = SequenceTable(self.memory, self._outbox, reserve)
        self._budget = TimeBudget(limits)
        self._planner = Planner(config, limits, self._roster, self._budget)
        self._flight = InFlight(self._roster, self._budget)
        self._intake = Intake(self.memory, self.max_model_len)
        self._cancels: dict[SequenceId, Finish] = {}

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

    @property
    def missed(self) -> Counter[str]:
        """How often the stall target was missed, by cause."""
        return self._budget.missed

    @property
    def predicted_s(self) -> float:
        """Seconds that the step launched last should take; 0 while unmeasured."""
        return self._flight.predicted_s

    @property
    def last_step(self) -> StepTrace | None:
        """The step committed last."""
        return self._flight.last_step

    def take_outputs(self) -> Outputs:
        return self._outbox.take()

    def status(self) -> Status:
        waiting = list(self._roster.waiting)
        return Status(
            num_running=len(self._roster.running),
            num_waiting=len(self._roster) - len(self._roster.running),
            num_waiting_tokens=sum(sequence.num_tokens for sequence in waiting),
            blocks_free=self.memory.num_available,
            slots_free=self.memory.num_free_slots,
            num_steps=self._flight.num_steps,
            queue=tuple(sequence.id for sequence in waiting[:MAX_QUEUE_SHOWN]),
            prompt_tokens_per_s=self._budget.prompt_tokens_per_s,
            missed=dict(self.missed),
        )

    def observe(self, chunks: Chunks[tuple[int, int]], seconds: float) -> None:
        """Learn from a timed step before the first request: (context, new tokens) per chunk.

        One new token counts as decoding; the runner is warm.
        """
        shape = StepShape()
        for context, new in chunks:
            shape.add(context, new, new > 1, self._budget.forwards > 0)
        self._budget.learn(shape, seconds)

    def count_missed(self, cause: str) -> None:
        """A stall that lies outside the scheduler: its owner says why, before the next step."""
        self._budget.excuse(cause)

    def add(self, submit: Submit, now: float) -> None:
        """Take in all sequences of a stream; those that can never run end at once."""
        for sequence in self._intake.sequences(submit):
            outcome = self._intake.outcome_before_any_step(sequence)
            if outcome is not None:
                self._roster.refuse(outcome)
                continue
            sequence.due = self._due(sequence)
            self._roster.admit(sequence)
            if submit.suspect:
                self._roster.quarantine.suspect(sequence, sequence.num_tokens)

    def _due(self, sequence: Sequence) -> float:
        cached = self._roster.match(sequence).num_tokens
        alone = self._budget.seconds_alone(cached, sequence.num_tokens - cached)
        return due_time(sequence.arrival, self._patience, alone, sequence.priority)

    def cancel(self, cancel: Cancel) -> None:
        """Remember whom to end; the next plan acts on it."""
        for sequence_id in cancel.sequence_ids:
            if self._roster.living(sequence_id) is not None:
                self._cancels.setdefault(sequence_id, cancel.finish)

    def plan(self, now: float) -> StepPlan | None:
        """The next step; None if there is nothing to do before a commit or a message."""
        self._apply_cancels()
        quarantine = self._roster.quarantine
        turns = [(False, self._planner.plan_together), (True, self._planner.plan_alone)]
        if quarantine.is_turn:
            turns.reverse()
        for is_alone, plan_step in turns:
            draft = plan_step(now, self._flight.is_empty)
            if draft is not None and draft.has_chunks:
                quarantine.took_turn(is_alone)
                return self._flight.launch(draft, now)
        return None

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """Take in the result of the oldest plan in flight."""
        self._flight.commit(plan, result, now)

    def fail(self, plan: StepPlan, message: str, now: float) -> None:
        """The oldest plan in flight raised: it and all plans launched after it count for nothing.

        Their sequences wait again. Those of the failed plan are suspects, and one that was alone
        in it ends.
        """
        self._flight.suspect(plan, message)
        self._flight.drop(now)

    def out_of_memory(self, plan: StepPlan, message: str, now: float) -> None:
        """The oldest plan did not fit the device: again with half the tokens a step, if any."""
        if not self._budget.halve_tokens(at_least=self.memory.layout.block_size):
            self._flight.suspect(plan, message)
        self._flight.drop(now)

    def _apply_cancels(self) -> None:
        cancels, self._cancels = self._cancels, {}
        for sequence_id, finish in cancels.items():
            sequence = self._roster.living(sequence_id)
            if sequence is not None:
                self._roster.end(sequence, finish)
