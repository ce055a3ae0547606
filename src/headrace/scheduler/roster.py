"""Every sequence that has not ended, and the only ways in which one starts, gives way or ends."""

from bisect import bisect_left, insort

from headrace.core.ids import SequenceId
from headrace.core.messages import Finish, Finished
from headrace.memory.memory import Memory
from headrace.scheduler.outbox import Outbox
from headrace.scheduler.quarantine import Quarantine
from headrace.scheduler.queue import WaitingQueue, by_rank
from headrace.scheduler.sequence import Sequence, SequenceStatus


class Roster:
    """Keeps status, queue, memory and announcements of each sequence in accord."""

    def __init__(self, memory: Memory, outbox: Outbox) -> None:
        self.memory = memory
        self.outbox = outbox
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
        self._sequences[sequence.id] = sequence

    def enqueue(self, sequence: Sequence) -> None:
        self.waiting.push(sequence)

    def start(self, sequence: Sequence) -> None:
        """Lease memory for all known tokens; the place must be there."""
        self.waiting.remove(sequence)
        sequence.lease = self.memory.reserve(sequence.num_tokens)
        sequence.status = SequenceStatus.RUNNING
        insort(self.running, sequence, key=by_rank)
        self.outbox.started(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Back to the queue with its tokens and its old due."""
        self._take_memory(sequence)
        sequence.rewind()
        self.enqueue(sequence)

    def end(self, sequence: Sequence, finish: Finish, message: str = "") -> None:
        """Decide the outcome, if none is; it is told when no launched plan names it any more."""
        if sequence.outcome is None:
            code = "internal_error" if finish is Finish.ERROR else ""
            self.refuse(sequence, Finished(sequence.id, finish, code, message))

    def refuse(self, sequence: Sequence, outcome: Finished) -> None:
        sequence.outcome = outcome
        self.close_if_over(sequence)

    def close_if_over(self, sequence: Sequence) -> None:
        """Give its memory back and say how it ended, once nothing in flight needs either."""
        is_told = sequence.status is SequenceStatus.FINISHED
        if is_told or sequence.outcome is None or sequence.num_in_flight:
            return
        if sequence.status is SequenceStatus.RUNNING:
            self._take_memory(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self.quarantine.discard(sequence)
        sequence.status = SequenceStatus.FINISHED
        del self._sequences[sequence.id]
        self.outbox.finished(sequence.outcome)

    def _take_memory(self, sequence: Sequence) -> None:
        assert sequence.lease is not None
        self.memory.release(sequence.lease)
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
