"""Records the request metrics of the last hour, and computes current rates and waiting times.

Waiting times are counted in the buckets of a logarithmic histogram, each 5 % wide, so that any
percentile can be computed later.
"""

import functools
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

EVERY_S = 10
NUM_POINTS = 360
RATE_S = 10
"""The number of seconds over which the current rates are measured."""
WAITS_S = 60
"""The number of seconds over which the current percentiles of waiting times are computed."""
# The number of buckets between a time and e times this time.
_BUCKETS = 20
_SHORTEST_S = 1e-4


class Point:
    """Holds the counts of a time span: tokens, and waiting times by name and bucket."""

    __slots__ = ("cached", "computed", "generated", "number", "prompt", "waits")

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.computed = self.generated = self.prompt = self.cached = 0
        self.waits = {name: Counter[int]() for name in ("ttft", "queue", "gap")}

    def plan(self, num_prompt: int, num_cached: int) -> None:
        """Count a prompt's tokens, and how many of the tokens were found in the prefix cache."""
        self.prompt += num_prompt
        self.cached += num_cached

    def compute(self, num_prompt: int) -> None:
        """Count the prompt tokens of a step."""
        self.computed += num_prompt

    def generate(self, num_tokens: int) -> None:
        """Count generated tokens."""
        self.generated += num_tokens

    def wait(self, name: str, seconds: float) -> None:
        self.waits[name][bucket_of(seconds)] += 1

    def add(self, other: "Point") -> None:
        self.computed += other.computed
        self.generated += other.generated
        self.prompt += other.prompt
        self.cached += other.cached
        for name, counts in other.waits.items():
            self.waits[name].update(counts)

    def wait_ms(self, name: str, share: float) -> float | None:
        """Return the time in milliseconds within which the fraction `share` of the waits ended.

        Return None if the time span has no waits.
        """
        counts = self.waits[name]
        left = share * counts.total()
        for at in sorted(counts):
            if (left := left - counts[at]) <= 0:
                return round(1000 * math.exp(at / _BUCKETS), 1)
        return None

    def shown(self, rate: "Point", seconds: float) -> dict[str, Any]:
        """Return the metrics as values for JSON.

        Rates are computed from the point `rate`, which lasted `seconds`. All other values are
        computed from `self`.
        """
        waits = {
            f"{name}_{title}_ms": self.wait_ms(name, share)
            for name in self.waits
            for title, share in (("p50", 0.5), ("p99", 0.99))
        }
        return {
            "tokens_in_per_s": round(rate.computed / seconds, 2),
            "tokens_out_per_s": round(rate.generated / seconds, 2),
            "cached_share": round(self.cached / self.prompt, 4) if self.prompt else None,
            **waits,
        }


class History:
    """Keeps one model's metrics: per second for a minute, and per ten seconds for an hour."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.began = clock()
        # The point of the latest second in which something was counted.
        self.current = Point(-1)
        self._seconds: deque[Point] = deque(maxlen=WAITS_S)
        self._points: deque[Point] = deque(maxlen=NUM_POINTS)

    def now(self) -> Point:
        """Return the point of the current second. Points exist only for seconds with counts."""
        number = int(self.clock())
        if self.current.number != number:
            self._keep()
            self.current = Point(number)
            self._seconds.append(self.current)
        return self.current

    def _keep(self) -> None:
        """Add the last second, which is over, to its span of ten seconds."""
        if not self._seconds:
            return
        number = self._seconds[-1].number // EVERY_S
        if not self._points or self._points[-1].number != number:
            self._points.append(Point(number))
        self._points[-1].add(self._seconds[-1])

    def last(self, seconds: int) -> Point:
        """Return the sum of the last `seconds` seconds, without the current second."""
        self.now()
        end = int(self.clock())
        return _sum(it for it in self._seconds if end - seconds <= it.number < end)

    def hour(self) -> dict[int, Point]:
        """Return the points of ten-second spans. The key says how many spans ago a span was.

        Spans without counts and the current span are left out.
        """
        self.now()
        end = int(self.clock()) // EVERY_S
        return {end - it.number: it for it in self._points if 0 < end - it.number <= NUM_POINTS}


def live(histories: list[History]) -> dict[str, Any]:
    """Return the current metrics of several models together."""
    rate, waits = (_sum(it.last(seconds) for it in histories) for seconds in (RATE_S, WAITS_S))
    age_s = max(int(it.clock()) - int(it.began) for it in histories)
    return waits.shown(rate, min(RATE_S, max(age_s, 1)))


def hour(histories: list[History]) -> list[dict[str, Any]]:
    """Return the points of the last hour for several models together, oldest first."""
    together: dict[int, Point] = {}
    for history in histories:
        for ago, point in history.hour().items():
            together.setdefault(ago, Point()).add(point)
    return [
        {"ago_s": ago * EVERY_S, **together[ago].shown(together[ago], EVERY_S)}
        for ago in sorted(together, reverse=True)
    ]


# Most waits are whole milliseconds, so the cache finds their buckets.
@functools.lru_cache(4096)
def bucket_of(seconds: float) -> int:
    """Return the number of the bucket that counts a wait of `seconds`."""
    return round(_BUCKETS * math.log(max(seconds, _SHORTEST_S)))


def _sum(points: Iterable[Point]) -> Point:
    whole = Point()
    for point in points:
        whole.add(point)
    return whole
