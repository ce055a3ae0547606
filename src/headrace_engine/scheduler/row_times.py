"""How long steps of decode chunks take by their rows, as measured; knows no model of cost."""

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

_NUM_TIMES = 8
_ENOUGH = 3  # times; fewer are mixed with what should be expected
_FORGET_AFTER = 512  # steps
_UNSEEN = 0.04  # of a step's time, for each row


class RowTimes:
    """Usual seconds of steps of decode chunks alone, by the number of chunks and of rows.

    A time that was not seen for long is forgotten: another context may be at work, or the machine
    at another speed.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, dict[int, deque[float]]] = {}
        self._seen_at: dict[tuple[int, int], int] = {}
        self._num_steps = 0

    def observe(self, num_chunks: int, num_rows: int, seconds: float) -> None:
        self._num_steps += 1
        rows = self._seconds.setdefault(num_chunks, {})
        rows.setdefault(num_rows, deque(maxlen=_NUM_TIMES)).append(seconds)
        self._seen_at[num_chunks, num_rows] = self._num_steps
        if self._num_steps % _FORGET_AFTER == 0:
            self._forget()

    def seconds(self, num_chunks: int, num_rows: int) -> float:
        """0 while nothing is known.

        A number that was hardly seen should cost as much as one between its neighbours; beyond the
        last one a row should cost little, so that it is tried.
        """
        rows = self._seconds.get(num_chunks, {})
        times = rows.get(num_rows, ())
        expected = 0.0 if len(times) >= _ENOUGH else _expected(rows, num_rows)
        if not expected:
            return median(times) if times else 0.0
        return (sum(times) + (_ENOUGH - len(times)) * expected) / _ENOUGH

    def _forget(self) -> None:
        for (num_chunks, num_rows), seen_at in list(self._seen_at.items()):
            if self._num_steps - seen_at > _FORGET_AFTER:
                del self._seen_at[num_chunks, num_rows]
                del self._seconds[num_chunks][num_rows]


def _expected(rows: Mapping[int, Sequence[float]], num_rows: int) -> float:
    """By the times of fewer rows and of more; 0 without those of fewer."""
    below = max((n for n in rows if n < num_rows), default=0)
    above = min((n for n in rows if n > num_rows), default=0)
    if not below:
        return 0.0
    low = median(rows[below])
    if not above:
        return low * (1 + _UNSEEN * (num_rows - below))
    share = (num_rows - below) / (above - below)
    return low + share * (median(rows[above]) - low)
