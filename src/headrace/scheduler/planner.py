"""Chooses the chunks of one step: decode chunks first, then prompts in key order."""

from headrace.core.config import SchedulerConfig
from headrace.scheduler.draft import StepDraft
from headrace.scheduler.limits import Limits
from headrace.scheduler.places import Places
from headrace.scheduler.queue import Walk
from headrace.scheduler.roster import Roster
from headrace.scheduler.sequence import Sequence, SequenceStatus


class Planner:
    """Plans over a roster; keeps nothing from one plan to the next."""

    def __init__(self, config: SchedulerConfig, limits: Limits, roster: Roster) -> None:
        self._config = config
        self._limits = limits
        self._roster = roster
        self._memory = roster.memory

    def plan_together(self, now: float, is_last: bool) -> StepDraft | None:
        """A step of all who are not suspects; None if it has to wait for a commit.

        `is_last`: nothing is in flight, so that memory may be taken back from sequences.
        """
        quarantine = self._roster.quarantine
        cleared = [s for s in self._roster.running if s not in quarantine]
        waiting = [s for s in self._roster.waiting if s not in quarantine]
        seats = self._limits.max_num_seqs - len(self._roster.running)
        if quarantine and self._is_blocked(quarantine.current(), now):
            seats = 0
        return self._plan(cleared, waiting, seats, now, is_last)

    def plan_alone(self, now: float, is_last: bool) -> StepDraft | None:
        """A step of the suspect under trial, if there is one."""
        if not self._roster.quarantine:
            return None
        suspect = self._roster.quarantine.current()
        if suspect.status is SequenceStatus.RUNNING:
            return self._plan([suspect], [], 0, now, is_last)
        seats = self._limits.max_num_seqs - len(self._roster.running)
        return self._plan([], [suspect], seats, now, is_last)

    def _is_blocked(self, suspect: Sequence, now: float) -> bool:
        """Whether a suspect past its due lacks memory, so that nobody may start before it."""
        if suspect.status is SequenceStatus.RUNNING or now < suspect.due:
            return False
        return not self._memory.can_reserve(suspect.num_tokens, len(self._roster.running))

    def _plan(
        self,
        running: list[Sequence],
        waiting: list[Sequence],
        seats: int,
        now: float,
        is_last: bool,
    ) -> StepDraft | None:
        num_running = len(self._roster.running)
        if not self._make_room([s for s in running if s.is_decoding], is_last):
            return None
        if len(self._roster.running) < num_running:
            seats = 0  # who was preempted in this plan must not be replaced in it
        draft = StepDraft()
        for sequence in running:
            if sequence.is_decoding:
                self._add_decode_chunk(draft, sequence)
        opened = [s for s in running if s.is_open]
        self._add_prompt_chunks(draft, opened, waiting, self._places(opened, seats, now))
        return draft

    def _make_room(self, decoders: list[Sequence], is_last: bool) -> bool:
        """Preempt the newest until every decoder can grow; False if launched plans forbid that."""
        growing = [s for s in decoders if self._memory.lacks_block(s.held, s.num_planned + 1)]
        while len(growing) > self._memory.num_available:
            if not is_last:
                return False
            newest = self._roster.running[-1]
            self._roster.preempt(newest)
            growing = [s for s in growing if s is not newest]
        return True

    def _add_decode_chunk(self, draft: StepDraft, sequence: Sequence) -> None:
        if self._memory.lacks_block(sequence.held, sequence.num_planned + 1):
            self._memory.grow(sequence.held)
        draft.add_chunk(sequence, 1)

    def _places(self, opened: list[Sequence], seats: int, now: float) -> Places:
        is_crowded = len(opened) >= self._config.max_open_prompts
        first_due = min((s.due for s in opened), default=None) if is_crowded else None
        return Places(self._memory, seats, first_due, now)

    def _add_prompt_chunks(
        self, draft: StepDraft, opened: list[Sequence], waiting: list[Sequence], places: Places
    ) -> None:
        budget = max(1, self._limits.max_step_tokens - draft.num_chunks)
        walk = Walk(opened, waiting if places.is_open else [])
        for sequence in walk:
            if sequence.status is SequenceStatus.WAITING:
                if not places.has_place(sequence, len(self._roster.running)):
                    if not places.is_open:
                        walk.stop_starting()
                    continue
                self._roster.start(sequence)
                draft.begin(sequence)
                places.taken()
                if not places.is_open:
                    walk.stop_starting()
            length = min(budget, sequence.longest_chunk)
            draft.add_chunk(sequence, length)
            budget -= length
            if not budget:
                return
