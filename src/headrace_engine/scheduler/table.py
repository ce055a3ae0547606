"""Holds all sequences that have not ended; starts, preempts and ends sequences."""

import math
from bisect import bisect_left, insort
from collections import Counter
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
    START_COST_S,
    Family,
    Sequence,
    SequenceStatus,
    by_key,
    by_rank,
)

MAX_FAILED_ALONE = 3


@dataclass(slots=True)
class OutputBuffer:
    """Collects the outputs of sequences until `take` is called."""

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
        """Return the outputs and clear the buffer; None if the buffer is empty."""
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
    """Holds the suspects of failed steps until each suspect is cleared or fails again.

    If a step raises an exception or kills the engine, any sequence of the step may be to blame.
    So all sequences of the step become suspects. Suspects run alone, one at a time, in every
    other step. The steps between are for all other sequences, so that streams continue. A suspect
    is cleared once it has processed the tokens that the failed step should have processed. A
    suspect that fails alone is to blame and ends with an error. If MAX_FAILED_ALONE suspects fail
    alone without a successful step between the failures, the engine itself is to blame.
    """

    def __init__(self) -> None:
        self.suspects: set[Sequence] = set()
        # How many suspects failed alone since the last successful step.
        self.num_failed_alone = 0
        self._is_next = True

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self.suspects

    @property
    def is_next(self) -> bool:
        """Return whether a suspect gets the next step, even if other sequences could run."""
        return bool(self.suspects) and self._is_next

    @property
    def is_hopeless(self) -> bool:
        """Return whether the engine is to blame: several suspects in a row failed alone."""
        return self.num_failed_alone >= MAX_FAILED_ALONE

    def current(self) -> Sequence:
        """Return the suspect that runs next: a suspect with memory, or else the newest suspect."""
        running = [suspect for suspect in self.suspects if suspect.lease is not None]
        return max(running or self.suspects, key=by_rank)

    def note_step(self, alone: bool) -> None:
        self._is_next = not alone

    def suspect(self, sequence: Sequence, clears_at: int) -> None:
        """Make a sequence a suspect until its first `clears_at` tokens are processed."""
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


class WaitingQueues:
    """Holds the waiting sequences of all clients and orders them fairly.

    Each client has a queue, ordered by due time. The client that has used the fewest seconds is
    next (start-time fair queueing). The start of a sequence costs the client START_COST_S plus
    the predicted seconds of the prompt. A client that was idle gets no credit for the idle time:
    its used seconds start at the level of the client that started last. A sequence that was
    preempted or recovered costs nothing, and is next in the queue unless it is a background
    sequence.
    """

    def __init__(self) -> None:
        self.num_waiting = 0
        # For each client with waiting sequences, the client's sequences in the order of `key`.
        self._queues: dict[str, list[Sequence]] = {}
        # The seconds that each client has used.
        self._used_s: dict[str, float] = {}
        # The largest number of seconds that any client had used just before a start.
        self._level = 0.0

    def __len__(self) -> int:
        return self.num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        return self.in_order()

    def add(self, sequence: Sequence) -> None:
        client = sequence.client
        if client not in self._queues:
            self._queues[client] = []
            self._used_s[client] = max(self._used_s.get(client, 0.0), self._level)
        insort(self._queues[client], sequence, key=by_key)
        self.num_waiting += 1

    def remove(self, sequence: Sequence) -> None:
        queue = self._queues[sequence.client]
        del queue[bisect_left(queue, sequence.key, key=by_key)]
        self.num_waiting -= 1
        if not queue:
            del self._queues[sequence.client]
            if self._used_s[sequence.client] <= self._level:
                # A client that returns would start at this level anyway.
                del self._used_s[sequence.client]

    def charge(self, sequence: Sequence) -> None:
        """Charge the client of a waiting sequence that is about to start."""
        if not sequence.has_started:
            self._level = max(self._level, self._used_s[sequence.client])
            self._used_s[sequence.client] += _start_cost(sequence)

    def heads(self, without: Quarantine) -> Iterator[Sequence]:
        """Yield the first sequence of each client."""
        for queue in self._queues.values():
            if (head := next((s for s in queue if s not in without), None)) is not None:
                yield head

    def in_order(self, without: Quarantine | None = None) -> Iterator[Sequence]:
        """Iterate over the sequences in queue order; sequences may start or end meanwhile."""
        queues = {client: queue[:] for client, queue in self._queues.items()}
        if without is not None and without.suspects:
            queues = {c: [s for s in queue if s not in without] for c, queue in queues.items()}
        queues = {client: queue for client, queue in queues.items() if queue}
        if len(queues) == 1:
            return iter(*queues.values())
        return _merge_queues(queues, self._used_s.copy())


def _merge_queues(
    queues: dict[str, list[Sequence]], used_s: dict[str, float]
) -> Iterator[Sequence]:
    heads = [
        (queue_key(queue[0], used_s), queue[0].key, client, 0) for client, queue in queues.items()
    ]
    heapify(heads)
    while heads:
        _, _, client, number = heads[0]
        queue = queues[client]
        yield queue[number]
        if not queue[number].has_started:
            used_s[client] += _start_cost(queue[number])
        if number + 1 == len(queue):
            heappop(heads)
        else:
            head = queue[number + 1]
            heapreplace(heads, (queue_key(head, used_s), head.key, client, number + 1))


def queue_key(head: Sequence, used_s: dict[str, float]) -> float:
    """Return the sort key of a client's first sequence; the smallest key is next."""
    if head.has_started and not head.is_background:
        return -math.inf
    return used_s[head.client] + PRIORITY_LEVEL_S * head.priority


def _start_cost(sequence: Sequence) -> float:
    return START_COST_S + sequence.alone


class SequenceTable:
    """Keeps each sequence's status, queue position, memory and outputs consistent."""

    def __init__(self, memory: Memory, quarantine: Quarantine, outputs: OutputBuffer) -> None:
        self.waiting = WaitingQueues()
        # The running sequences, sorted by rank. The last sequence is preempted first.
        self.running: list[Sequence] = []
        self._memory = memory
        self.quarantine = quarantine
        self._outputs = outputs
        self._sequences: dict[SequenceId, Sequence] = {}
        # The sequences that the runner can forget.
        self._ended: list[SequenceId] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, sequence_id: SequenceId) -> Sequence:
        return self._sequences[sequence_id]

    def living(self, sequence_id: SequenceId) -> Sequence | None:
        """Return the sequence; None if the id is unknown or the outcome is decided."""
        sequence = self._sequences.get(sequence_id)
        return sequence if sequence is not None and sequence.outcome is None else None

    def admit(self, sequence: Sequence) -> None:
        """Queue a sequence, unless it is a sibling that has to wait for its leader."""
        self._sequences[sequence.id] = sequence
        family = sequence.family
        if family is None or family.leader is sequence:
            self.waiting.add(sequence)
        else:
            family.waiting.append(sequence)

    def starved(self, now: float) -> Sequence | None:
        """Return the first waiting sequence of the most starved client, or None.

        A client is starved if another client runs more sequences, and if it runs none itself or
        its first sequence is past its due time.
        """
        if not self.waiting.num_waiting:
            return None
        num_running = self.num_running_by_client()
        most = max(num_running.values(), default=0)
        starved = [
            head
            for head in self.waiting.heads(without=self.quarantine)
            if not head.is_background
            and most > (own := num_running[head.client])
            and (own == 0 or head.due <= now)
        ]
        return min(starved, key=lambda s: (num_running[s.client], s.key), default=None)

    def num_running_by_client(self) -> Counter[str]:
        return Counter(sequence.client for sequence in self.running)

    def next_to_preempt(self) -> Sequence:
        """Return the last background sequence, or the newest sequence of the busiest client.

        The busiest client runs most sequences. If several clients run the same number, return the
        newest of their sequences. So the oldest sequence keeps its memory until it ends.
        """
        last = self.running[-1]
        if last.is_background:
            return last
        num_running = self.num_running_by_client()
        most = max(num_running.values())
        return next(s for s in reversed(self.running) if num_running[s.client] == most)

    def match(self, sequence: Sequence) -> Match:
        """Return the cached prefix that the sequence could reuse if it started now."""
        if not sequence.uses_prefix_cache or sequence.wants_prompt_logprobs:
            return NO_MATCH
        return self._memory.match(sequence.token_ids, sequence.chain)

    def start(self, sequence: Sequence, match: Match) -> SlotCopy | None:
        """Lease memory for a waiting sequence; return the copy that restores the recurrent state.

        Call this method only if there is enough memory. Return None if there is no state to
        restore.
        """
        self.waiting.charge(sequence)
        self.waiting.remove(sequence)
        lease, restore = self._memory.reserve(match, sequence.num_tokens)
        sequence.run(lease)
        sequence.start_at(match.num_tokens)
        insort(self.running, sequence, key=by_rank)
        return restore

    def report_starts(self, sequences: Iterable[Sequence]) -> None:
        """Report once for each sequence how many tokens of the prompt are cached.

        The method is called when the rest of the prompt is about to be processed.
        """
        for sequence in sequences:
            if sequence.num_reported < 0:
                cached = min(sequence.num_planned, sequence.num_prompt)
                sequence.report(cached)
                if sequence.is_reporter:
                    self._outputs.started.append(Started(sequence.id, sequence.num_shown, cached))

    def start_sibling(
        self, sibling: Sequence, family: Family
    ) -> tuple[BlockCopy | None, SlotCopy | None]:
        """Lease memory for a sibling in the step that processes the end of the shared prompt.

        Return what the step must copy: the leader's partly filled block and the leader's slot.
        """
        family.waiting.remove(sibling)
        leader = family.leader
        lease, block_copy, slot_copy = self._memory.fork(leader.held, leader.num_tokens)
        sibling.run_sibling(leader, lease)
        insort(self.running, sibling, key=by_rank)
        return block_copy, slot_copy

    def queue_siblings(self, family: Family) -> None:
        """Queue the siblings that still wait, because the leader's prompt is processed.

        These siblings find the prompt in the prefix cache.
        """
        for sibling in family.waiting:
            self.waiting.add(sibling)
        family.waiting.clear()

    def preempt(self, sequence: Sequence) -> None:
        """Release a running sequence's memory and queue it again, with its tokens and due time."""
        self._free_memory(sequence)
        sequence.rewind()
        self.waiting.add(sequence)

    def end(self, sequence: Sequence, finish: FinishReason, message: str = "") -> None:
        """Decide the outcome, unless it is decided already."""
        if sequence.outcome is None:
            sequence.decide(finish, message)
            self.close_if_over(sequence)

    def close_if_over(self, sequence: Sequence) -> None:
        """Release the memory of a sequence with an outcome, and report its end.

        Do nothing while a launched plan still names the sequence.
        """
        is_closed = sequence.status is SequenceStatus.FINISHED
        if is_closed or sequence.outcome is None or sequence.num_in_flight:
            return
        family = sequence.family
        if sequence.status is SequenceStatus.RUNNING:
            self._free_memory(sequence)
        elif family is not None and sequence in family.waiting:
            family.waiting.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self.quarantine.discard(sequence)
        sequence.finish()
        del self._sequences[sequence.id]
        self._outputs.finished.append(sequence.outcome)
        if family is not None and family.leader is sequence:
            # The prompt may not be processed yet, so the next choice becomes the leader and
            # processes the prompt.
            leader = family.hand_over()
            if leader is not None:
                self.waiting.add(leader)

    def _free_memory(self, sequence: Sequence) -> None:
        self._memory.release(sequence.held)
        del self.running[bisect_left(self.running, sequence.rank, key=by_rank)]
        self._ended.append(sequence.id)

    def take_ended(self) -> tuple[SequenceId, ...]:
        """Return the sequences that ended or were preempted since the last plan.

        The runner can forget these sequences.
        """
        ended, self._ended = self._ended, []
        return tuple(ended)

    def give_back_ended(self, ended: tuple[SequenceId, ...]) -> None:
        """List these sequences again for the next plan, because the plan that listed them failed.

        The runner may not have forgotten the sequences yet.
        """
        self._ended.extend(ended)
