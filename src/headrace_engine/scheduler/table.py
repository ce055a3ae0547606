"""Every sequence that has not ended: how it starts, gives way and ends; chooses none of them."""

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace

from headrace_common.ids import SequenceId
from headrace_common.messages import (
    Finished,
    FinishReason,
    Guessed,
    NewToken,
    Outputs,
    PromptAdvance,
    PromptLogprobs,
    Started,
)
from headrace_common.plan import BlockCopy, SlotCopy
from headrace_engine.memory.memory import NO_MATCH, Match, Memory
from headrace_engine.scheduler.sequence import (
    PRIORITY_LEVEL_S,
    TURN_S,
    Family,
    Sequence,
    SequenceStatus,
    by_key,
    by_rank,
)

MAX_FAILED_ALONE = 3


@dataclass(slots=True)
class OutputBuffer:
    """News of sequences since the outputs were last taken."""

    started: list[Started] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    progress: list[PromptAdvance] = field(default_factory=list)
    guessed: list[Guessed] = field(default_factory=list)
    tokens: list[NewToken] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        prompts = self.started or self.prompt_logprobs or self.progress
        return not (self.tokens or self.finished or prompts or self.guessed)

    def take(self) -> Outputs | None:
        """Return the news and forget them; None if there are none."""
        if self.is_empty:
            return None
        taken = Outputs(
            started=tuple(self.started),
            prompt_logprobs=tuple(self.prompt_logprobs),
            progress=tuple(self.progress),
            guessed=tuple(self.guessed),
            tokens=tuple(self.tokens),
            finished=tuple(self.finished),
        )
        self.started, self.prompt_logprobs, self.progress = [], [], []
        self.guessed, self.tokens, self.finished = [], [], []
        return taken


class Quarantine:
    """Sequences suspected of making a step fail: they run alone, one by one, every other step."""

    def __init__(self) -> None:
        self.suspects: set[Sequence] = set()
        self.num_failed_alone = 0  # since the last good step
        self._is_turn = True

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self.suspects

    @property
    def is_turn(self) -> bool:
        """Whether the next step is a suspect's, if both sides have something to do."""
        return bool(self.suspects) and self._is_turn

    @property
    def is_hopeless(self) -> bool:
        """Whether the engine is to blame: several failed alone, with no good step between."""
        return self.num_failed_alone >= MAX_FAILED_ALONE

    def current(self) -> Sequence:
        """The suspect under trial: the one that runs, else the newest."""
        running = [suspect for suspect in self.suspects if suspect.lease is not None]
        return max(running or self.suspects, key=by_rank)

    def took_turn(self, alone: bool) -> None:
        self._is_turn = not alone

    def suspect(self, sequence: Sequence, clears_at: int) -> None:
        """Hold a sequence until a step has computed its first `clears_at` tokens."""
        sequence.suspect(clears_at)
        self.suspects.add(sequence)

    def failed_alone(self) -> None:
        self.num_failed_alone += 1

    def step_was_good(self) -> None:
        self.num_failed_alone = 0
        for suspect in list(self.suspects):
            assert suspect.clears_at is not None
            if suspect.num_computed >= suspect.clears_at:
                self.discard(suspect)

    def discard(self, sequence: Sequence) -> None:
        sequence.clear()
        self.suspects.discard(sequence)


class WaitingLines:
    """Waiting sequences: by key within a client; between clients, the one that had least is next.

    A start counts for TURN_S and its prompt's own seconds. A client that was away has no more
    claim than the one whose turn it is now (start-time fair queueing). What was preempted or
    recovered goes on at once, and counts for nothing.
    """

    def __init__(self) -> None:
        self.num_waiting = 0
        self._lines: dict[str, list[Sequence]] = {}  # of clients that have any, by key
        self._had: dict[str, float] = {}  # share that each has had, in seconds
        self._level = 0.0  # what the client had that started last

    def __len__(self) -> int:
        return self.num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        return self.in_turn()

    def add(self, sequence: Sequence) -> None:
        client = sequence.client
        if client not in self._lines:
            self._lines[client] = []
            self._had[client] = max(self._had.get(client, 0.0), self._level)
        insort(self._lines[client], sequence, key=by_key)
        self.num_waiting += 1

    def remove(self, sequence: Sequence) -> None:
        line = self._lines[sequence.client]
        del line[bisect_left(line, sequence.key, key=by_key)]
        self.num_waiting -= 1
        if not line:
            del self._lines[sequence.client]
            if self._had[sequence.client] <= self._level:
                del self._had[sequence.client]  # it would come back with as much

    def charge(self, sequence: Sequence) -> None:
        """The sequence, which waits, is about to start."""
        if not sequence.has_begun:
            self._level = max(self._level, self._had[sequence.client])
            self._had[sequence.client] += _share(sequence)

    def in_turn(self, without: Quarantine | None = None) -> Iterator[Sequence]:
        """The order in which they would start if each could; they may change meanwhile."""
        lines = {client: line[:] for client, line in self._lines.items()}
        if without is not None and without.suspects:
            lines = {c: [s for s in line if s not in without] for c, line in lines.items()}
        lines = {client: line for client, line in lines.items() if line}
        if len(lines) == 1:
            return iter(*lines.values())
        return _by_turns(lines, self._had.copy())


def _by_turns(lines: dict[str, list[Sequence]], had: dict[str, float]) -> Iterator[Sequence]:
    heads = [(turn(line[0], had), line[0].key, client, 0) for client, line in lines.items()]
    heapify(heads)
    while heads:
        _, _, client, number = heads[0]
        line = lines[client]
        yield line[number]
        if not line[number].has_begun:
            had[client] += _share(line[number])
        if number + 1 == len(line):
            heappop(heads)
        else:
            head = line[number + 1]
            heapreplace(heads, (turn(head, had), head.key, client, number + 1))


def turn(head: Sequence, had: dict[str, float]) -> float:
    """Smaller goes first among the heads of all lines."""
    if head.has_begun and not head.is_background:
        return -math.inf
    return had[head.client] + PRIORITY_LEVEL_S * head.priority


def _share(sequence: Sequence) -> float:
    return TURN_S + sequence.alone


class SequenceTable:
    """Keeps the status, place in line, memory and outputs of each sequence in step."""

    def __init__(self, memory: Memory, quarantine: Quarantine, outputs: OutputBuffer) -> None:
        self.waiting = WaitingLines()
        self.running: list[Sequence] = []  # by rank: the last gives way first
        self._memory = memory
        self.quarantine = quarantine
        self._outputs = outputs
        self._sequences: dict[SequenceId, Sequence] = {}
        self._ended: list[SequenceId] = []  # the runner may forget them

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, sequence_id: SequenceId) -> Sequence:
        return self._sequences[sequence_id]

    def living(self, sequence_id: SequenceId) -> Sequence | None:
        """The sequence; None if it is unknown or its outcome is decided."""
        sequence = self._sequences.get(sequence_id)
        return sequence if sequence is not None and sequence.outcome is None else None

    def admit(self, sequence: Sequence) -> None:
        """A leader joins the queue, its siblings wait for the leader."""
        self._sequences[sequence.id] = sequence
        family = sequence.family
        if family is None or family.leader is sequence:
            self.waiting.add(sequence)
        else:
            family.waiting.append(sequence)

    def match(self, sequence: Sequence) -> Match:
        """The cached prefix that the sequence could reuse if it started now."""
        if not sequence.takes_credit or sequence.wants_prompt_rows:
            return NO_MATCH
        return self._memory.match(sequence.token_ids, sequence.chain)

    def start(self, sequence: Sequence, match: Match) -> SlotCopy | None:
        """Lease memory for a waiting sequence; there must be enough."""
        self.waiting.charge(sequence)
        self.waiting.remove(sequence)
        lease, restore = self._memory.reserve(match, sequence.num_tokens)
        sequence.run(lease)
        sequence.start_at(match.num_tokens)
        insort(self.running, sequence, key=by_rank)
        return restore

    def tell_starts(self, sequences: Iterable[Sequence]) -> None:
        """Report, once, how much of a prompt is cached: the rest is about to be computed."""
        for sequence in sequences:
            if sequence.num_reported < 0:
                cached = min(sequence.num_planned, sequence.num_prompt)
                sequence.report(cached)
                if sequence.is_reporter:
                    self._outputs.started.append(Started(sequence.id, sequence.num_shown, cached))

    def start_beside(
        self, sibling: Sequence, family: Family
    ) -> tuple[BlockCopy | None, SlotCopy | None]:
        """Lease memory for a sibling in the step that computes the end of their prompt."""
        family.waiting.remove(sibling)
        leader = family.leader
        lease, block_copy, slot_copy = self._memory.fork(leader.held, leader.num_tokens)
        sibling.run_beside(leader, lease)
        insort(self.running, sibling, key=by_rank)
        return block_copy, slot_copy

    def scatter(self, family: Family) -> None:
        """The prompt is computed: siblings that still wait start by themselves, with credit."""
        for sibling in family.waiting:
            self.waiting.add(sibling)
        family.waiting.clear()

    def preempt(self, sequence: Sequence) -> None:
        """Back to the queue, with its tokens and its old due."""
        self._take_memory(sequence)
        sequence.rewind()
        self.waiting.add(sequence)

    def end(self, sequence: Sequence, finish: FinishReason, message: str = "") -> None:
        """Decide the outcome, unless it is decided already."""
        if sequence.outcome is None:
            sequence.decide(finish, message)
            self.close_if_over(sequence)

    def close_if_over(self, sequence: Sequence) -> None:
        """Release its memory and report how it ended, once no launched plan names it."""
        is_closed = sequence.status is SequenceStatus.FINISHED
        if is_closed or sequence.outcome is None or sequence.num_in_flight:
            return
        family = sequence.family
        if sequence.status is SequenceStatus.RUNNING:
            self._take_memory(sequence)
        elif family is not None and sequence in family.waiting:
            family.waiting.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self.quarantine.discard(sequence)
        sequence.finish()
        del self._sequences[sequence.id]
        self._outputs.finished.append(sequence.outcome)
        if family is not None and family.leader is sequence:
            leader = family.hand_over()  # the prompt may not be computed yet
            if leader is not None:
                self.waiting.add(leader)

    def _take_memory(self, sequence: Sequence) -> None:
        self._memory.release(sequence.held)
        del self.running[bisect_left(self.running, sequence.rank, key=by_rank)]
        self._ended.append(sequence.id)

    def take_ended(self) -> tuple[SequenceId, ...]:
        """Sequences that the runner may forget since the last plan."""
        ended, self._ended = self._ended, []
        return tuple(ended)

    def give_back_ended(self, ended: tuple[SequenceId, ...]) -> None:
        """The plan that named these failed, perhaps before the runner forgot them."""
        self._ended.extend(ended)
