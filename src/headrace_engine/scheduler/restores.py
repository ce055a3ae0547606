"""Prompts that are read from disk instead of computed: what to ask for, and how long to wait.

Runs are asked for while their prompt waits or is open, and loaded by the plans after they came.
Nothing else waits for them: a run that is late, gone or damaged is computed.
"""

from collections import Counter, deque
from dataclasses import dataclass, field

from headrace_common.ids import SequenceId
from headrace_common.plan import LoadedRun
from headrace_common.prefix import DiskNews, PrefixRun, ReadRun, RunRead
from headrace_engine.memory.disk import DiskPrefixes
from headrace_engine.scheduler.budget import TimeBudget
from headrace_engine.scheduler.sequence import Sequence

MAX_RESTORES = 4  # at once; others wait for their turn
AHEAD_BYTES = 96 << 20  # asked for and not loaded yet; each restore has one run at least
LOAD_BYTES = 64 << 20  # in one step, and one run at least
COPY_SHARE = 0.25  # of the stall target that loads may take in a step which streams wait for
SHORTEST_WAIT_S, LONGEST_WAIT_S = 0.05, 2.0  # for a run, and within these as long as computing it
IDLE_S = 0.5  # after which a prompt that cannot go on leaves its turn to others
PATIENCE_S = 30.0  # after which a disk that was slow is tried again
WEIGHT = 0.3  # of the last run, in a pace


@dataclass(slots=True, eq=False)
class Read:
    """A run that was asked for, and the answer once it is here."""

    number: int
    run: PrefixRun
    start: int  # token from which on it is wanted
    end: int
    num_bytes: int
    computing_s: float  # if it were computed instead
    answer: RunRead | None = None

    def loaded(self, sequence: Sequence, block_size: int) -> LoadedRun:
        """The numbers, and which blocks of the sequence they belong to."""
        assert self.answer is not None and self.answer.numbers is not None
        first = self.start // block_size
        block_ids = sequence.held.block_ids[first : self.run.end]
        skip = first - self.run.first
        return LoadedRun(self.answer.numbers, self.run.num_blocks, skip, block_ids)


@dataclass(slots=True, eq=False)
class Restore:
    """The runs that follow one another in a prompt, from where it stands."""

    sequence: Sequence
    since: float  # when its first read became the first
    seen: float  # when its sequence could last have gone on
    reads: deque[Read] = field(default_factory=deque)

    @property
    def due(self) -> float:
        """When its first read is late."""
        seconds = self.reads[0].computing_s
        return self.since + min(max(seconds, SHORTEST_WAIT_S), LONGEST_WAIT_S)


class BytePace:
    """Seconds a byte, as observed of late; 0 while nobody knows."""

    def __init__(self) -> None:
        self.s = 0.0
        self._at = 0.0

    def observe(self, num_bytes: int, seconds: float, now: float) -> None:
        observed = seconds / num_bytes
        self.s = self.s + WEIGHT * (observed - self.s) if self.s else observed
        self._at = now

    def forget_old(self, now: float) -> None:
        """Lets a disk be tried again that was slow once."""
        if now - self._at > PATIENCE_S:
            self.s = 0.0


class Restores:
    """The restores under way. Without a disk there are none."""

    def __init__(self, disk: DiskPrefixes | None, budget: TimeBudget) -> None:
        self.disk = disk
        self._budget = budget
        self._restores: dict[SequenceId, Restore] = {}
        self._reads: dict[int, Read] = {}  # asked for and not answered
        self._wishes: list[ReadRun] = []
        self._num_asked = 0
        self._num_bytes = 0  # asked for and not loaded
        self._reading, self._copying = BytePace(), BytePace()
        self._rests_until = 0.0  # the disk was late
        self._late = -1  # the read that was
        self._slow_for: SequenceId | None = None  # computed, since the disk would take longer
        self.hits = Counter[str]()  # runs and their tokens and bytes
        self.misses = Counter[str]()  # by reason

    @property
    def due(self) -> float | None:
        """When the next read is late, or its prompt has been idle for long; None: there is none."""
        restores = self._restores.values()
        late = (each.due for each in restores if each.reads[0].answer is None)
        return min((*late, *(each.seen + IDLE_S for each in restores)), default=None)

    def take_wishes(self) -> list[ReadRun]:
        wishes, self._wishes = self._wishes, []
        return wishes

    def hear(self, news: DiskNews, now: float) -> None:
        """Takes an answer, or what is new on disk."""
        assert self.disk is not None
        if isinstance(news, RunRead):
            self._answered(self._reads.pop(news.number), news, now)
            return
        if news.is_all:
            self.disk.know(news.runs)
        for name, first, end in news.runs:
            self.disk.add(name, first, end)
        self.hits["written_bytes"] += news.num_bytes

    def _answered(self, read: Read, answer: RunRead, now: float) -> None:
        assert self.disk is not None
        if answer.numbers is None:
            self.misses[answer.miss] += 1
            self.disk.forget(read.run.name)
        else:
            self._reading.observe(read.num_bytes, answer.seconds, now)
        read.answer = answer
        if not any(read in each.reads for each in self._restores.values()):
            self._num_bytes -= read.num_bytes  # nobody waits for it any more

    def at(self, sequence: Sequence, context: int, now: float) -> Restore | None:
        """The restore of what follows `context` tokens; None: compute it."""
        if self.disk is None or not sequence.takes_credit or sequence.wants_prompt_rows:
            return None
        restore = self._restores.get(sequence.id)
        if restore is not None and restore.reads[0].start != context:
            self._end(restore)
            restore = None
        if restore is None:
            if context % self.disk.block_size or self._is_resting(now):
                return None
            restore = Restore(sequence, now, now)
            if len(self._restores) >= MAX_RESTORES:
                block = context // self.disk.block_size
                run = self.disk.find(sequence.token_ids, sequence.chain, block)
                return None if run is None else restore  # its turn comes
        self._ask(restore, context, now)
        if not restore.reads:
            return None
        self._restores[sequence.id] = restore
        restore.seen = now
        if not self._has_missed(restore, now):
            return restore
        self._end(restore)
        return None

    def _is_resting(self, now: float) -> bool:
        """Whether a run was late: nothing is asked for a while, and not before it has come."""
        return now < self._rests_until or self._late in self._reads

    def _has_missed(self, restore: Restore, now: float) -> bool:
        answer = restore.reads[0].answer
        if answer is not None:
            return answer.numbers is None
        if now < restore.due:
            return False
        self.misses["late"] += 1
        self._rests_until, self._late = now + PATIENCE_S, restore.reads[0].number
        return True

    def _ask(self, restore: Restore, context: int, now: float) -> None:
        """Asks for what follows, as far ahead as there is room."""
        assert self.disk is not None
        sequence, reads, size = restore.sequence, restore.reads, self.disk.block_size
        position = reads[-1].end if reads else context
        self._reading.forget_old(now)
        while (self._num_bytes < AHEAD_BYTES or not reads) and not self._is_resting(now):
            run = self.disk.find(sequence.token_ids, sequence.chain, position // size)
            if run is None:
                return
            num_bytes, end = self.disk.num_bytes(run.num_blocks), run.end * size
            computing_s = self._budget.seconds_alone(position, end - position)
            if num_bytes * (self._reading.s + self._copying.s) >= computing_s:
                self.misses["slower"] += self._slow_for != sequence.id
                self._slow_for = sequence.id
                return
            self._num_asked += 1
            read = Read(self._num_asked, run, position, end, num_bytes, computing_s)
            self._reads[read.number] = read
            self._num_bytes += num_bytes
            self._wishes.append(ReadRun(read.number, run, num_bytes))
            reads.append(read)
            position = end

    def _end(self, restore: Restore) -> None:
        """Lets go of its reads; those under way count until they are answered."""
        self._num_bytes -= sum(read.num_bytes for read in restore.reads if read.answer is not None)
        del self._restores[restore.sequence.id]

    def take(self, restore: Restore, now: float, target_s: float | None) -> list[Read]:
        """The first runs that are here, as many as one step may load; asks for more."""
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
        """Lets go of what is read for sequences that have ended, or could not go on in plans.

        Whether there was any: others may go on then.
        """
        num_restores = len(self._restores)
        for restore in list(self._restores.values()):
            is_late = restore.reads[0].answer is None and now >= restore.due
            is_idle = is_late or now >= restore.seen + IDLE_S
            if is_idle or restore.sequence.outcome is not None:
                self._end(restore)
        return len(self._restores) < num_restores

    def copied(self, num_bytes: int, seconds: float, now: float) -> None:
        """Learn how long loads take."""
        self._copying.observe(num_bytes, seconds, now)

    def seconds_to_copy(self, num_bytes: int) -> float:
        return num_bytes * self._copying.s
