"""Chooses the chunks of one step: decode chunks first, then prompts in key order."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from headrace.core.config import SchedulerConfig
from headrace.core.ids import SequenceId, SlotId
from headrace.core.plan import Begin, BlockCopy, Chunk, SlotCopy, StepPlan
from headrace.memory.memory import Match, Memory
from headrace.scheduler.budget import QUARANTINE, Limits, Room, TimeBudget
from headrace.scheduler.cost import StepShape
from headrace.scheduler.sequence import Sequence, SequenceStatus, by_key
from headrace.scheduler.table import Quarantine, SequenceTable

MAX_PASSED_OVER = 16  # once this many waiting sequences lacked blocks, no other starts


@dataclass(slots=True)
class PlannedStep:
    """A step from its first chunk to its commit; each sequence has at most one chunk in it."""

    planned_at: float
    seats: int  # sequences that may still start in it
    forward_per_chunk: bool
    first_due: float | None = None  # only sequences due before it may start
    num_passed_over: int = 0  # waiting sequences that lacked blocks
    is_alone: bool = False  # whether a suspect has it to itself
    is_awaited: bool = False  # whether a stream waits for it
    room: float | None = None  # seconds for prompt chunks; None: no target, or none measured
    predicted: float = 0.0  # seconds in the runner; 0 while unmeasured
    cause: str = ""  # why it is expected to miss its target
    num_decoding: int = 0
    shape: StepShape = field(default_factory=StepShape)
    saves: list[tuple[Sequence, SlotId, int]] = field(default_factory=list)  # slot, end
    plan: StepPlan = field(init=False)  # from its launch
    chunks: list[Chunk] = field(default_factory=list)
    _begun: list[Begin] = field(default_factory=list)
    _restores: list[SlotCopy] = field(default_factory=list)
    _block_copies: list[BlockCopy] = field(default_factory=list)
    _slot_copies: list[SlotCopy] = field(default_factory=list)

    @property
    def has_prompt_work(self) -> bool:
        return self.shape.num_prompt_tokens > 0

    def begin(self, sequence: Sequence, restore: SlotCopy | None = None) -> None:
        """Introduce a sequence that starts in this step."""
        self.seats -= 1
        token_ids, sampling = sequence.token_ids[:], sequence.sampling
        self._begun.append(
            Begin(sequence.id, token_ids, sequence.num_prompt, sequence.choice, sampling)
        )
        if restore is not None:
            self._restores.append(restore)

    def copy(self, block_copy: BlockCopy | None, slot_copy: SlotCopy | None) -> None:
        """Copy a leader's memory to its sibling's after the forward."""
        if block_copy is not None:
            self._block_copies.append(block_copy)
        if slot_copy is not None:
            self._slot_copies.append(slot_copy)

    def save(self, sequence: Sequence, copy: SlotCopy) -> None:
        """Keep the sequence's state after its chunk."""
        self._slot_copies.append(copy)
        self.saves.append((sequence, copy.target, sequence.num_planned))

    def add_decode_chunk(self, sequence: Sequence) -> None:
        self.num_decoding += 1
        self._add(sequence, 1, [sequence])
        self.shape.add(sequence.num_planned - 1, 1, False, self.forward_per_chunk)

    def add_prompt_chunk(self, sequence: Sequence, length: int, siblings: list[Sequence]) -> None:
        """Advance a prompt; `siblings` draw from its last row too."""
        context = sequence.num_planned
        self._add(sequence, length, [sequence, *siblings])
        self.shape.add(context, length, True, self.forward_per_chunk)

    def _add(self, sequence: Sequence, length: int, drawing: list[Sequence]) -> None:
        """The chunk that ends at the last known token draws, if there is anything to draw."""
        start, lease = sequence.num_planned, sequence.held
        end = start + length
        draws = end == sequence.num_known and end < sequence.max_total
        num_rows = int(draws)
        if sequence.num_reported <= start < sequence.num_prompt - 1 and sequence.wants_prompt_rows:
            num_rows = length
        for named in drawing if draws else (sequence,):
            named.advance(end, draws)
        ids = tuple([drawn.id for drawn in drawing]) if draws else ()
        self.chunks.append(
            Chunk(sequence.id, start, length, num_rows, ids, lease.block_ids, lease.slot_id)
        )

    def launch(self, ended: tuple[SequenceId, ...]) -> StepPlan:
        """What the runner is to do; it may forget the sequences in `ended` first."""
        self.plan = StepPlan(
            begun=tuple(self._begun),
            chunks=tuple(self.chunks),
            ended=ended,
            block_copies=tuple(self._block_copies),
            slot_copies=tuple(self._slot_copies),
            restores=tuple(self._restores),
        )
        return self.plan


class Planner:
    """Fills steps from the table within the budget; keeps nothing from step to step."""

    def __init__(
        self,
        config: SchedulerConfig,
        limits: Limits,
        table: SequenceTable,
        quarantine: Quarantine,
        memory: Memory,
        budget: TimeBudget,
    ) -> None:
        self._config = config
        self._limits = limits
        self._table = table
        self._quarantine = quarantine
        self._memory = memory
        self._budget = budget

    def plan(self, now: float, can_preempt: bool) -> PlannedStep | None:
        """The next step; None if there is nothing to do, or a commit has to come first.

        `can_preempt`: nothing is in flight, so sequences may lose their memory.
        """
        ways = [self._plan_together, self._plan_alone]
        if self._quarantine.is_turn:
            ways.reverse()
        for plan_step in ways:
            step = plan_step(now, can_preempt)
            if step is not None and step.chunks:
                self._quarantine.took_turn(step.is_alone)
                self._forecast(step)
                return step
        return None

    def _plan_together(self, now: float, can_preempt: bool) -> PlannedStep | None:
        """A step of everyone but the suspects."""
        step = self._new_step(now)
        running, waiting = self._table.running[:], self._table.waiting[:]
        if self._quarantine:
            running = [s for s in running if s not in self._quarantine]
            waiting = [s for s in waiting if s not in self._quarantine]
            if self._is_blocked(self._quarantine.current(), now):
                step.seats = 0
        return step if self._fill(step, running, waiting, can_preempt) else None

    def _plan_alone(self, now: float, can_preempt: bool) -> PlannedStep | None:
        """A step of the suspect under trial, if there is one."""
        if not self._quarantine:
            return None
        step, suspect = self._new_step(now), self._quarantine.current()
        step.is_alone = True
        is_running = suspect.status is SequenceStatus.RUNNING
        running, waiting = ([suspect], []) if is_running else ([], [suspect])
        if not self._fill(step, running, waiting, can_preempt):
            return None
        if any(s.is_decoding for s in self._table.running if s is not suspect):
            step.cause = QUARANTINE
        return step

    def _new_step(self, now: float) -> PlannedStep:
        seats = self._limits.max_num_seqs - len(self._table.running)
        return PlannedStep(now, seats, self._limits.forward_per_chunk)

    def _forecast(self, step: PlannedStep) -> None:
        step.predicted = self._budget.predict(step.shape)
        if step.is_awaited:
            step.cause = self._budget.expect_miss(step.shape, step.cause)

    def _is_blocked(self, suspect: Sequence, now: float) -> bool:
        """Whether a suspect past its due lacks memory, so that nobody may start before it."""
        if suspect.status is SequenceStatus.RUNNING or now < suspect.due:
            return False
        return not self._fits(suspect, self._table.match(suspect))

    def _fits(self, sequence: Sequence, match: Match) -> bool:
        """Whether there is memory for its tokens so far, and a block for each that runs."""
        num_running = len(self._table.running)
        return self._memory.can_reserve(match, sequence.num_tokens, num_running)

    def _fill(
        self,
        step: PlannedStep,
        running: list[Sequence],
        waiting: list[Sequence],
        can_preempt: bool,
    ) -> bool:
        """Give these sequences their chunks; False if a commit has to free memory first."""
        decoders, opened = _split(running)
        num_running = len(self._table.running)
        if not self._make_room(decoders, can_preempt):
            return False
        if len(self._table.running) < num_running:
            step.seats = 0  # nobody may take the place of a sequence that was just preempted
            decoders, opened = _split(running)
        for sequence in decoders:
            step.add_decode_chunk(sequence)
            self._save(step, sequence)
        step.is_awaited = bool(decoders) or any(s.is_decoding for s in self._table.running)
        self._add_prompts(step, opened, waiting)
        return True

    def _make_room(self, decoders: list[Sequence], can_preempt: bool) -> bool:
        """Give each decoder the block it needs, preempting the newest until there are enough."""
        memory = self._memory
        growing = [s for s in decoders if memory.lacks_block(s.held, s.num_planned + 1)]
        while len(growing) > memory.num_available:
            if not can_preempt:
                return False
            newest = self._table.running[-1]
            if newest.is_decoding:
                self._budget.missed["preempted"] += 1
            self._table.preempt(newest)
            growing = [s for s in growing if s is not newest]
        for sequence in growing:
            memory.grow(sequence.held)
        return True

    def _save(self, step: PlannedStep, sequence: Sequence) -> None:
        """Keep the state after the sequence's chunk, if it ends where states are kept."""
        if not self._memory.layout.num_snapshots:
            return
        copy = self._memory.save(sequence.held, sequence.num_planned, sequence.num_prompt)
        if copy is not None:
            step.save(sequence, copy)

    def _add_prompts(
        self, step: PlannedStep, opened: list[Sequence], waiting: list[Sequence]
    ) -> None:
        room = self._budget.open(step.shape, step.is_awaited)
        step.room = room.seconds
        if len(opened) >= self._config.max_open_prompts:
            step.first_due = min(s.due for s in opened)
        for sequence in _in_turn(step, opened, waiting):
            goes_on = self._add_prompt(step, room, sequence)
            if not (goes_on and room.is_open):
                break
        step.cause = room.cause if step.has_prompt_work else ""

    def _add_prompt(self, step: PlannedStep, room: Room, sequence: Sequence) -> bool:
        """Give a prompt its share; False if the room cut it, and nothing may follow."""
        match, context = None, sequence.num_planned
        if sequence.status is SequenceStatus.WAITING:
            match = self._table.match(sequence)
            if not self._may_start(step, sequence, match):
                return True
            context = match.num_tokens
        wanted = self._wanted(sequence, context)
        length = room.largest_chunk(context, wanted, is_first=not step.has_prompt_work)
        if not length:
            return False
        if match is not None:
            step.begin(sequence, self._table.start(sequence, match))
        room.spend(context, length)
        step.add_prompt_chunk(sequence, length, self._start_siblings(step, sequence, length))
        self._save(step, sequence)
        return length == wanted

    def _may_start(self, step: PlannedStep, sequence: Sequence, match: Match) -> bool:
        """Asked in key order: a refusal may close the step to everyone behind."""
        is_too_late = step.first_due is not None and sequence.due >= step.first_due
        if is_too_late or not self._memory.has_slot:
            step.seats = 0
            return False
        if self._fits(sequence, match):
            return True
        step.num_passed_over += 1
        if step.planned_at >= sequence.due or step.num_passed_over == MAX_PASSED_OVER:
            step.seats = 0
        return False

    def _wanted(self, sequence: Sequence, context: int) -> int:
        """The rest of the prompt, or as far as one chunk may go."""
        stops = [sequence.num_known]
        if context < sequence.num_reported and sequence.wants_prompt_rows:
            stops.append(sequence.num_reported)  # the rows before it were sent
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


def _split(running: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
    """Those that decode, and those whose prompt is open; neither if their last token is drawn."""
    decoders: list[Sequence] = []
    opened: list[Sequence] = []
    for sequence in running:
        remaining = sequence.remaining
        if not remaining or sequence.outcome is not None or sequence.lease is None:
            continue
        (decoders if remaining == 1 else opened).append(sequence)
    return decoders, opened


def _in_turn(
    step: PlannedStep, opened: list[Sequence], waiting: list[Sequence]
) -> Iterator[Sequence]:
    """Both in key order; once the step has no seats left, open prompts only."""
    left = sorted(opened, key=by_key, reverse=True)
    for sequence in waiting:
        while left and left[-1].key < sequence.key:
            yield left.pop()
        if step.seats <= 0:
            break
        yield sequence
    yield from reversed(left)
