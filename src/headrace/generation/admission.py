"""Who is let in: bounds of the queue, limits per key, and when it is worth coming back.

Time is an argument, and nothing here awaits: to look and to take a place is one act.
"""

from collections.abc import Iterable
from typing import NamedTuple

from headrace.fleet.fleet import Fleet
from headrace.fleet.model_host import ModelHost
from headrace.fleet.queue_eta import Schedule
from headrace_common.config.settings import StreamConfig
from headrace_common.errors import RequestError
from headrace_common.messages import Ready

_AUTO_S = 600.0  # of reading prompts that may wait, where no number of tokens is set
_UNMEASURED = 500.0  # prompt tokens a second, until the engine has measured
_MAX_PROMISES = 1000
_MARGIN, _LEAST_S = 1.1, 0.1  # a little late is better than in vain
_EARLY_S, _LATE_S = 5.0, 5.0  # around the time at which somebody was told to come back
_MINUTE_S = 60.0


class Asked(NamedTuple):
    """The demand of a request. Two with the same owner and digest are one that came back."""

    owner: str
    digest: bytes
    num_choices: int
    num_tokens: int = 0  # of its prompts, once they are counted


class Capacity(NamedTuple):
    """The most that the engine can take at once."""

    max_num_seqs: int
    max_model_len: int

    @classmethod
    def of(cls, ready: Ready | None) -> "Capacity":
        return cls(ready.max_num_seqs, ready.max_model_len) if ready else cls(0, 0)


class Place:
    """The queue place of an admitted request until it is closed; its stream keeps it current."""

    def __init__(self, admission: "Admission") -> None:
        self._admission = admission
        self._counts = (0, 0, 0)

    def update(self, num_live: int, num_waiting: int, num_tokens: int) -> None:
        """Choices that have not ended, those not begun, and the prompt tokens of the latter."""
        counts = (num_live, num_waiting, num_tokens)
        if counts != self._counts:
            self._admission.count(counts, self._counts)
            self._counts = counts

    def close(self) -> None:
        self.update(0, 0, 0)


class _Allowance:
    """The allowance of a key, refilled all the time up to a minute's worth; may be overdrawn."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._rate = per_minute / _MINUTE_S
        self._most = self._left = float(per_minute)
        self._at = now

    def seconds_until(self, amount: float, now: float) -> float:
        """Seconds until that much is left, or all there can be; 0 if it is there."""
        self._left = min(self._most, self._left + (now - self._at) * self._rate)
        self._at = now
        return max(0.0, (min(amount, self._most) - self._left) / self._rate)

    def use(self, amount: float) -> None:
        self._left -= amount


class KeyLimits:
    """The limits of each key for a minute, over all queues of a server."""

    def __init__(self, config: StreamConfig) -> None:
        self._config = config
        self._has_any = bool(config.key_requests_per_minute or config.key_tokens_per_minute)
        self._requests: dict[str, _Allowance] = {}
        self._tokens: dict[str, _Allowance] = {}

    def check(self, asked: Asked, now: float) -> None:
        """RequestError if the key has used what it may; says when it may go on."""
        if not self._has_any:
            return
        for what, limit, allowance, amount in self._allowances(asked, now):
            wait_s = allowance.seconds_until(max(1, amount), now)
            if wait_s > 0:
                raise RequestError(
                    "rate_limit_exceeded",
                    f"This key may use {limit} {what} a minute (--key-{what}-per-minute), and has "
                    f"used them; try again in {wait_s:.1f} s.",
                    retry_after_s=wait_s,
                ).noting(limit=limit)

    def _allowances(self, asked: Asked, now: float) -> Iterable[tuple[str, int, _Allowance, int]]:
        """Each limit, the key's allowance, and the request's share of that; owners are few."""
        config, owner = self._config, asked.owner
        for what, kept, limit, amount in (
            ("requests", self._requests, config.key_requests_per_minute, 1),
            ("tokens", self._tokens, config.key_tokens_per_minute, asked.num_tokens),
        ):
            if limit:
                if owner not in kept:
                    kept[owner] = _Allowance(limit, now)
                yield what, limit, kept[owner], amount

    def use(self, asked: Asked, now: float) -> None:
        """The request was admitted."""
        if not self._has_any:
            return
        for _, _, allowance, amount in self._allowances(asked, now):
            allowance.use(amount)

    def used(self, owner: str, num_tokens: int) -> None:
        """Tokens that were generated count for the key once it is known how many they are."""
        if (allowance := self._tokens.get(owner)) is not None:
            allowance.use(num_tokens)


class Promise(NamedTuple):
    """A client was told to come back by then, and what it will need."""

    by: float
    num_choices: int
    num_tokens: int


class Admission:
    """The bounds of one queue. Counts choices, n to a prompt, and tokens of prompts."""

    def __init__(self, config: StreamConfig, limits: KeyLimits) -> None:
        self.num_live = self.num_waiting = self.num_tokens = 0
        self._config = config
        self._limits = limits
        self._schedule = Schedule(0.0, iter(()))
        self._tokens_per_s = _UNMEASURED
        self._promises: dict[tuple[str, bytes], Promise] = {}

    def set_schedule(self, schedule: Schedule, tokens_per_s: float) -> None:
        """When those that wait will start, and how fast prompts are read."""
        self._schedule = schedule
        self._tokens_per_s = tokens_per_s or self._tokens_per_s

    def check(self, asked: Asked, capacity: Capacity, now: float) -> None:
        """RequestError if the request could not enter, as far as is known of it."""
        self._limits.check(asked, now)
        bound = self._config.max_num_queued_reqs
        is_full = self.num_waiting >= bound
        num_kept = 0 if is_full else min(self._num_expected(asked, now), bound // 2)
        if self.num_waiting + num_kept >= bound and self.num_live >= capacity.max_num_seqs:
            kept = f", {num_kept} places are kept for who was told to return" if num_kept else ""
            reason = f"{self.num_waiting} choices are waiting{kept}, and --max-num-queued-reqs is "
            error = self._overloaded(f"{reason}{bound}", asked, capacity, now)
            raise error.noting(waiting=self.num_waiting, limit=bound)
        most = self._max_tokens(capacity)
        if self.num_tokens and self.num_tokens + max(1, asked.num_tokens) > most:
            reason = f"{self.num_tokens} prompt tokens are waiting, this request has "
            reason += f"{asked.num_tokens or 'more'}, and --max-num-queued-tokens is {most}"
            error = self._overloaded(reason, asked, capacity, now)
            raise error.noting(waiting_tokens=self.num_tokens, limit=most)

    def enter(self, asked: Asked, capacity: Capacity, now: float) -> Place:
        """A place in the queue, taken in the same act as it is looked for."""
        self.check(asked, capacity, now)
        self._promises.pop(asked[:2], None)
        self._limits.use(asked, now)
        place = self.resume()
        place.update(asked.num_choices, asked.num_choices, asked.num_tokens)
        return place

    def resume(self) -> Place:
        """The place of a stream that was admitted before: bounds do not apply to it."""
        return Place(self)

    def count(self, now: tuple[int, int, int], before: tuple[int, int, int]) -> None:
        """Counts the change of a place."""
        self.num_live += now[0] - before[0]
        self.num_waiting += now[1] - before[1]
        self.num_tokens += now[2] - before[2]

    # when to come back

    def _max_tokens(self, capacity: Capacity) -> int:
        auto = max(capacity.max_model_len, int(_AUTO_S * self._tokens_per_s))
        most = self._config.max_num_queued_tokens
        return auto if most is None else most

    def _overloaded(
        self, reason: str, asked: Asked, capacity: Capacity, now: float
    ) -> RequestError:
        wait_s = self._seconds_until_it_fits(asked, capacity, now)
        who = asked[:2]
        if len(self._promises) < _MAX_PROMISES or who in self._promises:
            self._promises[who] = Promise(now + wait_s, asked.num_choices, asked.num_tokens)
        message = f"{reason}; there should be room in {wait_s:.1f} s."
        return RequestError("server_overloaded", message, retry_after_s=wait_s)

    def _seconds_until_it_fits(self, asked: Asked, capacity: Capacity, now: float) -> float:
        """Seconds until enough before it have started: waiting ones, and those told to return."""
        promises = self._outstanding(asked, now)
        num_before = self.num_waiting + len(promises)
        num_starts = num_before - self._config.max_num_queued_reqs + 1
        num_tokens = self.num_tokens + asked.num_tokens + sum(p.num_tokens for p in promises)
        excess = num_tokens - self._max_tokens(capacity)
        if excess > 0:
            num_more = self._schedule.num_starts_for(excess, num_before, now)
            num_starts = max(num_starts, num_more)
        wait_s = self._schedule.seconds_until(max(1, num_starts), now)
        if wait_s is None:
            wait_s = self.num_tokens / self._tokens_per_s + 1.0
        return _MARGIN * wait_s + _LEAST_S

    def _num_expected(self, asked: Asked, now: float) -> int:
        """Others who were told to come back about now: who was first is not to be overtaken."""
        if not self._promises or asked[:2] in self._promises:
            return 0
        return sum(promise.by - _EARLY_S <= now for promise in self._outstanding(asked, now))

    def _outstanding(self, asked: Asked, now: float) -> list[Promise]:
        """Who else was told to come back, and may still do so."""
        late = [who for who, promise in self._promises.items() if promise.by + _LATE_S < now]
        for who in late:
            del self._promises[who]
        return [promise for who, promise in self._promises.items() if who != asked[:2]]


class Queues:
    """Has one Admission before each model, and opens none while it takes no requests."""

    def __init__(self, config: StreamConfig, fleet: Fleet) -> None:
        self.limits = KeyLimits(config)
        self.is_draining = self.is_ending = False
        self._config = config
        self._fleet = fleet
        self._by_host: dict[tuple[ModelHost, bool], Admission] = {}
        fleet.on_gone = self._forget

    def stop(self) -> None:
        """Refuses new requests from now on; what is admitted goes on."""
        self.is_draining = True

    def go_on(self) -> None:
        """Takes `stop` back; nothing once the server ends."""
        self.is_draining = self.is_ending

    def end(self) -> None:
        """Refuses new requests for good."""
        self.is_draining = self.is_ending = True

    def find(self, name: str | None, is_background: bool) -> tuple[ModelHost, Admission]:
        """The host of that name and its queue; RequestError if it takes no requests."""
        host = self._fleet.hosts.exact(name)
        return host, self.of(host, is_background)

    def of(self, host: ModelHost, is_background: bool = False) -> Admission:
        """The queue before a host; RequestError if that takes no requests.

        The background has one of its own, so that it takes nobody's place.
        """
        self.check_open(host)
        queue = self._of(host, is_background)
        queue.set_schedule(host.tenants.eta.schedule, host.tenants.eta.tokens_per_s)
        return queue

    def check_open(self, host: ModelHost) -> None:
        """RequestError if this model takes no requests."""
        if host is self._fleet.pinned and host.engine.state == "dead":
            raise RequestError("engine_failed", "The engine stopped for good.", retry_after_s=30)
        if self.is_draining:
            raise RequestError("server_shutdown", "The server is shutting down.", retry_after_s=5)

    def resume(self, host: ModelHost, is_background: bool = False) -> Place:
        """The place of a stream that was admitted before, whatever the bounds are now."""
        return self._of(host, is_background).resume()

    def _of(self, host: ModelHost, is_background: bool) -> Admission:
        queue = self._by_host.get((host, is_background))
        if queue is None:
            queue = self._by_host[host, is_background] = Admission(self._config, self.limits)
        return queue

    def _forget(self, host: ModelHost) -> None:
        for is_background in (False, True):
            self._by_host.pop((host, is_background), None)
