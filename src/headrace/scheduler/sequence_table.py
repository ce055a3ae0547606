"""Every sequence that has not ended, and the only ways in which one starts, gives way or ends."""

from bisect import bisect_left, insort
from collections.abc import Callable

from headrace.core.ids import SequenceId
from headrace.core.messages import Finish, Finished
from headrace.core.plan import BlockCopy, SlotCopy
from headrace.memory.memory import NO_MATCH, Match, Memory
from headrace.scheduler.outbox import Outbox
from headrace.scheduler.quarantine import Quarantine
from headrace.scheduler.queue import WaitingQueue, by_rank
from headrace.scheduler.sequence import Family, Sequence, SequenceStatus

Reserve = Callable[[Sequence], int]
"""For how many positions a sequence takes blocks when it starts."""


class SequenceTable:
    """Keeps status, queue, memory and announcements of each sequence in accord."""

    def __init__(self, memory: Memory, outbox: Outbox, reserve: Reserve) -> None:
        self.memory = memory
        self.outbox = outbox
        self.reserve = reserve
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # by rank: the last gives way first
        self.quarantine = Quarantine()
        self._sequences: dict[SequenceId, Sequence] = {}
        self._ended: list[SequenceId] = []  # the runner may forget them

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, sequence_id: SequenceId) -> Sequence:
        return self._sequences[sequence_id]

    def living(self, sequence_id: SequenceId) -> Sequence | None:
        """The sequence, unless its outcome is decided or it is unknown."""
        sequence = self._sequences.get(sequence_id)
        return sequence if sequence is not None and sequence.outcome is None else None

    def admit(self, sequence: Sequence) -> None:
        """A leader waits in the queue, its siblings wait for the leader."""
        self._sequences[sequence.id] = sequence
        family = sequence.family
        if family is None or family.leader is sequence:
            self.waiting.push(sequence)
        else:
            family.waiting.append(sequence)

    def refuse(self, outcome: Finished) -> None:
        """The end of a sequence that is not admitted."""
        self.outbox.finished(outcome)

    def match(self, sequence: Sequence) -> Match:
        """The credit that a start would have now."""
        if not sequence.takes_credit or sequence.wants_prompt_rows:
            return NO_MATCH
        return self.memory.match(sequence.token_ids, sequence.chain)

    def start(self, sequence: Sequence, match: Match) -> SlotCopy | None:
        """Lease memory for a waiting sequence; the place must be there."""
        self.waiting.remove(sequence)
        sequence.lease, restore = self.memory.reserve(match, self.reserve(sequence))
        sequence.num_planned = sequence.num_computed = match.num_tokens
        self._run(sequence)
        if sequence.num_reported < 0:
            sequence.num_cached = min(match.num_tokens, sequence.num_prompt)
            self.outbox.started(sequence)
        return restore

    def start_beside(
        self, sibling: Sequence, family: Family
    ) -> tuple[BlockCopy | None, SlotCopy | None]:
        """Lease memory for a sibling of a leader whose prompt is computed in this step."""
        family.waiting.remove(sibling)
        leader = family.leader
        fork = self.memory.fork(leader.held, leader.num_tokens)
        sibling.lease, block_copy, slot_copy = fork
        sibling.chain = leader.chain.copy()
        self._run(sibling)
        return block_copy, slot_copy

    def _run(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.RUNNING
        insort(self.running, sequence, key=by_rank)

    def scatter(self, family: Family) -> None:
        """The prompt is computed: whoever still waits for it starts by itself, with credit."""
        for sibling in family.waiting:
            self.waiting.push(sibling)
        family.waiting.clear()

    def preempt(self, sequence: Sequence) -> None:
        """Back to the queue with its tokens and its old due."""
        self._take_memory(sequence)
        sequence.rewind()
        self.waiting.push(sequence)

    def end(self, sequence: Sequence, finish: Finish, message: str = "") -> None:
        """Decide the outcome, if none is; it is told when no launched plan names it any more."""
        if sequence.outcome is None:
            code = "internal_error" if finish is Finish.ERROR else ""
            sequence.outcome = Finished(sequence.id, finish, code, message)
            self.close_if_over(sequence)

    def close_if_over(self, sequence: Sequence) -> None:
        """Give its memory back and say how it ended, once nothing in flight needs either."""
        is_told = sequence.status is SequenceStatus.FINISHED
        if is_told or sequence.outcome is None or sequence.num_in_flight:
            return
        if sequence.status is SequenceStatus.RUNNING:
            self._take_memory(sequence)
        else:
            self._unqueue(sequence)
        self.quarantine.discard(sequence)
        sequence.status = SequenceStatus.FINISHED
        del self._sequences[sequence.id]
        self.outbox.finished(sequence.outcome)
        if sequence.family is not None and sequence.family.leader is sequence:
            self._hand_over(sequence.family)

    def _unqueue(self, sequence: Sequence) -> None:
        family = sequence.family
        if family is not None and sequence in family.waiting:
            family.waiting.remove(sequence)
        else:
            self.waiting.remove(sequence)

    def _hand_over(self, family: Family) -> None:
        """The leader ended with the prompt still to be computed: the next one leads."""
        if not family.waiting:
            return
        leader = family.waiting.pop(0)
        leader.is_reporter = family.leader.num_reported < 0
        family.leader = leader
        self.waiting.push(leader)

    def _take_memory(self, sequence: Sequence) -> None:
        self.memory.release(sequence.held)
        sequence.lease = None
        del self.running[bisect_left(self.running, sequence.rank, key=by_rank)]
        self._ended.append(sequence.id)

    def tell_again(self, ended: tuple[SequenceId, ...]) -> None:
        """A plan that failed may not have reached the point of forgetting these."""
        self._ended.extend(ended)

    def take_ended(self) -> tuple[SequenceId, ...]:
        """Whom the runner may forget since the last plan."""
        ended, self._ended = self._ended, []
        return tuple(ended)
