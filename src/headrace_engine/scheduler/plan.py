"""Chooses the chunks of one step: decode chunks first, then prompts in key order."""

from collections.abc import Callable, Iterable, Iterator

from headrace_common.config.settings import SchedulerConfig
from headrace_engine.memory.memory import Match, Memory
from headrace_engine.scheduler.budget import QUARANTINE, SPAN, WHOLE, Limits, Room, TimeBudget
from headrace_engine.scheduler.guessing import Guessing, MakeGuesser
from headrace_engine.scheduler.restores import Restore, Restores
from headrace_engine.scheduler.sequence import DueWork, Sequence, SequenceStatus, by_key
from headrace_engine.scheduler.step import PlannedStep
from headrace_engine.scheduler.table import SequenceTable

PlanStep = Callable[[float, bool], PlannedStep | None]
UNMEASURED_ENCODING_S, UNMEASURED_PER_S = 60.0, 1000.0  # what an unknown encoder may well take
BACKGROUND_SHARE = 4  # the background holds one part in so many of places and of memory
BACKGROUND_PART = 0.25  # of the stall target, that one of its steps takes: who comes waits for it
MAX_PASSED_OVER = 16  # once this many waiting sequences lacked blocks, no other starts


class Planner:
    """Fills steps from the table within the budget.

    From step to step it keeps a count, and whom it promised a step to itself.
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
        self.is_resting = False  # the last plan had nothing to do, nor has the next
        self._guessing = Guessing(limits, budget, memory, make_guesser)
        self._config = config
        self._limits = limits
        self._table = table
        self._quarantine = table.quarantine
        self._memory = memory
        self._restores = restores
        self._budget = budget
        self._declared: Sequence | None = None  # has the next step to itself
        self._was_exclusive = False  # whether the step before was one of those
        self._num_preempted_before = 0  # this plan

    def plan(self, now: float, can_preempt: bool) -> PlannedStep | None:
        """The next step; None if there is nothing to do, or a commit has to come first.

        `can_preempt`: nothing is in flight, so sequences may lose their memory.
        """
        self._num_preempted_before = self.num_preemptions
        while True:
            num_preemptions = self.num_preemptions
            step = self._first_step(now, can_preempt)
            # who waited for memory, the streams or a read may go on once one has lost its own
            has_dropped = self._restores.disk is not None and self._restores.drop_idle(now)
            is_settled = self.num_preemptions == num_preemptions and not has_dropped
            if step is not None or is_settled:
                self.is_resting = step is None and not self._has_preempted
                return step

    @property
    def _has_preempted(self) -> bool:
        """Whether a sequence lost its memory in this plan: nobody may take its place in it."""
        return self.num_preemptions > self._num_preempted_before

    def _first_step(self, now: float, can_preempt: bool) -> PlannedStep | None:
        for plan_step in self._kinds_in_turn():
            step = plan_step(now, can_preempt)
            if step is not None and not step.is_empty:
                self._quarantine.took_turn(step.is_alone)
                self._was_exclusive = step.is_exclusive
                self._forecast(step)
                return step
        return None

    def _kinds_in_turn(self) -> tuple[PlanStep, ...]:
        """The kinds of steps, in the order in which they are tried."""
        if self._declared is None and not self._quarantine.suspects:
            return self._plan_together, self._plan_background
        together, declared, alone = self._plan_together, self._plan_declared, self._plan_alone
        if self._was_exclusive:  # streams sat it out: now they go first
            return together, declared, alone, self._plan_background
        if self._quarantine.is_turn:
            return declared, alone, together, self._plan_background
        return declared, together, alone, self._plan_background

    def _plan_together(self, now: float, can_preempt: bool) -> PlannedStep | None:
        """A step of everyone but the suspects and the background."""
        running, suspects = self._table.running, self._quarantine.suspects
        if running and running[-1].is_background and not self._give_way(can_preempt):
            return None
        step = self._new_step(now)
        if suspects and self._is_blocked(self._quarantine.current(), now):
            step.refuse_starts()
        return self._plan_share(step, can_preempt)

    def _plan_background(self, now: float, can_preempt: bool) -> PlannedStep | None:
        """A step of the background, where nobody else has one; it holds a share of all.

        Nothing is planned ahead of it, so that who comes waits for one such step at most.
        """
        if not can_preempt or self._has_preempted:
            return None
        most = max(1, self._limits.max_num_seqs // BACKGROUND_SHARE)
        for sequence in self._table.running:
            most -= sequence.is_background
        step = self._new_step(now, most, is_background=True)
        return self._plan_share(step, can_preempt)

    def _plan_share(self, step: PlannedStep, can_preempt: bool) -> PlannedStep | None:
        """The step, filled with those it is for."""
        running = [s for s in self._table.running if step.is_for(s)]
        if self._quarantine.suspects:
            running = [s for s in running if s not in self._quarantine]
        waiting: Iterable[Sequence] | None = None
        if step.seats > 0 and self._table.waiting.num_waiting:
            in_turn = self._table.waiting.in_turn(without=self._quarantine)
            waiting = (s for s in in_turn if step.is_for(s))
        return step if self._fill(step, running, waiting, can_preempt) else None

    def _give_way(self, can_preempt: bool) -> bool:
        """Takes from the background what the next one needs to start; False: a commit comes first.

        In its turn all others come before the background, and in its rank, too.
        """
        running = self._table.running
        while running and running[-1].is_background:
            waiting = self._table.waiting.in_turn(without=self._quarantine)
            first = next(waiting, None)
            if first is None or first.is_background or self._has_place(first):
                return True
            if not can_preempt:
                return False
            self._table.preempt(running[-1])
            self.num_preemptions += 1
        return True

    def _has_place(self, sequence: Sequence) -> bool:
        has_seat = len(self._table.running) < self._limits.max_num_seqs and self._memory.has_slot
        return has_seat and self._fits(sequence, self._table.match(sequence))

    def _plan_alone(self, now: float, can_preempt: bool) -> PlannedStep | None:
        """A step of the suspect under trial, if there is one."""
        if not self._quarantine.suspects:
            return None
        suspect = self._quarantine.current()
        step = self._plan_one(suspect, now, can_preempt, is_alone=True)
        others = (s for s in self._table.running if s is not suspect)
        if step is not None and any(s.is_decoding for s in others):
            step.blame(QUARANTINE)
        return step

    def _plan_declared(self, now: float, can_preempt: bool) -> PlannedStep | None:
        """The step that was promised to an encoder that cannot be cut, if it still wants it."""
        sequence, self._declared = self._declared, None
        if sequence is None or sequence.outcome is not None or sequence in self._quarantine:
            return None
        context = sequence.num_planned
        if sequence.status is SequenceStatus.WAITING:
            if self._quarantine.suspects and self._is_blocked(self._quarantine.current(), now):
                return None
            if self._has_others_first(sequence, now):
                return None
            context = self._table.match(sequence).num_tokens
        due = sequence.next_work(context)
        if due is None or not due.work.is_whole or due.work.start > context:
            return None
        return self._plan_one(sequence, now, can_preempt)

    def _has_others_first(self, sequence: Sequence, now: float) -> bool:
        """Whether one that waits before it could start, or has waited long enough."""
        for other in self._table.waiting.in_turn(without=self._quarantine):
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
        seats = self._limits.max_num_seqs - len(self._table.running)
        if most_starts is not None:
            seats = min(seats, most_starts)
        return PlannedStep(now, seats, self._limits.forward_per_chunk, is_background, is_alone)

    def _forecast(self, step: PlannedStep) -> None:
        predicted = allowed = self._budget.predict(step.shape)
        if not predicted and step.encoded:
            allowed = UNMEASURED_ENCODING_S + step.shape.num_encoded / UNMEASURED_PER_S
        step.expect(predicted, allowed)
        if step.is_awaited:
            step.blame(self._budget.expect_miss(step.shape, step.cause, predicted))

    def _is_blocked(self, suspect: Sequence, now: float) -> bool:
        """Whether a suspect past its due lacks memory, so that nobody may start before it."""
        if suspect.status is SequenceStatus.RUNNING or now < suspect.due:
            return False
        return not self._fits(suspect, self._table.match(suspect))

    def _fits(self, sequence: Sequence, match: Match) -> bool:
        """Whether there is memory for its tokens so far, and a block for each that runs.

        What runs in the background leaves most of it free, unless it is the only one.
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
        """Give these sequences their chunks; False if a commit has to free memory first.

        Streams do not stall because every decoding sequence advances by one token in every step.
        So decode chunks come first, and prompts share the time that is left.
        """
        # 1. Give each decoder whose last block is full another block. If there are too few, the
        #    newest sequences lose their memory, and no sequence may start in this step.
        decoders, opened, growing = self._split(running)
        if growing and not self._make_room(growing, can_preempt):
            return False
        if self._has_preempted:
            step.refuse_starts()
            decoders, opened, _ = self._split(running)

        # 2. The decode chunks.
        if decoders:
            self._table.tell_starts(decoders)
            step.add_decode_chunks(decoders)
            if self._memory.layout.num_snapshots:
                self._save(step, decoders)

        # 3. The prompts, within the seconds that the decode chunks leave. A background step is
        #    short, too: a stream may arrive at any time and then has to wait for its end.
        is_awaited = step.is_background or bool(decoders) or self._has_streams(step)
        part = BACKGROUND_PART if step.is_background else 1.0
        can_save = not (step.is_background and step.is_empty)  # else the step might stay empty
        room = self._budget.open(step.shape, is_awaited, part, can_save)
        step.open(room.seconds, is_awaited)
        if opened or waiting is not None:
            self._add_prompts(step, room, opened, waiting or ())

        # 4. Guesses of the decoders' next tokens, in a step without prompts.
        if self._limits.max_guess and decoders:
            self._guessing.add_to(step, decoders, sum(map(step.is_for, self._table.running)))
        return True

    def _split(
        self, running: list[Sequence]
    ) -> tuple[list[Sequence], list[Sequence], list[Sequence]]:
        """Return the sequences that decode, those with open prompts, and decoders without room.

        The last are those of the first that need another block. A sequence whose last token is
        being drawn is in none of the lists.
        """
        layout = self._memory.layout
        decoders: list[Sequence] = []
        opened: list[Sequence] = []
        growing: list[Sequence] = []
        for sequence in running:
            remaining, lease = sequence.remaining, sequence.lease
            if not remaining or sequence.outcome is not None or lease is None:
                continue
            if remaining > 1 or (sequence.inputs.works and sequence.is_taking_in):
                opened.append(sequence)
                continue
            decoders.append(sequence)
            num_held = len(lease.block_ids) * layout.block_size
            if layout.num_blocks and num_held < sequence.num_planned + 1:
                growing.append(sequence)
        return decoders, opened, growing

    def _make_room(self, growing: list[Sequence], can_preempt: bool) -> bool:
        """Give each of them a block, preempting the newest until there are enough."""
        memory = self._memory
        while len(growing) > memory.num_available:
            if not can_preempt:
                return False
            newest = self._table.running[-1]
            if newest.is_decoding:
                self._budget.missed["preempted"] += 1
            self._table.preempt(newest)
            self.num_preemptions += 1
            growing = [s for s in growing if s is not newest]
        for sequence in growing:
            memory.grow(sequence.held)
        return True

    def _save(self, step: PlannedStep, sequences: list[Sequence]) -> None:
        """Keep the states after their chunks, of those that end where states are kept."""
        if not self._memory.layout.num_snapshots:
            return
        for sequence in sequences:
            copy = self._memory.save(sequence.held, sequence.num_planned, sequence.num_prompt)
            if copy is not None:
                step.save(sequence, copy)

    def _has_streams(self, step: PlannedStep) -> bool:
        """Whether a sequence that the step is for decodes."""
        return any(s.is_decoding for s in self._table.running if step.is_for(s))

    def _add_prompts(
        self, step: PlannedStep, room: Room, opened: list[Sequence], waiting: Iterable[Sequence]
    ) -> None:
        if len(opened) >= self._config.max_open_prompts:
            step.start_only_before(min(s.due for s in opened))
        for sequence in _in_turn(step, opened, waiting):
            goes_on = self._add_prompt(step, room, sequence)
            if not (goes_on and room.is_open):
                break
        step.blame(room.cause if step.has_prompt_work else "")

    def _add_prompt(self, step: PlannedStep, room: Room, sequence: Sequence) -> bool:
        """Give a prompt its share; False if the room cut it, and nothing may follow."""
        match, context = None, sequence.num_planned
        if sequence.status is SequenceStatus.WAITING:
            match = self._table.match(sequence)
            if not self._may_start(step, sequence, match):
                return True
            context = match.num_tokens
        if (restore := self._restores.at(sequence, context, step.planned_at)) is not None:
            return self._add_load(step, room, restore, match)
        due = sequence.next_work(context)
        if due is not None and due.work.start <= context:
            return self._add_piece(step, room, sequence, due, match)
        wanted = self._wanted(sequence, context)
        length = self._length(step, room, sequence, context, wanted)
        if not length:
            return False
        if match is not None:
            step.begin(sequence, self._table.start(sequence, match))
        self._table.tell_starts([sequence])
        room.spend(context, length)
        step.add_prompt_chunk(sequence, length, self._start_siblings(step, sequence, length))
        self._save(step, [sequence])
        return length == wanted

    def _add_load(
        self, step: PlannedStep, room: Room, restore: Restore, match: Match | None
    ) -> bool:
        """Load what was read of a prompt; True: others may follow, now or while it is read."""
        sequence = restore.sequence
        target_s = self._limits.max_stall_s if step.is_awaited else None
        reads = self._restores.take(restore, step.planned_at, target_s)
        if not reads:
            if match is not None and step.planned_at >= sequence.due:
                step.refuse_starts()  # nobody may take its place meanwhile
            return True
        if match is not None:
            step.begin(sequence, self._table.start(sequence, match))
        size = self._memory.layout.block_size
        step.load(sequence, reads[-1].end, [read.loaded(sequence, size) for read in reads])
        self._save(step, [sequence])
        room.spend_seconds(self._restores.seconds_to_copy(sum(read.num_bytes for read in reads)))
        return True

    def _add_piece(
        self, step: PlannedStep, room: Room, sequence: Sequence, due: DueWork, match: Match | None
    ) -> bool:
        """Encode what the next tokens need; one that cannot be cut takes an empty step, or waits.

        False if nothing may follow it in this step.
        """
        work, is_first = due.work, not step.has_prompt_work
        if not step.is_empty if work.is_whole else step.encoded:
            if work.is_whole and is_first and self._declared is None:
                self._declared = sequence
            if match is not None:
                step.refuse_starts()  # nobody starts before it
            return True
        if work.is_whole:
            num_units = work.num_units
            room.cause = WHOLE if step.is_awaited else ""
        else:
            num_units = room.largest_piece(work.size, work.num_units - due.start, is_first)
        if not num_units:
            return False
        if match is not None:
            step.begin(sequence, self._table.start(sequence, match))
        self._table.tell_starts([sequence])
        room.spend_seconds(self._budget.seconds_of_units(work.size, num_units))
        step.add_encode_chunk(sequence, due.number, due.start, num_units)
        return not step.is_exclusive

    def _length(
        self, step: PlannedStep, room: Room, sequence: Sequence, context: int, wanted: int
    ) -> int:
        """The length that the room allows; no span is cut, and one that never fits goes whole."""
        is_first = not step.has_prompt_work
        span = sequence.span_around(context + 0.5)
        if span is not None and not room.fits(context, span[1] - context):
            if not is_first:
                return 0
            room.cause, self._budget.kept = SPAN, 0.0
            return span[1] - context
        length = room.largest_chunk(context, wanted, is_first)
        cut = sequence.span_around(context + length) if length else None
        if cut is not None:
            length = (cut[0] if cut[0] > context else cut[1]) - context
        return length

    def _may_start(self, step: PlannedStep, sequence: Sequence, match: Match) -> bool:
        """Asked in key order: a refusal may close the step to everyone behind."""
        is_too_late = step.first_due is not None and sequence.due >= step.first_due
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
        """The rest of the prompt, or as far as one chunk may go."""
        stops = [sequence.num_known]
        if context < sequence.num_reported and sequence.wants_prompt_rows:
            stops.append(sequence.num_reported)  # the rows before it were sent
        if (due := sequence.next_work(context)) is not None:
            stops.append(due.work.start)
        stop = self._memory.snapshot_stop(context, sequence.num_prompt)
        return min(stops if stop is None else [*stops, stop]) - context

    def _start_siblings(self, step: PlannedStep, leader: Sequence, length: int) -> list[Sequence]:
        """Start as many siblings as have room, if this chunk ends their common prompt."""
        family = leader.family
        is_final = leader.num_planned + length == leader.num_prompt == leader.num_tokens
        if family is None or family.leader is not leader or not is_final:
            return []
        if leader in self._quarantine or leader.num_tokens == leader.max_total:
            return []
        started = []
        for sibling in [s for s in family.waiting if s.num_tokens == leader.num_tokens]:
            num_running = len(self._table.running)
            if step.seats <= 0 or not self._memory.can_fork(leader.num_tokens, num_running):
                break
            copies = self._table.start_beside(sibling, family)
            step.begin(sibling)
            step.copy(*copies)
            started.append(sibling)
        return started


def _in_turn(
    step: PlannedStep, opened: list[Sequence], waiting: Iterable[Sequence]
) -> Iterator[Sequence]:
    """Waiting sequences in turn, open prompts by key among them; without seats, only the open."""
    left = sorted(opened, key=by_key, reverse=True)
    for sequence in waiting:
        while left and left[-1].key < sequence.key:
            yield left.pop()
        if step.seats <= 0:
            break
        yield sequence
    yield from reversed(left)
