"""Chooses the chunks of one step: decode chunks first, then prompts in key order."""

from headrace.core.config import SchedulerConfig
from headrace.memory.memory import Match
from headrace.scheduler.budget import QUARANTINE, Room, TimeBudget
from headrace.scheduler.draft import StepDraft
from headrace.scheduler.limits import Limits
from headrace.scheduler.places import Places
from headrace.scheduler.queue import Walk
from headrace.scheduler.sequence import Sequence, SequenceStatus
from headrace.scheduler.sequence_table import SequenceTable


class Planner:
    """Plans over a roster within a budget; keeps nothing of its own from plan to plan."""

    def __init__(
        self, config: SchedulerConfig, limits: Limits, roster: SequenceTable, budget: TimeBudget
    ) -> None:
        self._config = config
        self._limits = limits
        self._roster = roster
        self._memory = roster.memory
        self._budget = budget

    def plan_together(self, now: float, is_last: bool) -> StepDraft | None:
        """A step of all who are not suspects; None if it has to wait for a commit.

        `is_last`: nothing is in flight, so that memory may be taken back from sequences.
        """
        quarantine = self._roster.quarantine
        running, waiting = list(self._roster.running), list(self._roster.waiting)
        seats = self._num_seats
        if quarantine:
            running = [s for s in running if s not in quarantine]
            waiting = [s for s in waiting if s not in quarantine]
            if self._is_blocked(quarantine.current(), now):
                seats = 0
        return self._plan(running, waiting, seats, now, is_last)

    def plan_alone(self, now: float, is_last: bool) -> StepDraft | None:
        """A step of the suspect under trial, if there is one."""
        if not self._roster.quarantine:
            return None
        suspect = self._roster.quarantine.current()
        if suspect.status is SequenceStatus.RUNNING:
            draft = self._plan([suspect], [], 0, now, is_last)
        else:
            draft = self._plan([], [suspect], self._num_seats, now, is_last)
        if draft is not None and draft.has_chunks and self._others_decode(suspect):
            self._budget.missed[QUARANTINE] += 1
            draft.cause = QUARANTINE
        return draft

    @property
    def _num_seats(self) -> int:
        return self._limits.max_num_seqs - len(self._roster.running)

    def _others_decode(self, suspect: Sequence) -> bool:
        return any(s.is_decoding for s in self._roster.running if s is not suspect)

    def _is_blocked(self, suspect: Sequence, now: float) -> bool:
        """Whether a suspect past its due lacks memory, so that nobody may start before it."""
        if suspect.status is SequenceStatus.RUNNING or now < suspect.due:
            return False
        return not self._fits(suspect, self._roster.match(suspect))

    def _fits(self, sequence: Sequence, match: Match) -> bool:
        num_running = len(self._roster.running)
        return self._memory.can_reserve(match, self._roster.reserve(sequence), num_running)

    def _plan(
        self,
        running: list[Sequence],
        waiting: list[Sequence],
        seats: int,
        now: float,
        is_last: bool,
    ) -> StepDraft | None:
        decoders, opened = _split(running)
        num_running = len(self._roster.running)
        if not self._make_room(decoders, is_last):
            return None
        if len(self._roster.running) < num_running:
            seats = 0  # who was preempted in this plan must not be replaced in it
            decoders, opened = _split(running)
        draft = StepDraft(self._limits.forward_per_chunk)
        for sequence in decoders:
            draft.add_decode_chunk(sequence)
            self._save(draft, sequence)
        draft.is_awaited = bool(decoders) or self._anybody_decodes()
        self._add_prompt_chunks(draft, opened, waiting, self._places(opened, seats, now))
        return draft

    def _anybody_decodes(self) -> bool:
        return any(s.is_decoding for s in self._roster.running)

    def _make_room(self, decoders: list[Sequence], is_last: bool) -> bool:
        """Give each decoder the block it needs, preempting the newest until there are enough.

        False if that is so, and launched plans forbid it.
        """
        memory = self._memory
        growing = [s for s in decoders if memory.lacks_block(s.held, s.num_planned + 1)]
        while len(growing) > memory.num_available:
            if not is_last:
                return False
            newest = self._roster.running[-1]
            if newest.is_decoding:
                self._budget.missed["preempted"] += 1
            self._roster.preempt(newest)
            growing = [s for s in growing if s is not newest]
        for sequence in growing:
            memory.grow(sequence.held)
        return True

    def _places(self, opened: list[Sequence], seats: int, now: float) -> Places:
        is_crowded = len(opened) >= self._config.max_open_prompts
        first_due = min(s.due for s in opened) if is_crowded else None
        return Places(self._memory, seats, first_due, now)

    def _save(self, draft: StepDraft, sequence: Sequence) -> None:
        if not self._memory.layout.num_snapshots:
            return
        copy = self._memory.save(sequence.held, sequence.num_planned, sequence.num_prompt)
        if copy is not None:
            draft.save(sequence, copy)

    def _add_prompt_chunks(
        self, draft: StepDraft, opened: list[Sequence], waiting: list[Sequence], places: Places
    ) -> None:
        room = self._budget.open(draft.shape, draft.is_awaited)
        draft.room = room.seconds
        walk = Walk(opened, waiting)
        if not places.is_open:
            walk.stop_starting()
        for sequence in walk:
            goes_on = self._add_prompt_chunk(draft, sequence, room, places)
            if not (goes_on and room.is_open):
                break
            if not places.is_open:
                walk.stop_starting()
        draft.cause = room.cause if draft.has_prompt_work else ""

    def _add_prompt_chunk(
        self, draft: StepDraft, sequence: Sequence, room: Room, places: Places
    ) -> bool:
        """Give a prompt its share; False if the budget cut it, which ends the walk."""
        match, context = None, sequence.num_planned
        if sequence.status is SequenceStatus.WAITING:
            match = self._roster.match(sequence)
            num_positions = self._roster.reserve(sequence)
            if not places.has_place(sequence, match, num_positions, len(self._roster.running)):
                return True
            context = match.num_tokens
        wanted = self._wanted(sequence, context)
        length = room.largest_chunk(context, wanted, is_first=not draft.has_prompt_work)
        if not length:
            return False
        if match is not None:
            draft.begin(sequence, self._roster.start(sequence, match))
            places.taken()
        room.spend(context, length)
        siblings = self._start_siblings(draft, sequence, length, places)
        draft.add_prompt_chunk(sequence, length, siblings)
        self._save(draft, sequence)
        return length == wanted

    def _wanted(self, sequence: Sequence, context: int) -> int:
        """The rest of the prompt, or as far as one chunk may go."""
        stops = [sequence.num_known]
        if context < sequence.num_reported and sequence.wants_prompt_rows:
            stops.append(sequence.num_reported)  # rows before it were sent
        stop = self._memory.snapshot_stop(context, sequence.num_prompt)
        return min(stops if stop is None else [*stops, stop]) - context

    def _start_siblings(
        self, draft: StepDraft, leader: Sequence, length: int, places: Places
    ) -> list[Sequence]:
        """Siblings that find a place in the step in which their common prompt ends."""
        family = leader.family
        is_final = leader.num_planned + length == leader.num_prompt == leader.num_tokens
        if family is None or family.leader is not leader or not is_final:
            return []
        if leader in self._roster.quarantine or leader.num_tokens == leader.max_total:
            return []
        started = []
        for sibling in [s for s in family.waiting if s.num_tokens == leader.num_tokens]:
            if not places.has_place_beside(leader, len(self._roster.running)):
                break
            block_copy, slot_copy = self._roster.start_beside(sibling, family)
            draft.begin(sibling)
            draft.copy(block_copy, slot_copy)
            places.taken()
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
