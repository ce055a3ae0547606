"""Estimates when queued sequences will start, from the remaining time of running sequences.

Pure: time is an argument.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from headrace_common.ids import SequenceId
from headrace_common.messages import FinishReason, Outputs, Ready, Status

# Each new sample multiplies the weight of all earlier samples by this factor.
_MEMORY = 0.95
# If an answer already exceeds the mean length, this share of the mean is expected to remain.
_LEAST_LEFT = 0.25


class Waiting(NamedTuple):
    """The expected duration of a sequence, in seconds: for the prompt, and for the answer."""

    prompt_s: float
    answer_s: float


def starts(
    running: Sequence[float], num_places: int, prompts_s: float, waiting: Iterable[Waiting]
) -> Iterator[float]:
    """Yield the seconds until each waiting sequence starts.

    `running` contains the seconds until the end of each running sequence. `prompts_s` is the time
    that prompts in progress still need. `num_places` sequences can run at the same time.

    The function simulates the queue. A heap holds the times at which sequence slots become free.
    Each waiting sequence takes the earliest slot, but starts only after all earlier prompts,
    since prompts are processed one after another. The slot becomes free again once the sequence's
    prompt and answer are complete.
    """
    free_in = [*running, *[0.0] * (num_places - len(running))]
    heapq.heapify(free_in)
    prompts_done = prompts_s
    for prompt_s, answer_s in waiting:
        start = max(heapq.heappop(free_in), prompts_done)
        yield start
        prompts_done = start + prompt_s
        heapq.heappush(free_in, prompts_done + answer_s)


class NextStart(NamedTuple):
    """The start of a sequence: seconds until the start, and number of prompt tokens.

    The seconds are None if no rate has been measured yet.
    """

    in_s: float | None
    num_tokens: int


class Schedule:
    """The expected starts of the sequences that were queued at time `at`.

    Sequences of average size are assumed to follow the queued sequences. Each start is computed
    on demand.
    """

    def __init__(self, at: float, starts: Iterator[NextStart]) -> None:
        self._at = at
        self._more = starts
        self._known: list[NextStart] = []

    def start(self, number: int) -> NextStart:
        """Return the start with this number, counted from 1."""
        while len(self._known) < number:
            self._known.append(next(self._more, _UNKNOWN))
        return self._known[number - 1]

    def seconds_until(self, num_starts: int, now: float) -> float | None:
        """Return the seconds until `num_starts` more sequences have started.

        Returns None if no rate has been measured yet.
        """
        in_s = self.start(self._num_started(now) + num_starts).in_s
        return None if in_s is None else max(0.0, in_s - (now - self._at))

    def num_starts_for(self, num_tokens: int, most: int, now: float) -> int:
        """Return how many of the next sequences have `num_tokens` prompt tokens in total.

        The result is at most `most`.
        """
        number, first = 0, self._num_started(now)
        while number < most and num_tokens > 0:
            number += 1
            num_tokens -= self.start(first + number).num_tokens
        return number

    def _num_started(self, now: float) -> int:
        """Return the number of starts that were expected between `at` and `now`."""
        number = 0
        while (in_s := self.start(number + 1).in_s) is not None and in_s < now - self._at:
            number += 1
        return number


_UNKNOWN = NextStart(None, 1)


class TokenDemand(NamedTuple):
    """The length of a sequence's prompt and the limit of the answer's length, in tokens."""

    num_prompt: int
    limit: float


class QueueEta:
    """Estimates when queued sequences will start, from the engine's outputs and status reports.

    Recent samples weigh more than old samples.
    """

    def __init__(self) -> None:
        self.schedule = Schedule(0.0, iter(()))
        # Prompt tokens per second; 0 until the engine has reported a rate.
        self.tokens_per_s = 0.0
        # For each prompt in progress, its number of tokens and how many of them are processed.
        self._prompts: dict[SequenceId, tuple[int, int]] = {}
        # The number of answer tokens so far, for each sequence whose answer has begun.
        self._num_tokens: dict[SequenceId, int] = {}
        self._length = _Mean()  # tokens per answer
        self._prompt_length = _Mean()
        # Seconds per token of a running sequence.
        self._pace = _Mean()
        # The number of tokens since the last status report.
        self._num_new = 0
        self._looked_at: float | None = None

    def hear(self, *news: Outputs) -> None:
        """Update the estimates with the outputs of one or more steps, in order."""
        for outputs in news:
            for begun in outputs.started:
                self._prompts[begun.sequence_id] = begun.total, begun.cached
                self._prompt_length.add(begun.total, 1)
            for progress in outputs.progress:
                total, _ = self._prompts.get(progress.sequence_id, (progress.processed, 0))
                self._prompts[progress.sequence_id] = total, progress.processed
            for token in outputs.tokens:
                self._prompts.pop(token.sequence_id, None)
                self._num_tokens[token.sequence_id] = self._num_tokens.get(token.sequence_id, 0) + 1
            for outcome in outputs.finished:
                self._prompts.pop(outcome.sequence_id, None)
                length = self._num_tokens.pop(outcome.sequence_id, 0)
                if outcome.finish in (FinishReason.STOP, FinishReason.LENGTH):
                    self._length.add(length, 1)
            self._num_new += len(outputs.tokens)

    def measure_pace(self, status: Status, now: float) -> None:
        """Update the rates with the status and the tokens since the last status report."""
        self.tokens_per_s = status.prompt_tokens_per_s or self.tokens_per_s
        if self._looked_at is not None and self._num_new:
            self._pace.add((now - self._looked_at) * status.num_running, self._num_new)
        self._looked_at, self._num_new = now, 0

    def forget_running(self) -> None:
        """Forget all running sequences, since the engine is gone; the averages stay."""
        self._prompts.clear()
        self._num_tokens.clear()
        self._looked_at = None

    def forget(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Forget sequences whose end the engine will not report; the averages stay."""
        for sequence_id in sequence_ids:
            self._prompts.pop(sequence_id, None)
            self._num_tokens.pop(sequence_id, None)

    def update_schedule(
        self,
        status: Status,
        ready: Ready,
        demand_of: Callable[[SequenceId], TokenDemand],
        now: float,
    ) -> None:
        """Set a new schedule.

        Free sequence slots only count if the first queued prompt fits into memory.
        """
        has_memory = True
        if status.queue:
            first = demand_of(status.queue[0]).num_prompt
            has_memory = status.blocks_free >= ready.layout.blocks_for(first)
        num_places = ready.max_num_seqs if has_memory else max(status.num_running, 1)
        self.schedule = Schedule(now, self.starts(status, num_places, demand_of))

    def starts(
        self, status: Status, num_places: int, demand_of: Callable[[SequenceId], TokenDemand]
    ) -> Iterator[NextStart]:
        """Yield the starts of the queued sequences in order, then the starts of average sequences.

        A running answer is expected to reach the mean length, but never more than the answer's
        own limit. If the answer is already longer, the share `_LEAST_LEFT` of the mean is
        expected to remain.
        """
        usual = TokenDemand(int(self._prompt_length.value or 1), math.inf)
        queue = map(demand_of, status.queue)
        upcoming: Iterator[TokenDemand] = itertools.chain(queue, itertools.repeat(usual))
        length, pace, rate = self._length.value, self._pace.value, status.prompt_tokens_per_s
        if length is None or pace is None or not rate:
            return (NextStart(None, num_prompt) for num_prompt, _ in upcoming)
        left = [
            pace * min(demand_of(id).limit - num_done, max(length - num_done, length * _LEAST_LEFT))
            for id, num_done in self._num_tokens.items()
        ]
        left += [pace * min(demand_of(id).limit, length) for id in self._prompts]
        unread = sum(total - computed for total, computed in self._prompts.values())
        upcoming, read = itertools.tee(upcoming)
        waiting = (
            Waiting(num_prompt / rate, pace * min(limit, length)) for num_prompt, limit in upcoming
        )
        waits = starts(left, num_places, unread / rate, waiting)
        return (
            NextStart(wait, num_prompt) for wait, (num_prompt, _) in zip(waits, read, strict=False)
        )


class _Mean:
    """A mean in which older samples lose weight."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def add(self, amount: float, weight: float) -> None:
        self._sum = self._sum * _MEMORY + amount
        self._weight = self._weight * _MEMORY + weight

    @property
    def value(self) -> float | None:
        return self._sum / self._weight if self._weight else None
