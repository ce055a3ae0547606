"""Decides which prompt segments to read from disk, and how long a prompt waits for a read.

While a prompt waits or is partly processed, its next segments are read from disk in the
background. A segment is a number of consecutive blocks in one file. A step loads a segment into
memory after the segment has arrived. Steps never wait for a read: if a segment is late, missing or
damaged, its tokens are processed instead.
"""

from collections import Counter, deque
from dataclasses import dataclass, field

from headrace_common.ids import SequenceId
from headrace_common.plan import LoadedSegment
from headrace_common.prefix import DiskNews, PrefixSegment, ReadSegment, SegmentRead
from headrace_engine.memory.disk import DiskPrefixes
from headrace_engine.scheduler.budget import TimeBudget
from headrace_engine.scheduler.sequence import Sequence

# The maximum number of restores (prompts read from disk) at the same time. Other prompts wait
# until a restore ends.
MAX_RESTORES = 4
# The maximum number of bytes that are requested but not loaded yet. Even above this limit, each
# restore may request one segment.
AHEAD_BYTES = 96 << 20
# The maximum number of bytes that one step loads. Even above this limit, a step may load one
# segment.
LOAD_BYTES = 64 << 20
# In a step that streams wait for, loads may take this fraction of the stall target.
COPY_SHARE = 0.25
# The bounds of the wait for a segment. Within these bounds, a prompt waits as long as processing
# the segment's tokens would take.
SHORTEST_WAIT_S, LONGEST_WAIT_S = 0.05, 2.0
# A restore is given up if no plan has asked for the restore for this many seconds.
IDLE_S = 0.5
# A slow disk is tried again after this many seconds.
PATIENCE_S = 30.0
# The weight of the last segment when the measured seconds per byte are updated.
WEIGHT = 0.3


@dataclass(slots=True, eq=False)
class Read:
    """Holds a requested segment; `answer` is set once the segment has been read."""

    number: int
    segment: PrefixSegment
    # The first token that is needed; the segment may start earlier.
    start: int
    end: int
    num_bytes: int
    # The predicted seconds of processing the tokens [start, end).
    computing_s: float
    answer: SegmentRead | None = None

    def loaded(self, sequence: Sequence, block_size: int) -> LoadedSegment:
        """Return the segment's data, with the sequence's blocks that receive the data."""
        assert self.answer is not None and self.answer.numbers is not None
        first = self.start // block_size
        block_ids = sequence.held.block_ids[first : self.segment.end]
        skip = first - self.segment.first
        return LoadedSegment(self.answer.numbers, self.segment.num_blocks, skip, block_ids)


@dataclass(slots=True, eq=False)
class Restore:
    """Holds the reads of one prompt in order, starting at the first unprocessed token."""

    sequence: Sequence
    # The time at which the wait for the first read started.
    since: float
    # The time at which a plan last asked for this restore.
    seen: float
    reads: deque[Read] = field(default_factory=deque)

    @property
    def due(self) -> float:
        """Return the time from which the first read counts as late."""
        seconds = self.reads[0].computing_s
        return self.since + min(max(seconds, SHORTEST_WAIT_S), LONGEST_WAIT_S)


class BytePace:
    """Measures the seconds per byte of recent reads or copies; 0 means unknown."""

    def __init__(self) -> None:
        self.s = 0.0
        self._at = 0.0

    def observe(self, num_bytes: int, seconds: float, now: float) -> None:
        observed = seconds / num_bytes
        self.s = self.s + WEIGHT * (observed - self.s) if self.s else observed
        self._at = now

    def forget_old(self, now: float) -> None:
        """Forget a measurement that is too old, so that a slow disk is tried again."""
        if now - self._at > PATIENCE_S:
            self.s = 0.0


class Restores:
    """Holds the restores (prompts being read from disk); without a disk, there are no restores."""

    def __init__(self, disk: DiskPrefixes | None, budget: TimeBudget) -> None:
        self.disk = disk
        self._budget = budget
        self._restores: dict[SequenceId, Restore] = {}
        # Reads that were requested and not answered yet, by number.
        self._reads: dict[int, Read] = {}
        self._requests: list[ReadSegment] = []
        self._num_requested = 0
        # Bytes that were requested and not loaded yet.
        self._num_bytes = 0
        self._reading, self._copying = BytePace(), BytePace()
        # After a late read, no segment is requested before this time.
        self._paused_until = 0.0
        # The number of the last read that was late; -1 if there was none.
        self._late = -1
        # The last sequence that was not restored because reading would take longer than processing.
        self._slow_for: SequenceId | None = None
        # Counts loaded segments, loaded tokens, bytes read and bytes written.
        self.hits = Counter[str]()
        # Counts segments whose tokens had to be processed again, by reason.
        self.misses = Counter[str]()

    @property
    def due(self) -> float | None:
        """Return the next time at which a read becomes late or a restore counts as idle.

        Return None if there is no restore.
        """
        restores = self._restores.values()
        late = (each.due for each in restores if each.reads[0].answer is None)
        return min((*late, *(each.seen + IDLE_S for each in restores)), default=None)

    def take_reads(self) -> list[ReadSegment]:
        requests, self._requests = self._requests, []
        return requests

    def apply_news(self, news: DiskNews, now: float) -> None:
        """Apply a message from the disk threads: a finished read, or a list of stored segments."""
        assert self.disk is not None
        if isinstance(news, SegmentRead):
            self._answered(self._reads.pop(news.number), news, now)
            return
        if news.is_all:
            self.disk.set_segments(news.segments)
        for name, first, end in news.segments:
            self.disk.add(name, first, end)
        self.hits["written_bytes"] += news.num_bytes

    def _answered(self, read: Read, answer: SegmentRead, now: float) -> None:
        assert self.disk is not None
        if answer.numbers is None:
            self.misses[answer.miss] += 1
            self.disk.forget(read.segment.name)
        else:
            self._reading.observe(read.num_bytes, answer.seconds, now)
        read.answer = answer
        if not any(read in each.reads for each in self._restores.values()):
            # No restore waits for this read any more.
            self._num_bytes -= read.num_bytes

    def at(self, sequence: Sequence, context: int, now: float) -> Restore | None:
        """Return the restore for the tokens after `context`; None if the tokens must be processed.

        A restore with a pending read is also returned, so that the prompt waits for the read.
        """
        if self.disk is None or not sequence.uses_prefix_cache or sequence.wants_prompt_logprobs:
            return None
        restore = self._restores.get(sequence.id)
        if restore is not None and restore.reads[0].start != context:
            self._end(restore)
            restore = None
        if restore is None:
            if context % self.disk.block_size or self._is_paused(now):
                return None
            restore = Restore(sequence, now, now)
            if len(self._restores) >= MAX_RESTORES:
                block = context // self.disk.block_size
                segment = self.disk.find(sequence.token_ids, sequence.chain, block)
                # If the disk has the next segment, the prompt waits until another restore ends.
                return None if segment is None else restore
        self._ask(restore, context, now)
        if not restore.reads:
            return None
        self._restores[sequence.id] = restore
        restore.seen = now
        if not self._has_missed(restore, now):
            return restore
        self._end(restore)
        return None

    def _is_paused(self, now: float) -> bool:
        """Return whether reading is paused after a late read.

        The pause lasts for PATIENCE_S, or until the late read arrives, whichever is longer.
        """
        return now < self._paused_until or self._late in self._reads

    def _has_missed(self, restore: Restore, now: float) -> bool:
        answer = restore.reads[0].answer
        if answer is not None:
            return answer.numbers is None
        if now < restore.due:
            return False
        self.misses["late"] += 1
        self._paused_until, self._late = now + PATIENCE_S, restore.reads[0].number
        return True

    def _ask(self, restore: Restore, context: int, now: float) -> None:
        """Request the next segments, up to AHEAD_BYTES in all restores together."""
        assert self.disk is not None
        sequence, reads, size = restore.sequence, restore.reads, self.disk.block_size
        position = reads[-1].end if reads else context
        self._reading.forget_old(now)
        while (self._num_bytes < AHEAD_BYTES or not reads) and not self._is_paused(now):
            segment = self.disk.find(sequence.token_ids, sequence.chain, position // size)
            if segment is None:
                return
            num_bytes, end = self.disk.num_bytes(segment.num_blocks), segment.end * size
            computing_s = self._budget.seconds_alone(position, end - position)
            if num_bytes * (self._reading.s + self._copying.s) >= computing_s:
                self.misses["slower"] += self._slow_for != sequence.id
                self._slow_for = sequence.id
                return
            self._num_requested += 1
            read = Read(self._num_requested, segment, position, end, num_bytes, computing_s)
            self._reads[read.number] = read
            self._num_bytes += num_bytes
            self._requests.append(ReadSegment(read.number, segment, num_bytes))
            reads.append(read)
            position = end

    def _end(self, restore: Restore) -> None:
        """Remove a restore; pending reads count towards AHEAD_BYTES until the answers arrive."""
        self._num_bytes -= sum(read.num_bytes for read in restore.reads if read.answer is not None)
        del self._restores[restore.sequence.id]

    def take(self, restore: Restore, now: float, target_s: float | None) -> list[Read]:
        """Return the first segments that have arrived, up to the limit of one step.

        The returned segments leave the restore, and the next segments are requested. `target_s`
        is the stall target if streams wait for the step, else None.
        """
        left: float = LOAD_BYTES
        if target_s is not None and self._copying.s:
            left = min(left, COPY_SHARE * target_s / self._copying.s)
        taken: list[Read] = []
        while restore.reads and (answer := restore.reads[0].answer) and answer.numbers is not None:
            left -= restore.reads[0].num_bytes
            if taken and left < 0:
                break
            taken.append(restore.reads.popleft())
        if taken:
            self._num_bytes -= sum(read.num_bytes for read in taken)
            self.hits["runs"] += len(taken)
            self.hits["tokens"] += taken[-1].end - taken[0].start
            self.hits["read_bytes"] += sum(read.num_bytes for read in taken)
            restore.since = now
            self._ask(restore, taken[-1].end, now)
            if not restore.reads:
                del self._restores[restore.sequence.id]
        return taken

    def drop_idle(self, now: float) -> bool:
        """Remove restores that are late or idle, or whose sequence has ended.

        A restore is idle if no plan has asked for the restore for IDLE_S. Return whether any
        restore was removed, because a removal may let other prompts continue.
        """
        num_restores = len(self._restores)
        for restore in list(self._restores.values()):
            is_late = restore.reads[0].answer is None and now >= restore.due
            is_idle = is_late or now >= restore.seen + IDLE_S
            if is_idle or restore.sequence.outcome is not None:
                self._end(restore)
        return len(self._restores) < num_restores

    def copied(self, num_bytes: int, seconds: float, now: float) -> None:
        """Learn from the seconds that a load of `num_bytes` took."""
        self._copying.observe(num_bytes, seconds, now)

    def seconds_to_copy(self, num_bytes: int) -> float:
        return num_bytes * self._copying.s
