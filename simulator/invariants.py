"""What must be true of a scheduler after every call, whatever the schedule; looks inside it."""

from dataclasses import dataclass

from headrace.core.ids import SequenceId
from headrace.core.plan import Chunk, StepPlan
from headrace.scheduler.cost import StepShape
from headrace.scheduler.scheduler import Scheduler
from headrace.scheduler.sequence import Sequence, SequenceStatus
from simulator.scenario import Scenario


@dataclass
class Before:
    """The state before a plan."""

    running: list[Sequence]
    waiting: list[Sequence]
    decoding: list[Sequence]
    opened: list[Sequence]
    suspects: set[Sequence]
    kept: float
    available: int


class Invariants:
    """Watches one scheduler from its first call to its last."""

    def __init__(self, scheduler: Scheduler, scenario: Scenario) -> None:
        self._scheduler = scheduler
        self._table = scheduler._table
        self._quarantine = scheduler._quarantine
        self._scenario = scenario
        self._planned: dict[SequenceId, int] = {}
        self._capacity = scheduler.memory.num_available
        self._cap = scenario.limits.max_step_tokens
        self._was_alone = False

    def after_any_call(self) -> None:
        """S1, S4, S12: the books are right, and an idle scheduler holds nothing."""
        memory, table = self._scheduler.memory, self._table
        memory.check()
        assert len(memory._leases) == len(table.running)
        assert {s.lease for s in table.running} == memory._leases
        assert len(table.running) <= self._scenario.limits.max_num_seqs
        for sequence in table._sequences.values():
            assert (sequence.status is SequenceStatus.RUNNING) == (sequence.lease is not None)
            assert sequence.remaining >= 0
            assert 0 <= sequence.num_computed <= sequence.num_planned <= sequence.num_known
        for suspect in self._quarantine._suspects:
            assert suspect.clears_at is not None
            assert suspect.num_computed < suspect.clears_at or suspect.num_in_flight
        if self._scheduler.is_idle:
            assert memory.num_available == self._capacity
            assert not table.running and not len(table.waiting) and not self._quarantine

    def before_plan(self, cancelled: set[int]) -> Before:
        table = self._table
        running = [s for s in table.running if s.id not in cancelled and s.outcome is None]
        return Before(
            running=running,
            waiting=[s for s in table.waiting if s.id not in cancelled],
            decoding=[s for s in running if _needs_one(s)],
            opened=[s for s in running if s.num_known - s.num_planned > 1],
            suspects=set(self._quarantine._suspects),
            kept=self._scheduler._budget.kept,
            available=self._scheduler.memory.num_available,
        )

    def after_plan(self, plan: StepPlan | None, before: Before, now: float) -> None:
        preempted = [s for s in before.running if s.lease is None]
        self._only_the_newest_gave_way(preempted, before)
        if plan is None:
            return
        assert plan.chunks
        for sequence_id in plan.ended:
            self._planned.pop(sequence_id, None)
        named = [i for chunk in plan.chunks for i in chunk.draws or (chunk.sequence_id,)]
        assert len(set(named)) == len(named)
        is_alone = any(self._table[i] in before.suspects for i in named)
        assert not is_alone or len(named) == 1, "a suspect must run alone"
        self._chunks_are_contiguous(plan, named)
        self._nobody_writes_what_another_reads(plan)
        self._step_is_within_its_bounds(plan, before)
        if is_alone:
            return
        for sequence in before.decoding:
            is_free = sequence not in preempted and sequence not in before.suspects
            assert not is_free or sequence.id in named, f"S6: {sequence.id} sat a step out"
        self._prompts_get_on(plan, before)
        self._nobody_is_passed_by(plan, before, now)
        assert not preempted or not plan.begun, "a start in the plan of a preemption"

    def _only_the_newest_gave_way(self, preempted: list[Sequence], before: Before) -> None:
        """S11."""
        kept = [s for s in before.running if s.lease is not None]
        assert not preempted or kept, "the first must never be preempted"
        for sequence in preempted:
            assert all(sequence.rank > other.rank for other in kept)
            assert sequence.num_planned == sequence.num_computed == sequence.num_pending == 0

    def _chunks_are_contiguous(self, plan: StepPlan, named: list[SequenceId]) -> None:
        """S3, S14: each begins where the one before it ended, or where the credit ends."""
        begun = {begin.sequence_id: begin for begin in plan.begun}
        for chunk in plan.chunks:
            sequence_id = chunk.sequence_id
            if sequence_id in begun:
                assert chunk.start <= len(begun[sequence_id].token_ids) - 1
            else:
                assert chunk.start == self._planned[sequence_id], "a gap between chunks"
            for named_id in chunk.draws or (sequence_id,):
                self._planned[named_id] = chunk.start + chunk.length
        assert begun.keys() <= set(named), "a start comes with a chunk"
        assert begun.keys() <= {s.id for s in self._table.running}

    def _nobody_writes_what_another_reads(self, plan: StepPlan) -> None:
        """S2: a written block is not public, and only starting siblings share it."""
        pool, size = self._scheduler.memory._blocks, self._scenario.layout.block_size
        if not pool.num_blocks:
            return
        written: set[int] = set()
        for chunk in plan.chunks:
            blocks = chunk.block_ids[chunk.start // size : -(-(chunk.start + chunk.length) // size)]
            assert len(blocks) == -(-(chunk.start + chunk.length) // size) - chunk.start // size
            assert not written & set(blocks)
            written |= set(blocks)
            for block_id in blocks:
                assert block_id not in pool.index, "a public block is written"
                num_holders = pool._num_holders[block_id]
                assert num_holders <= max(1, len(chunk.draws)), "a shared block is written"

    def _step_is_within_its_bounds(self, plan: StepPlan, before: Before) -> None:
        """S5."""
        num_decoding = sum(_is_decode(chunk, before) for chunk in plan.chunks)
        num_tokens = sum(chunk.length for chunk in plan.chunks)
        assert num_tokens <= max(self._cap, 1 + num_decoding)
        step = self._scheduler._in_flight._steps[-1]
        limits, budget = self._scenario.limits, self._scheduler._budget
        target = limits.max_stall_s if step.is_awaited else limits.max_step_s
        if target is None or not budget.model.is_measured:
            return
        if step.cause == "decode":
            decoding = StepShape()
            for chunk in plan.chunks:
                if _is_decode(chunk, before):
                    decoding.add(chunk.start, 1, False, False)
            alone = max(budget._decode_seconds(decoding), budget.model.predict(decoding))
            assert step.predicted <= max(target, (1 + limits.prompt_share) * alone) * 1.000001
        elif not step.cause and (step.is_awaited or step.shape.num_prompt_tokens > 1):
            assert step.predicted <= target * 1.000001, "a miss without a cause"

    def _prompts_get_on(self, plan: StepPlan, before: Before) -> None:
        """S7."""
        opened = [s for s in before.opened if s.lease is not None and s not in before.suspects]
        has_prompt_work = any(not _is_decode(chunk, before) for chunk in plan.chunks)
        assert not opened or has_prompt_work or self._scheduler._budget.kept > before.kept

    def _nobody_is_passed_by(self, plan: StepPlan, before: Before, now: float) -> None:
        """S10: past its due, nobody with a later due starts before it."""
        begun = {begin.sequence_id for begin in plan.begun}
        dues = [s.due for s in before.waiting if s.id in begun]
        for sequence in before.waiting:
            if sequence.id in begun or sequence in before.suspects or sequence.due > now:
                continue
            assert not dues or max(dues) <= sequence.due, f"S10: {sequence.id} was passed by"


def _needs_one(sequence: Sequence) -> bool:
    if sequence.num_pending and sequence.num_known >= sequence.max_total:
        return False
    return sequence.num_known - sequence.num_planned == 1


def _is_decode(chunk: Chunk, before: Before) -> bool:
    return any(s.id == chunk.sequence_id for s in before.decoding)
