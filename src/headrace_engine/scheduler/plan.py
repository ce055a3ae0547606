"""Chooses which chunks each step processes: first the decode chunks, then prompts by due time.

`Planner.plan` tries the kinds of step in the order of `_kinds_in_order`. The shared step is for
all sequences except suspects and background sequences. A background step is planned only if no
other step has anything to process. A suspect (a sequence of a failed step) gets a separate step,
and so does an encoder input that cannot be split. Shared steps alternate with these separate
steps, so that streams do not stall for long. `_fill` gives the chosen sequences their chunks, and
`_add_prompt` advances one prompt.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from headrace_common.config.settings import SchedulerConfig
from headrace_engine.memory.memory import Match, Memory
from headrace_engine.scheduler.budget import QUARANTINE, SPAN, WHOLE, Limits, Room, TimeBudget
from headrace_engine.scheduler.guessing import Guessing, MakeGuesser
from headrace_engine.scheduler.restores import Restore, Restores
from headrace_engine.scheduler.sequence import DueEncoding, Sequence, SequenceStatus, by_key
from headrace_engine.scheduler.step import PlannedStep
from headrace_engine.scheduler.table import SequenceTable

PlanStep = Callable[[float, bool], PlannedStep | None]
# How long the watchdog allows an encoder that was never timed: 60 s, and 1 s more for every 1,000
# tokens that the step encodes.
UNMEASURED_ENCODING_S, UNMEASURED_PER_S = 60.0, 1000.0
# Background sequences may use 1/BACKGROUND_SHARE of the sequence limit and of the KV blocks.
BACKGROUND_SHARE = 4
# A new request has to wait for a running background step. So a background step may use only this
# fraction of the stall target.
BACKGROUND_PART = 0.25
# After this many waiting sequences have lacked blocks in a step, no more sequences start in the
# step.
MAX_PASSED_OVER = 16


class Planner:
    """Fills each step with chunks of the table's sequences, within the time budget.

    The planner keeps little state between steps: the number of preemptions, the sequence whose
    encoder input gets the next step alone, and whether the last step was reserved for an encoder
    input.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        limits: Limits,
        table: SequenceTable,
        memory: Memory,
        restores: Restores,
        budget: TimeBudget,
        make_guesser: MakeGuesser,
    ) -> None:
        self.num_preemptions = 0
        # Whether the last plan was empty. If so, the next plan will be empty too, unless a
        # message or a disk read arrives.
        self.is_idle = False
        self._guessing = Guessing(limits, budget, memory, make_guesser)
        self._config = config
        self._limits = limits
        self._table = table
        self._quarantine = table.quarantine
        self._memory = memory
        self._restores = restores
        self._budget = budget
        # The sequence that gets the next step alone, for an encoder input that cannot be split.
        self._promised: Sequence | None = None
        # Whether the last step was reserved for an encoder input that cannot be split.
        self._was_exclusive = False
        # The value of `num_preemptions` when the current plan started.
        self._num_preempted_before = 0

    def plan(self, now: float, can_preempt: bool) -> PlannedStep | None:
        """Return the next step, or None if nothing can be planned before a commit or a message.

        `can_preempt` is true if no step is in flight. Only in this case may sequences lose their
        memory.
        """
        self._num_preempted_before = self.num_preemptions
        while True:
            num_preemptions = self.num_preemptions
            step = self._first_step(now, can_preempt)
            # Try again: a preemption frees memory, and a dropped disk read lets another sequence
            # continue.
            has_dropped = self._restores.disk is not None and self._restores.drop_idle(now)
            is_settled = self.num_preemptions == num_preemptions and not has_dropped
            if step is not None or is_settled:
                self.is_idle = step is None and not self._has_preempted
                return step

    @property
    def _has_preempted(self) -> bool:
        """Return whether this plan preempted a sequence and therefore lets no sequence start."""
        return self.num_preemptions > self._num_preempted_before

    def _first_step(self, now: float, can_preempt: bool) -> PlannedStep | None:
        for plan_step in self._kinds_in_order():
            step = plan_step(now, can_preempt)
            if step is not None and not step.is_empty:
                self._quarantine.note_step(step.is_alone)
                self._was_exclusive = step.is_exclusive
                self._forecast(step)
                return step
        return None

    def _kinds_in_order(self) -> tuple[PlanStep, ...]:
        """Return a planning function for each kind of step, in the order of the attempts."""
        if self._promised is None and not self._quarantine.suspects:
            return self._plan_together, self._plan_background
        together, promised, alone = self._plan_together, self._plan_promised, self._plan_alone
        # Streams got no token in the last step, so the shared step is tried first.
        if self._was_exclusive:
            return together, promised, alone, self._plan_background
        if self._quarantine.is_next:
            return promised, alone, together, self._plan_background
        return promised, together, alone, self._plan_background

    def _plan_together(self, now: float, can_preempt: bool) -> PlannedStep | None:
        """Plan a step for all sequences except suspects and background sequences."""
        running, suspects = self._table.running, self._quarantine.suspects
        starved = self._table.starved(now)
        first = starved
        if starved is None and running and running[-1].is_background:
            first = next(self._table.waiting.in_order(without=self._quarantine), None)
        if first is not None and not self._make_way(first, first is starved, can_preempt):
            return None
        step = self._new_step(now)
        if suspects and self._is_blocked(self._quarantine.current(), now):
            step.refuse_starts()
        return self._plan_filled(step, can_preempt, starved)

    def _plan_background(self, now: float, can_preempt: bool) -> PlannedStep | None:
        """Plan a step for background sequences, within the limits for these sequences.

        A background step is tried last, and only if no step is in flight. So a new request waits
        for at most one background step.
        """
        if not can_preempt or self._has_preempted:
            return None
        most = max(1, self._limits.max_num_seqs // BACKGROUND_SHARE)
        for sequence in self._table.running:
            most -= sequence.is_background
        step = self._new_step(now, most, is_background=True)
        return self._plan_filled(step, can_preempt)

    def _plan_filled(
        self, step: PlannedStep, can_preempt: bool, starved: Sequence | None = None
    ) -> PlannedStep | None:
        """Fill the step with chunks; return None if a commit has to free memory first.

        A starved sequence starts first. If it cannot start, no other sequence may.
        """
        running = [s for s in self._table.running if step.is_for(s)]
        if self._quarantine.suspects:
            running = [s for s in running if s not in self._quarantine]
        waiting: Iterable[Sequence] | None = None
        if step.num_starts_left > 0 and self._table.waiting.num_waiting:
            in_order = self._table.waiting.in_order(without=self._quarantine)
            waiting = (s for s in in_order if step.is_for(s) and s is not starved)
            if starved is not None:
                waiting = chain((starved,), waiting if self._can_start(starved) else ())
        return step if self._fill(step, running, waiting, can_preempt) else None

    def _make_way(self, first: Sequence, is_starved: bool, can_preempt: bool) -> bool:
        """Preempt sequences until a waiting sequence can start.

        Background sequences always make way for others. If the waiting sequence is starved, so do
        sequences of clients that run at least two more. Return False if steps are in flight and
        have to be committed first.
        """
        while not (first.is_background or self._can_start(first)) and self._table.running:
            victim, num_running = self._table.next_to_preempt(), self._table.num_running_by_client()
            has_surplus = num_running[victim.client] >= num_running[first.client] + 2
            if not victim.is_background and not (is_starved and has_surplus):
                break
            if not can_preempt:
                return False
            self._preempt(victim)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        if sequence.is_decoding and not sequence.is_background:
            self._budget.missed["preempted"] += 1
        self._table.preempt(sequence)
        self.num_preemptions += 1

    def _can_start(self, sequence: Sequence) -> bool:
        is_below_limit = (
            len(self._table.running) < self._limits.max_num_seqs and self._memory.has_slot
        )
        return is_below_limit and self._fits(sequence, self._table.match(sequence))

    def _plan_alone(self, now: float, can_preempt: bool) -> PlannedStep | None:
        """Plan a step for one suspect alone; None if there is no suspect."""
        if not self._quarantine.suspects:
            return None
        suspect = self._quarantine.current()
        step = self._plan_one(suspect, now, can_preempt, is_alone=True)
        others = (s for s in self._table.running if s is not suspect)
        if step is not None and any(s.is_decoding for s in others):
            step.set_cause(QUARANTINE)
        return step

    def _plan_promised(self, now: float, can_preempt: bool) -> PlannedStep | None:
        """Plan the step that was promised to an encoder input that still has to be encoded."""
        sequence, self._promised = self._promised, None
        if sequence is None or sequence.outcome is not None or sequence in self._quarantine:
            return None
        context = sequence.num_planned
        if sequence.status is SequenceStatus.WAITING:
            if self._quarantine.suspects and self._is_blocked(self._quarantine.current(), now):
                return None
            if self._must_wait_for_other(sequence, now):
                return None
            context = self._table.match(sequence).num_tokens
        due = sequence.next_encoding(context)
        if due is None or not due.work.is_whole or due.work.start > context:
            return None
        return self._plan_one(sequence, now, can_preempt)

    def _must_wait_for_other(self, sequence: Sequence, now: float) -> bool:
        """Return whether an earlier waiting sequence could start now or is past its due time."""
        for other in self._table.waiting.in_order(without=self._quarantine):
            if other is sequence:
                return False
            if other.due <= now or self._fits(other, self._table.match(other)):
                return True
        return False

    def _plan_one(
        self, sequence: Sequence, now: float, can_preempt: bool, is_alone: bool = False
    ) -> PlannedStep | None:
        step = self._new_step(now, is_alone=is_alone)
        is_running = sequence.status is SequenceStatus.RUNNING
        running, waiting = ([sequence], None) if is_running else ([], (sequence,))
        return step if self._fill(step, running, waiting, can_preempt) else None

    def _new_step(
        self,
        now: float,
        most_starts: int | None = None,
        is_background: bool = False,
        is_alone: bool = False,
    ) -> PlannedStep:
        num_starts_left = self._limits.max_num_seqs - len(self._table.running)
        if most_starts is not None:
            num_starts_left = min(num_starts_left, most_starts)
        return PlannedStep(
            now, num_starts_left, self._limits.forward_per_chunk, is_background, is_alone
        )

    def _forecast(self, step: PlannedStep) -> None:
        predicted = allowed = self._budget.predict(step.shape)
        if not predicted and step.encoded:
            allowed = UNMEASURED_ENCODING_S + step.shape.num_encoded / UNMEASURED_PER_S
        step.expect(predicted, allowed)
        if step.is_awaited:
            step.set_cause(self._budget.expect_miss(step.shape, step.cause, predicted))

    def _is_blocked(self, suspect: Sequence, now: float) -> bool:
        """Return whether this suspect is past its due time and lacks memory.

        If so, no other sequence may start before the suspect.
        """
        if suspect.status is SequenceStatus.RUNNING or now < suspect.due:
            return False
        return not self._fits(suspect, self._table.match(suspect))

    def _fits(self, sequence: Sequence, match: Match) -> bool:
        """Return whether memory has room for the sequence and one spare block per running sequence.

        A background sequence must also leave three quarters of the blocks free, unless no other
        sequence runs.
        """
        num_kept = len(self._table.running)
        if num_kept and sequence.is_background:
            num_blocks = self._memory.layout.num_blocks
            num_kept += num_blocks - num_blocks // BACKGROUND_SHARE
        return self._memory.can_reserve(match, sequence.num_tokens, num_kept)

    def _fill(
        self,
        step: PlannedStep,
        running: list[Sequence],
        waiting: Iterable[Sequence] | None,
        can_preempt: bool,
    ) -> bool:
        """Give these sequences their chunks; return False if a commit has to free memory first.

        In every step, every decoding sequence advances by one token, so that streams do not
        stall. So decode chunks come first, and prompts share the remaining time.
        """
        # 1. Give another block to each decoder whose last block is full. If too few blocks are
        #    available, some sequences lose their memory, and no sequence starts in this step.
        decoders, opened, growing = self._split(running)
        if growing and not self._make_room(growing, can_preempt):
            return False
        if self._has_preempted:
            step.refuse_starts()
            decoders, opened, _ = self._split(running)

        # 2. Add the decode chunks.
        if decoders:
            self._table.report_starts(decoders)
            step.add_decode_chunks(decoders)
            if self._memory.layout.num_snapshots:
                self._save(step, decoders)

        # 3. Add prompts, within the seconds that the decode chunks leave. A background step is also
        # short, because a new stream would have to wait for the end of the step.
        is_awaited = step.is_background or bool(decoders) or self._has_streams(step)
        part = BACKGROUND_PART if step.is_background else 1.0
        # An empty background step may not save its room, or background steps might stay empty for
        # ever.
        can_save = not (step.is_background and step.is_empty)
        context = min(opened, key=by_key).num_planned if opened else 0
        room = self._budget.open(step.shape, is_awaited, context, part, can_save)
        step.open(room.seconds, is_awaited, self._budget.stall_s)
        if opened or waiting is not None:
            self._add_prompts(step, room, opened, waiting or ())

        # 4. Add guesses of the decoders' next tokens to a step without prompts.
        if self._limits.max_guess and decoders:
            self._guessing.add_to(step, decoders, sum(map(step.is_for, self._table.running)))
        return True

    def _split(
        self, running: list[Sequence]
    ) -> tuple[list[Sequence], list[Sequence], list[Sequence]]:
        """Return three lists: sequences that decode, that have open prompts, and that need a block.

        The third list is a subset of the first. A sequence whose last token is already being
        drawn is in no list.
        """
        layout = self._memory.layout
        decoders: list[Sequence] = []
        opened: list[Sequence] = []
        growing: list[Sequence] = []
        for sequence in running:
            remaining, lease = sequence.remaining, sequence.lease
            if not remaining or sequence.outcome is not None or lease is None:
                continue
            if remaining > 1 or (sequence.inputs.works and sequence.has_open_inputs):
                opened.append(sequence)
                continue
            decoders.append(sequence)
            num_held = len(lease.block_ids) * layout.block_size
            if layout.num_blocks and num_held < sequence.num_planned + 1:
                growing.append(sequence)
        return decoders, opened, growing

    def _make_room(self, growing: list[Sequence], can_preempt: bool) -> bool:
        """Give each of these sequences a block; preempt sequences if blocks are missing.

        Return False if blocks are missing and preemption is not allowed.
        """
        memory = self._memory
        while len(growing) > memory.num_available:
            if not can_preempt:
                return False
            victim = self._table.next_to_preempt()
            self._preempt(victim)
            growing = [s for s in growing if s is not victim]
        for sequence in growing:
            memory.grow(sequence.held)
        return True

    def _save(self, step: PlannedStep, sequences: list[Sequence]) -> None:
        """Save the recurrent state of each sequence whose chunk ends where a snapshot is due."""
        if not self._memory.layout.num_snapshots:
            return
        for sequence in sequences:
            copy = self._memory.save(sequence.held, sequence.num_planned, sequence.num_prompt)
            if copy is not None:
                step.save(sequence, copy)

    def _has_streams(self, step: PlannedStep) -> bool:
        """Return whether any sequence of the step's kind (background or not) is decoding."""
        return any(s.is_decoding for s in self._table.running if step.is_for(s))

    def _add_prompts(
        self, step: PlannedStep, room: Room, opened: list[Sequence], waiting: Iterable[Sequence]
    ) -> None:
        if len(opened) >= self._config.max_open_prompts:
            step.start_only_before(min(s.due for s in opened))
        for sequence in _in_queue_order(step, opened, waiting):
            goes_on = self._add_prompt(step, room, sequence)
            # Even without room, the first prompt that can advance gets a token.
            if not goes_on or (step.has_prompt_work and not room.is_open):
                break
        step.set_cause(room.cause if step.has_prompt_work else "")

    def _add_prompt(self, step: PlannedStep, room: Room, sequence: Sequence) -> bool:
        """Advance one prompt; return False if the step takes no further prompt.

        The first possible kind of work is chosen: load blocks that were read from disk, encode a
        piece of an input, or process a chunk of tokens. A waiting sequence leases memory only if
        the step has work for the sequence.
        """
        match, context = None, sequence.num_planned
        if sequence.status is SequenceStatus.WAITING:
            match = self._table.match(sequence)
            if not self._may_start(step, sequence, match):
                return True
            context = match.num_tokens
        if (restore := self._restores.at(sequence, context, step.planned_at)) is not None:
            return self._add_load(step, room, restore, match)
        due = sequence.next_encoding(context)
        if due is not None and due.work.start <= context:
            return self._add_encoding(step, room, sequence, due, match)
        wanted = self._wanted(sequence, context)
        length = self._length(step, room, sequence, context, wanted)
        if not length:
            return False
        if match is not None:
            step.begin(sequence, self._table.start(sequence, match))
        self._table.report_starts([sequence])
        room.spend(context, length)
        step.add_prompt_chunk(sequence, length, self._start_siblings(step, sequence, length))
        if self._limits.max_draft and sequence.sampling.pooling is None:
            step.read_prompt_by_draft(self._limits.max_draft)
        self._save(step, [sequence])
        return length == wanted

    def _add_load(
        self, step: PlannedStep, room: Room, restore: Restore, match: Match | None
    ) -> bool:
        """Load the prompt's blocks that have been read from disk.

        Always return True: other prompts may follow in this step, even while a read is pending.
        """
        sequence = restore.sequence
        target_s = self._budget.stall_s if step.is_awaited else None
        reads = self._restores.take(restore, step.planned_at, target_s)
        if not reads:
            if match is not None and step.planned_at >= sequence.due:
                # The sequence is past its due time. No other sequence may take the memory
                # while this sequence waits for the disk.
                step.refuse_starts()
            return True
        if match is not None:
            step.begin(sequence, self._table.start(sequence, match))
        size = self._memory.layout.block_size
        step.load(sequence, reads[-1].end, [read.loaded(sequence, size) for read in reads])
        self._save(step, [sequence])
        room.spend_seconds(self._restores.seconds_to_copy(sum(read.num_bytes for read in reads)))
        return True

    def _add_encoding(
        self,
        step: PlannedStep,
        room: Room,
        sequence: Sequence,
        due: DueEncoding,
        match: Match | None,
    ) -> bool:
        """Encode units (pieces of an input) that the prompt's next tokens need.

        Return False if no other prompt may follow in this step. An input that cannot be split is
        encoded in an otherwise empty step. If this step is not empty, the next step is promised
        to the input. Of the inputs that can be split, a step encodes a piece of only one input.
        """
        work, is_first = due.work, not step.has_prompt_work
        if not step.is_empty if work.is_whole else step.encoded:
            if work.is_whole and is_first and self._promised is None:
                self._promised = sequence
            if match is not None:
                # No later sequence may start before this sequence.
                step.refuse_starts()
            return True
        if work.is_whole:
            pieces = list(work.pieces(due.start, work.num_units))
            room.set_cause(WHOLE if step.is_awaited else "")
        else:
            pieces = list(room.largest_pieces(work, due.start, is_first))
        if not pieces:
            return False
        if match is not None:
            step.begin(sequence, self._table.start(sequence, match))
        self._table.report_starts([sequence])
        for piece in pieces:
            step.add_encode_chunk(sequence, due.number, piece)
        return not step.is_exclusive

    def _length(
        self, step: PlannedStep, room: Room, sequence: Sequence, context: int, wanted: int
    ) -> int:
        """Return how many of the wanted tokens the room allows; 0 if no token fits.

        A chunk never ends inside an unbreakable span, such as the tokens of an image. A span that
        does not fit into the room is processed whole, as the first prompt chunk of a step.
        """
        is_first = not step.has_prompt_work
        span = sequence.span_around(context + 0.5)
        if span is not None and not room.fits(context, span[1] - context):
            if not is_first:
                return 0
            room.set_cause(SPAN)
            self._budget.drop_savings()
            return span[1] - context
        length = room.largest_chunk(context, wanted, is_first)
        cut = sequence.span_around(context + length) if length else None
        if cut is not None:
            length = (cut[0] if cut[0] > context else cut[1]) - context
        return length

    def _may_start(self, step: PlannedStep, sequence: Sequence, match: Match) -> bool:
        """Return whether a waiting sequence may start in this step.

        The planner calls this method in queue order. Some refusals also keep all later sequences
        from starting in the step.
        """
        is_too_late = step.due_before is not None and sequence.due >= step.due_before
        if is_too_late or not self._memory.has_slot:
            step.refuse_starts()
            return False
        if self._fits(sequence, match):
            return True
        step.pass_over()
        if step.planned_at >= sequence.due or step.num_passed_over == MAX_PASSED_OVER:
            step.refuse_starts()
        return False

    def _wanted(self, sequence: Sequence, context: int) -> int:
        """Return how many tokens the next chunk may have.

        The chunk ends at the end of the prompt, or earlier, at a token where a snapshot or an
        encoder input is due.
        """
        stops = [sequence.num_known]
        if context < sequence.num_reported and sequence.wants_prompt_logprobs:
            # Log probabilities up to token `num_reported` were sent before a preemption, so the
            # chunk ends at this token.
            stops.append(sequence.num_reported)
        if (due := sequence.next_encoding(context)) is not None:
            stops.append(due.work.start)
        stop = self._memory.snapshot_stop(context, sequence.num_prompt)
        return min(stops if stop is None else [*stops, stop]) - context

    def _start_siblings(self, step: PlannedStep, leader: Sequence, length: int) -> list[Sequence]:
        """Start the leader's siblings (choices of the same prompt) if this chunk ends the prompt.

        Return the siblings that fit; siblings that do not fit start later.
        """
        family = leader.family
        is_final = leader.num_planned + length == leader.num_prompt == leader.num_tokens
        if family is None or family.leader is not leader or not is_final:
            return []
        if leader in self._quarantine or leader.num_tokens == leader.max_total:
            return []
        started = []
        for sibling in [s for s in family.waiting if s.num_tokens == leader.num_tokens]:
            num_running = len(self._table.running)
            if step.num_starts_left <= 0 or not self._memory.can_fork(
                leader.num_tokens, num_running
            ):
                break
            copies = self._table.start_sibling(sibling, family)
            step.begin(sibling)
            step.copy(*copies)
            started.append(sibling)
        return started


def _in_queue_order(
    step: PlannedStep, opened: list[Sequence], waiting: Iterable[Sequence]
) -> Iterator[Sequence]:
    """Yield open prompts (incomplete prompts of running sequences) and waiting sequences.

    The order is that of the queue. Once no further sequence may start in the step, yield only the
    open prompts.
    """
    left = sorted(opened, key=by_key, reverse=True)
    for sequence in waiting:
        while left and left[-1].key < sequence.key:
            yield left.pop()
        if step.num_starts_left <= 0:
            break
        yield sequence
    yield from reversed(left)
