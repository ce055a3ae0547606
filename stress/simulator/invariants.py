"""Checks invariants of a scheduler after every call, by looking at its private state."""

import dataclasses
from collections import Counter
from dataclasses import dataclass

from headrace_common.ids import SequenceId
from headrace_common.plan import DRAFTED, NO_SLOT, Chunk, StepPlan
from headrace_engine.scheduler.budget import MOST_DEFAULT_S
from headrace_engine.scheduler.cost import StepShape
from headrace_engine.scheduler.restores import MAX_RESTORES
from headrace_engine.scheduler.scheduler import Scheduler
from headrace_engine.scheduler.sequence import Sequence, SequenceStatus, by_key
from headrace_engine.scheduler.table import queue_key
from stress.simulator.scenario import Scenario


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
    turns: dict[SequenceId, float]
    # The number of blocks of each lease.
    num_blocks: dict[SequenceId, int]
    # The sequences that are being restored from disk.
    reading: set[SequenceId]
    # The first sequence of a client without any, if others have to make way for it.
    starved: Sequence | None
    # Clients that run fewer sequences than another client.
    smaller_clients: set[str]


class Invariants:
    """Watches one scheduler from its first call to its last."""

    def __init__(self, scheduler: Scheduler, scenario: Scenario) -> None:
        self._scheduler = scheduler
        self._table = scheduler._table
        self._quarantine = scheduler._quarantine
        self._scenario = scenario
        self._planned: dict[SequenceId, int] = {}
        # Speculative tokens of each sequence's last chunk.
        self._guessed: dict[SequenceId, int] = {}
        self._capacity = scheduler.memory.num_available
        self._cap = scenario.limits.max_step_tokens
        self._was_exclusive = False

    def after_any_call(self) -> None:
        """Checks that the bookkeeping is consistent, and that an idle scheduler holds nothing."""
        memory, table = self._scheduler.memory, self._table
        memory.check()
        assert len(memory._leases) == len(table.running)
        assert {s.lease for s in table.running} == memory._leases
        assert len(table.running) <= self._scenario.limits.max_num_seqs
        for sequence in table._sequences.values():
            assert (sequence.status is SequenceStatus.RUNNING) == (sequence.lease is not None)
            assert sequence.remaining >= 0
            assert 0 <= sequence.num_computed <= sequence.num_planned <= sequence.num_known
        for suspect in self._quarantine.suspects:
            assert suspect.clears_at is not None
            assert suspect.num_computed < suspect.clears_at or suspect.num_in_flight
        if self._scheduler.is_idle:
            assert memory.num_available == self._capacity
            assert not table.running and not len(table.waiting)
            assert not self._quarantine.suspects

    def before_plan(self, cancelled: set[int]) -> Before:
        table = self._table
        running = [s for s in table.running if s.id not in cancelled and s.outcome is None]
        suspects = set(self._quarantine.suspects)
        waiting = [s for s in table.waiting if s.id not in cancelled]
        return Before(
            running=running,
            waiting=waiting,
            decoding=[s for s in running if _needs_one(s)],
            opened=[s for s in running if _is_open(s)],
            suspects=suspects,
            kept=self._scheduler._budget.saved_s,
            available=self._scheduler.memory.num_available,
            turns={s.id: queue_key(s, table.waiting._used_s) for s in table.waiting},
            num_blocks={s.id: len(s.held.block_ids) for s in running},
            reading=set(self._scheduler._restores._restores),
            smaller_clients=_smaller_clients(table.running, waiting)
            | _smaller_clients(running, waiting),
            # Cancelled sequences still hold memory now, so it is unknown whether `starved` fits.
            starved=None
            if cancelled
            else self._starved(running, [s for s in waiting if s not in suspects]),
        )

    def after_plan(self, plan: StepPlan | None, before: Before, now: float) -> None:
        preempted = [s for s in before.running if s.lease is None]
        self._largest_clients_gave_way(preempted, before)
        if plan is None:
            return
        assert plan.chunks or plan.encoded or plan.loads
        for sequence_id in plan.ended:
            self._planned.pop(sequence_id, None)
            self._guessed.pop(sequence_id, None)
        named = plan.named
        assert len(set(named)) == len(named)
        is_alone = any(self._table[i] in before.suspects for i in named)
        assert not is_alone or len(named) == 1, "a suspect must run alone"
        before = self._of_one_kind(plan, before, is_alone)
        self._chunks_are_contiguous(plan, named)
        self._guesses_are_beside_nothing(plan, before)
        self._nobody_writes_what_another_reads(plan)
        self._step_is_within_its_bounds(plan, before)
        self._no_span_is_broken(plan)
        is_exclusive = self._encoders_are_bounded(plan, before)
        if is_alone or is_exclusive:
            return
        for sequence in before.decoding:
            is_free = sequence not in preempted and sequence not in before.suspects
            assert not is_free or sequence.id in named, f"sequence {sequence.id} got no token"
        self._prompts_get_on(plan, before)
        self._nobody_is_passed_by(plan, before, now)
        self._clients_take_turns(plan, before)
        if not preempted:
            self._no_client_is_starved(plan, before)
        assert not preempted or not plan.begun, (
            "a sequence started in a plan that preempted another"
        )

    def _of_one_kind(self, plan: StepPlan, before: Before, is_alone: bool) -> Before:
        """Checks that a step has background sequences or others, but never both.

        While a stream decodes, background sequences get no step. Returns `before` with only the
        sequences of the step's kind.
        """
        kinds = {self._table[sequence_id].is_background for sequence_id in plan.named}
        assert len(kinds) == 1, "background and other sequences in one step"
        is_background = kinds.pop()
        streams = [s for s in before.decoding if not s.is_background and s not in before.suspects]
        assert is_alone or not (is_background and streams), (
            "a background step ran while a stream was decoding"
        )
        return dataclasses.replace(
            before,
            running=[s for s in before.running if s.is_background == is_background],
            waiting=[s for s in before.waiting if s.is_background == is_background],
            decoding=[s for s in before.decoding if s.is_background == is_background],
            opened=[s for s in before.opened if s.is_background == is_background],
        )

    def _largest_clients_gave_way(self, preempted: list[Sequence], before: Before) -> None:
        """Checks that the newest sequences of the clients with most sequences were preempted.

        Background sequences are preempted before all others.
        """
        kept = [s for s in before.running if s.lease is not None]
        has_first = all(sequence.is_background for sequence in preempted) or kept
        assert not preempted or has_first, "the sequence with the highest precedence was preempted"
        num_kept = Counter(s.client for s in kept)
        for sequence in preempted:
            assert sequence.num_planned == sequence.num_computed == sequence.num_pending == 0
            rivals = [s for s in kept if s.client == sequence.client or s.is_background]
            assert all(sequence.rank > other.rank for other in rivals)
            if not sequence.is_background:
                assert num_kept[sequence.client] + 1 >= max(num_kept.values(), default=0)

    def _no_client_is_starved(self, plan: StepPlan, before: Before) -> None:
        """Checks that a client without a running sequence gets a slot and memory for its first one.

        If necessary, other clients lose sequences, unless they run only one each.
        """
        first = before.starved
        is_shared = not any(self._table[i].is_background for i in plan.named)
        if first is None or plan.begun or not is_shared or self._is_reading(first, before):
            return
        assert self._scheduler._planner._can_start(first), f"sequence {first.id} is starved"

    def _starved(self, running: list[Sequence], waiting: list[Sequence]) -> Sequence | None:
        """Return the first sequence of a client without any, if others must make way for it."""
        num_running = Counter(s.client for s in running)
        is_in_flight = not self._scheduler._in_flight.is_empty
        if is_in_flight or max(num_running.values(), default=0) < 2:
            return None
        heads = {s.client: s for s in sorted(waiting, key=by_key, reverse=True)}
        starved = [s for s in heads.values() if not (num_running[s.client] or s.is_background)]
        first = min(starved, key=by_key, default=None)
        return None if first is None or self._scheduler._planner._can_start(first) else first

    def _chunks_are_contiguous(self, plan: StepPlan, named: list[SequenceId]) -> None:
        """Checks that each chunk starts where the last chunk or the cached prefix ended."""
        begun = {begin.sequence_id: begin for begin in plan.begun}
        for encoded in plan.encoded:
            if encoded.sequence_id in begun:
                self._planned[encoded.sequence_id] = self._table[encoded.sequence_id].num_planned
        for load in plan.loads:
            is_new = load.sequence_id in begun
            assert is_new or load.start == self._planned[load.sequence_id], "a gap before a load"
            assert load.start < load.end < self._table[load.sequence_id].num_tokens, (
                "a load leaves no token to compute"
            )
            self._planned[load.sequence_id] = load.end
        for chunk in plan.chunks:
            sequence_id = chunk.sequence_id
            if sequence_id in begun:
                assert chunk.start <= len(begun[sequence_id].token_ids) - 1
            else:
                most = self._planned[sequence_id]
                least = most - self._guessed.pop(sequence_id, 0)
                assert least <= chunk.start <= most, "a gap between chunks"
            for named_id in chunk.draws or (sequence_id,):
                self._planned[named_id] = chunk.start + chunk.length
            if chunk.guess:
                # After wrong guesses, the recurrent state is reset to the start of the chunk.
                goes_back = chunk.slot_id != NO_SLOT
                self._guessed[sequence_id] = chunk.length if goes_back else len(chunk.guess)
        assert begun.keys() <= set(named), "a sequence started without a chunk"
        assert begun.keys() <= {s.id for s in self._table.running}

    def _guesses_are_beside_nothing(self, plan: StepPlan, before: Before) -> None:
        """Checks that speculative tokens appear only in steps of decode chunks without a prompt.

        Such tokens must stay within the sequence's length. They may only take blocks that no
        running sequence needs.
        """
        for chunk in plan.chunks:
            end = chunk.start + chunk.num_known
            assert 0 <= chunk.draft_start <= chunk.draft_end <= end
            assert chunk.draft_end <= self._scenario.limits.max_draft
            assert not chunk.is_drafted or chunk.draft_end == end, "a guess after unread tokens"
            assert not chunk.is_drafted or set(chunk.guess) == {DRAFTED}
        guessing = [chunk for chunk in plan.chunks if chunk.guess]
        if not guessing:
            return
        assert all(_is_decode(chunk, before) for chunk in plan.chunks) and not plan.encoded
        memory = self._scheduler.memory
        is_background = self._table[guessing[0].sequence_id].is_background
        num_running = sum(s.is_background == is_background for s in self._table.running)
        for chunk in guessing:
            sequence = self._table[chunk.sequence_id]
            known = memory.layout.blocks_for(chunk.start + chunk.num_known)
            needed = max(before.num_blocks[sequence.id], known)
            if len(sequence.held.block_ids) > needed:
                assert memory.num_available >= num_running, (
                    "a speculative token took a block that others need"
                )
            assert sequence.guesser is not None and sequence not in before.suspects
            assert chunk.num_known == 1 or chunk.slot_id != NO_SLOT
            assert chunk.num_rows == 1 + len(chunk.guess)
            assert chunk.draws == (sequence.id,)
            assert chunk.start + chunk.length < sequence.max_total
            assert chunk.length <= 1 + self._scenario.limits.max_guess

    def _nobody_writes_what_another_reads(self, plan: StepPlan) -> None:
        """Checks that a written block is not in the prefix index and not shared.

        Only siblings that start together may share a written block.
        """
        pool, size = self._scheduler.memory._blocks, self._scenario.layout.block_size
        if not pool.num_blocks:
            return
        written: set[int] = set()
        for load in plan.loads:
            for block_id in (i for segment in load.segments for i in segment.block_ids):
                assert block_id not in pool.index and pool._num_holders[block_id] == 1
                assert block_id not in written
                written.add(block_id)
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
        """Checks that a step stays within its limits for tokens and time.

        A step may take longer only for a stated cause.
        """
        num_decoding = sum(_is_decode(chunk, before) for chunk in plan.chunks)
        again = sum(chunk.num_known - 1 for chunk in plan.chunks if _is_decode(chunk, before))
        num_tokens = sum(chunk.length for chunk in plan.chunks) - again
        prompts = [chunk for chunk in plan.chunks if not _is_decode(chunk, before)]
        is_span = len(prompts) == 1 and self._is_a_span(prompts[0])
        assert num_tokens <= max(self._cap, 1 + num_decoding, is_span * (self._cap + num_decoding))
        step = self._scheduler._in_flight._steps[-1]
        limits, budget = self._scenario.limits, self._scheduler._budget
        target = step.stall_target if step.is_awaited else limits.max_step_s
        if step.is_awaited and target is not None and target != limits.max_stall_s:
            assert limits.is_default and limits.max_stall_s < target <= MOST_DEFAULT_S
        if target is None or not budget.model.is_measured:
            return
        if step.cause == "decode":
            decoding = StepShape()
            for chunk in plan.chunks:
                if _is_decode(chunk, before):
                    decoding.add(chunk.start, chunk.num_known, False, False)
            beside_prompts = budget._decode_seconds(budget.model.coefficients, decoding)
            alone = max(beside_prompts, budget.model.predict(decoding))
            assert step.predicted <= max(target, (1 + limits.prompt_share) * alone) * 1.000001
        elif not step.cause and (step.is_awaited or step.shape.num_prompt_tokens > 1):
            assert step.predicted <= target * 1.000001, (
                "a step is predicted to exceed its target without a cause"
            )

    def before_commit(self, seconds: float) -> None:
        """Checks that the oldest step in flight did not take much longer than its stall target.

        `seconds` is its simulated time, which the scheduler does not know when it plans. A step may
        take longer only for a stated cause, or before the cost model has been measured.
        """
        step = self._scheduler._in_flight._steps[0]
        is_excused = step.cause or step.encoded or self._scenario.faults.slow_step
        if step.is_awaited and step.stall_target is not None and step.predicted and not is_excused:
            assert seconds <= 1.15 * step.stall_target, "a step took longer than its target"

    def _is_a_span(self, chunk: Chunk) -> bool:
        spans = self._table[chunk.sequence_id].inputs.spans
        return any(s <= chunk.start and e == chunk.start + chunk.length for s, e in spans)

    def _no_span_is_broken(self, plan: StepPlan) -> None:
        """Checks that no chunk ends within a span that must be computed in one step."""
        for chunk in plan.chunks:
            end = chunk.start + chunk.length
            for span in self._table[chunk.sequence_id].inputs.spans:
                assert not span[0] < end < span[1], "a chunk ends within a span"

    def _encoders_are_bounded(self, plan: StepPlan, before: Before) -> bool:
        """Checks that a step encodes at most one input; returns whether the input is indivisible.

        A piece that cannot be divided must be alone in its step. If streams wait, two such steps
        must not follow each other.
        """
        assert len({(chunk.sequence_id, chunk.work) for chunk in plan.encoded}) <= 1
        works = [self._table[c.sequence_id].inputs.works[c.work] for c in plan.encoded]
        was_exclusive = self._was_exclusive
        self._was_exclusive = any(work.is_whole for work in works)
        if not self._was_exclusive:
            return False
        assert not plan.chunks, "a step of an indivisible encoder input has chunks"
        streams = [s for s in before.decoding if s not in before.suspects]
        assert not (was_exclusive and streams), "streams got no token in two steps in a row"
        return True

    def _prompts_get_on(self, plan: StepPlan, before: Before) -> None:
        """Checks that open prompts advance in every step, unless a reason to wait is known."""
        opened = [s for s in before.opened if s.lease is not None and s not in before.suspects]
        opened = [s for s in opened if not self._is_reading(s, before)]
        has_prompt_work = any(not _is_decode(chunk, before) for chunk in plan.chunks)
        is_coming = self._scheduler._planner._promised is not None
        is_saving = self._scheduler._budget.saved_s > before.kept
        has_prompt_work = has_prompt_work or bool(plan.encoded or plan.loads)
        assert not opened or has_prompt_work or is_saving or is_coming

    def _is_reading(self, sequence: Sequence, before: Before) -> bool:
        """Return whether a sequence reads from disk, or waits because MAX_RESTORES others read."""
        reading = self._scheduler._restores._restores.keys()
        return sequence.id in reading or len(before.reading | reading) >= MAX_RESTORES

    def _nobody_is_passed_by(self, plan: StepPlan, before: Before, now: float) -> None:
        """Checks that no overdue sequence is overtaken by a later sequence of its client."""
        begun = {begin.sequence_id for begin in plan.begun}
        dues: dict[str, float] = {}
        for sequence in before.waiting:
            if sequence.id in begun:
                dues[sequence.client] = max(sequence.due, dues.get(sequence.client, sequence.due))
        for sequence in before.waiting:
            if sequence.id in begun or sequence in before.suspects or sequence.due > now:
                continue
            latest = dues.get(sequence.client, sequence.due)
            assert latest <= sequence.due, f"sequence {sequence.id} was overtaken"

    def _clients_take_turns(self, plan: StepPlan, before: Before) -> None:
        """Checks that clients which have used less of the engine start first.

        This is only checked if the first sequence of such a client could start. Clients that run
        fewer sequences than others may start first.
        """
        begun = {begin.sequence_id for begin in plan.begun}
        waiting = [s for s in before.waiting if s not in before.suspects]
        heads = {s.client: s for s in sorted(waiting, key=by_key, reverse=True)}
        table, memory = self._table, self._scheduler.memory
        # Sequences that wait again because the leader of their family was cancelled.
        joined = [s for s in table.waiting if s not in before.waiting]
        for head in heads.values():
            if head.id in begun or not memory.has_slot or self._is_reading(head, before):
                continue
            if any(s.client == head.client and s.key < head.key for s in joined):
                continue
            if not self._scheduler._planner._fits(head, table.match(head)):
                continue
            for sequence in waiting:
                if sequence.client in before.smaller_clients:
                    continue
                passes = sequence.id in begun and sequence.client != head.client
                is_later = before.turns[sequence.id] > before.turns[head.id]
                assert not (passes and is_later), f"sequence {sequence.id} overtook {head.id}"


def _smaller_clients(running: list[Sequence], waiting: list[Sequence]) -> set[str]:
    num_running = Counter(s.client for s in running)
    most = max(num_running.values(), default=0)
    return {s.client for s in waiting if num_running[s.client] < most}


def _needs_one(sequence: Sequence) -> bool:
    if sequence.num_pending and sequence.num_known >= sequence.max_total:
        return False
    if sequence.num_guessed:
        return False
    return sequence.num_known - sequence.num_planned == 1 and not _is_open(sequence)


def _is_open(sequence: Sequence) -> bool:
    left = sequence.num_known - sequence.num_planned
    if sequence.num_guessed:
        return False
    has_works = len(sequence.inputs.works) > 0 and sequence.num_planned < sequence.num_prompt
    return left > 1 or (left == 1 and has_works)


def _is_decode(chunk: Chunk, before: Before) -> bool:
    return any(s.id == chunk.sequence_id for s in before.decoding)
