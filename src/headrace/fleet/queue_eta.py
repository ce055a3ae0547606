"""When waiting sequences will start, judged by what the running ones have left; knows no clock."""

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from headrace_common.ids import SequenceId
from headrace_common.messages import FinishReason, Outputs, Ready, Status

_MEMORY = 0.95  # weight that a sample keeps with each new one
_LEAST_LEFT = 0.25  # of a usual answer, for one that is already longer


class Waiting(NamedTuple):
    """Seconds that a sequence will take: alone with its prompt, then in its place."""

    prompt_s: float
    answer_s: float


def starts(
    running: Sequence[float], num_places: int, prompts_s: float, waiting: Iterable[Waiting]
) -> Iterator[float]:
    """Seconds until each waiting sequence starts.

    `running` has the seconds for which each place is still taken, `prompts_s` those that the
    current prompts still need. Prompts run one after another; each takes the first free place.
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
    """When a sequence starts (None: nothing is measured), and the prompt tokens that it reads."""

    in_s: float | None
    num_tokens: int


class Schedule:
    """The next starts, first those of the queue as it was at `at`, then what usually comes.

    Worked out as far as it is asked for.
    """

    def __init__(self, at: float, starts: Iterator[NextStart]) -> None:
        self._at = at
        self._more = starts
        self._known: list[NextStart] = []

    def start(self, number: int) -> NextStart:
        """The `number`-th one, from 1."""
        while len(self._known) < number:
            self._known.append(next(self._more, _UNKNOWN))
        return self._known[number - 1]

    def seconds_until(self, num_starts: int, now: float) -> float | None:
        """Seconds until `num_starts` have started from now on; None while nothing is measured."""
        in_s = self.start(self._num_over(now) + num_starts).in_s
        return None if in_s is None else max(0.0, in_s - (now - self._at))

    def num_starts_for(self, num_tokens: int, most: int, now: float) -> int:
        """How many have to start from now on to take that many prompt tokens, `most` at most."""
        number, first = 0, self._num_over(now)
        while number < most and num_tokens > 0:
            number += 1
            num_tokens -= self.start(first + number).num_tokens
        return number

    def _num_over(self, now: float) -> int:
        """The number of requests that should have started since."""
        number = 0
        while (in_s := self.start(number + 1).in_s) is not None and in_s < now - self._at:
            number += 1
        return number


_UNKNOWN = NextStart(None, 1)


class TokensAsked(NamedTuple):
    """The demand of a sequence on the engine, in tokens; `limit` is that of its answer."""

    num_prompt: int
    limit: float


class QueueEta:
    """When those that wait will start, learned from what the engine says.

    Averages favour recent samples.
    """

    def __init__(self) -> None:
        self.schedule = Schedule(0.0, iter(()))
        self.tokens_per_s = 0.0  # of prompts; 0 while unmeasured
        self._prompts: dict[SequenceId, tuple[int, int]] = {}  # total and computed
        self._num_tokens: dict[SequenceId, int] = {}  # of each sequence that has some
        self._length = _Mean()  # tokens of an answer
        self._prompt_length = _Mean()
        self._pace = _Mean()  # seconds that a place is taken for each token
        self._num_new = 0  # tokens since the last status
        self._looked_at: float | None = None

    def hear(self, *said: Outputs) -> None:
        """Learns from the outputs of one or more steps, in order."""
        for outputs in said:
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
        """The pace since the last status."""
        self.tokens_per_s = status.prompt_tokens_per_s
        if self._looked_at is not None and self._num_new:
            self._pace.add((now - self._looked_at) * status.num_running, self._num_new)
        self._looked_at, self._num_new = now, 0

    def forget_running(self) -> None:
        """The engine is gone with all that it ran; the averages stay."""
        self._prompts.clear()
        self._num_tokens.clear()
        self._looked_at = None

    def forget(self, sequence_ids: Iterable[SequenceId]) -> None:
        """These run no more, without an end; the averages stay."""
        for sequence_id in sequence_ids:
            self._prompts.pop(sequence_id, None)
            self._num_tokens.pop(sequence_id, None)

    def foresee(
        self, status: Status, ready: Ready, asked: Callable[[SequenceId], TokensAsked], now: float
    ) -> None:
        """Sets the schedule. While memory is short, a place is one of those that run."""
        first = asked(status.queue[0]).num_prompt if status.queue else 0
        has_memory = status.blocks_free >= ready.layout.blocks_for(first)
        num_places = ready.max_num_seqs if has_memory else max(status.num_running, 1)
        self.schedule = Schedule(now, self.starts(status, num_places, asked))

    def starts(
        self, status: Status, num_places: int, asked: Callable[[SequenceId], TokensAsked]
    ) -> Iterator[NextStart]:
        """Starts of the status's queue, in order, then of usual requests without end."""
        usual = TokensAsked(int(self._prompt_length.value or 1), math.inf)
        queue = map(asked, status.queue)
        coming: Iterator[TokensAsked] = itertools.chain(queue, itertools.repeat(usual))
        length, pace, rate = self._length.value, self._pace.value, status.prompt_tokens_per_s
        if length is None or pace is None or not rate:
            return (NextStart(None, num_prompt) for num_prompt, _ in coming)
        left = [
            # an answer longer than usual may go on for a while
            pace * min(asked(id).limit - said, max(length - said, length * _LEAST_LEFT))
            for id, said in self._num_tokens.items()
        ]
        left += [pace * min(asked(id).limit, length) for id in self._prompts]
        unread = sum(total - computed for total, computed in self._prompts.values())
        coming, read = itertools.tee(coming)
        waiting = (
            Waiting(num_prompt / rate, pace * min(limit, length)) for num_prompt, limit in coming
        )
        waits = starts(left, num_places, unread / rate, waiting)
        return (
            NextStart(wait, num_prompt) for wait, (num_prompt, _) in zip(waits, read, strict=False)
        )


class _Mean:
    """A mean in which older samples fade."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def add(self, amount: float, weight: float) -> None:
        self._sum = self._sum * _MEMORY + amount
        self._weight = self._weight * _MEMORY + weight

    @property
    def value(self) -> float | None:
        return self._sum / self._weight if self._weight else None
