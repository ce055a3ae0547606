"""Records how long decode steps take, by number of rows."""

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

_NUM_TIMES = 8
# If fewer times than this were measured, expected times replace the missing times.
_ENOUGH = 3
# The times for a number of chunks and rows are forgotten after this many steps with other numbers.
_FORGET_AFTER = 512
# The expected increase of a step's time for each row beyond the largest measured number, as a
# fraction.
_UNSEEN = 0.04


class RowTimes:
    """Records the seconds of steps with only decode chunks, by number of chunks and of rows.

    Each token that a step processes is a row. Old times are forgotten, because the context or the
    machine's speed may have changed.
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
        """Return the expected seconds of a decode step; 0 if no similar step was timed.

        If few steps had this number of rows, the time is interpolated from steps with fewer and
        with more rows. Beyond the largest measured number of rows, each row is expected to cost
        little, so that larger numbers of rows are tried.
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
    """Return the seconds expected from the times of steps with fewer and with more rows.

    Return 0 if no step with fewer rows was timed.
    """
    below = max((n for n in rows if n < num_rows), default=0)
    above = min((n for n in rows if n > num_rows), default=0)
    if not below:
        return 0.0
    low = median(rows[below])
    if not above:
        return low * (1 + _UNSEEN * (num_rows - below))
    share = (num_rows - below) / (above - below)
    return low + share * (median(rows[above]) - low)
