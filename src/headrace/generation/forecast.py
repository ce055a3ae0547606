"""When waiting sequences will start, judged by what the running ones have left; knows no clock."""

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from headrace.core.ids import SequenceId
from headrace.core.messages import FinishReason, Outputs, Status

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


class TokensAsked(NamedTuple):
    """What a sequence asks of the engine, in tokens; `limit` is that of its answer."""

    num_prompt: int
    limit: float


class Forecast:
    """Learns from what the engine says; averages favour recent samples."""

    def __init__(self) -> None:
        self._prompts: dict[SequenceId, tuple[int, int]] = {}  # total and computed
        self._num_tokens: dict[SequenceId, int] = {}  # of each sequence that has some
        self._length = _Mean()  # tokens of an answer
        self._pace = _Mean()  # seconds that a place is taken for each token
        self._num_new = 0  # tokens since the last status
        self._looked_at: float | None = None

    def hear(self, outputs: Outputs) -> None:
        for begun in outputs.started:
            self._prompts[begun.sequence_id] = begun.total, begun.cached
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

    def look(self, status: Status, now: float) -> None:
        """The pace since the last status."""
        if self._looked_at is not None and self._num_new:
            self._pace.add((now - self._looked_at) * status.num_running, self._num_new)
        self._looked_at, self._num_new = now, 0

    def forget_running(self) -> None:
        """The engine is gone with all that it ran; the averages stay."""
        self._prompts.clear()
        self._num_tokens.clear()
        self._looked_at = None

    def waits(
        self, status: Status, num_places: int, asked: Callable[[SequenceId], TokensAsked]
    ) -> Iterator[float | None]:
        """Seconds until each of the status's queue starts; None while nothing is measured."""
        length, pace, rate = self._length.value, self._pace.value, status.prompt_tokens_per_s
        if length is None or pace is None or not rate:
            return itertools.repeat(None)
        left = [
            # an answer longer than usual may go on for a while
            pace * min(asked(id).limit - said, max(length - said, length * _LEAST_LEFT))
            for id, said in self._num_tokens.items()
        ]
        left += [pace * min(asked(id).limit, length) for id in self._prompts]
        unread = sum(total - computed for total, computed in self._prompts.values())
        waiting = (
            Waiting(num_prompt / rate, pace * min(limit, length))
            for num_prompt, limit in map(asked, status.queue)
        )
        return starts(left, num_places, unread / rate, waiting)


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
