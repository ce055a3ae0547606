"""The last hour's figures of requests, kept whether or not anybody looks, and those of this moment.

Latencies are counted in classes 5 % wide, so that any share of them can be told later.
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
"""Seconds that a rate of this moment is measured over."""
WAITS_S = 60
"""Seconds whose waits are shares of this moment."""
_CLASSES = 20  # per factor e
_SHORTEST_S = 1e-4


class Point:
    """Figures of a span: tokens, those of prompts, and waits by name and class."""

    __slots__ = ("cached", "computed", "generated", "number", "prompt", "waits")

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.computed = self.generated = self.prompt = self.cached = 0
        self.waits = {name: Counter[int]() for name in ("ttft", "queue", "gap")}

    def wait(self, name: str, seconds: float) -> None:
        self.waits[name][class_of(seconds)] += 1

    def add(self, other: "Point") -> None:
        self.computed += other.computed
        self.generated += other.generated
        self.prompt += other.prompt
        self.cached += other.cached
        for name, counts in other.waits.items():
            self.waits[name].update(counts)

    def wait_ms(self, name: str, share: float) -> float | None:
        """Milliseconds that this share of the waits took at most; None if there were none."""
        counts = self.waits[name]
        left = share * counts.total()
        for at in sorted(counts):
            if (left := left - counts[at]) <= 0:
                return round(1000 * math.exp(at / _CLASSES), 1)
        return None

    def shown(self, rate: "Point", seconds: float) -> dict[str, Any]:
        """The figures in JSON: rates of `rate` over these seconds, all else of this span."""
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
    """One model's figures: a second each for a minute, and ten seconds each for an hour."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.began = clock()
        self.current = Point(-1)  # the newest second with figures
        self._seconds: deque[Point] = deque(maxlen=WAITS_S)
        self._points: deque[Point] = deque(maxlen=NUM_POINTS)

    def now(self) -> Point:
        """The point to count in; seconds without any have none."""
        number = int(self.clock())
        if self.current.number != number:
            self._keep()
            self.current = Point(number)
            self._seconds.append(self.current)
        return self.current

    def _keep(self) -> None:
        """Adds the last second, which is over, to its ten."""
        if not self._seconds:
            return
        number = self._seconds[-1].number // EVERY_S
        if not self._points or self._points[-1].number != number:
            self._points.append(Point(number))
        self._points[-1].add(self._seconds[-1])

    def last(self, seconds: int) -> Point:
        """The sum of the last seconds, without the one under way."""
        self.now()
        end = int(self.clock())
        return _sum(it for it in self._seconds if end - seconds <= it.number < end)

    def hour(self) -> dict[int, Point]:
        """Each ten seconds in which something was, but for those under way, by how many ago."""
        self.now()
        end = int(self.clock()) // EVERY_S
        return {end - it.number: it for it in self._points if 0 < end - it.number <= NUM_POINTS}


def live(histories: list[History]) -> dict[str, Any]:
    """The figures of this moment, of several models together."""
    rate, waits = (_sum(it.last(seconds) for it in histories) for seconds in (RATE_S, WAITS_S))
    age_s = max(int(it.clock()) - int(it.began) for it in histories)
    return waits.shown(rate, min(RATE_S, max(age_s, 1)))


def hour(histories: list[History]) -> list[dict[str, Any]]:
    """The points of the last hour, of several models together, oldest first."""
    together: dict[int, Point] = {}
    for history in histories:
        for ago, point in history.hour().items():
            together.setdefault(ago, Point()).add(point)
    return [
        {"ago_s": ago * EVERY_S, **together[ago].shown(together[ago], EVERY_S)}
        for ago in sorted(together, reverse=True)
    ]


@functools.lru_cache(4096)  # most waits are told in whole milliseconds
def class_of(seconds: float) -> int:
    """Return the number of the latency class that these seconds fall into."""
    return round(_CLASSES * math.log(max(seconds, _SHORTEST_S)))


def _sum(points: Iterable[Point]) -> Point:
    whole = Point()
    for point in points:
        whole.add(point)
    return whole
