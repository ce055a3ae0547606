"""Decides which requests may enter the queue, and when a refused client should retry.

All functions take the time as an argument, and no function awaits. So no other task can run
between the check of a request and the request's entry into the queue.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple
from weakref import WeakKeyDictionary

from headrace.fleet.fleet import Fleet
from headrace.fleet.model_host import ModelHost
from headrace.fleet.queue_eta import QueueEta
from headrace.workers.input_memory import HeldInput, InputMemory
from headrace_common.config.settings import StreamConfig
from headrace_common.errors import RequestError
from headrace_common.messages import Ready

# If --max-num-queued-tokens is unset, processing the prompts in the queue may take this many
# seconds.
_AUTO_S = 600.0
# The rate in prompt tokens per second that is assumed until the engine has measured the real rate.
_UNMEASURED = 500.0
_MAX_PROMISES = 1000
# The retry time is slightly later than the estimate: a retry that comes too early is refused.
_MARGIN, _LEAST_S = 1.1, 0.1
# A place is reserved for a refused client from `_EARLY_S` before the promised time until `_LATE_S`
# after the promised time.
_EARLY_S, _LATE_S = 5.0, 5.0
_MINUTE_S = 60.0


class Demand(NamedTuple):
    """The resources that a request needs.

    Two demands with equal owner and digest belong to the same request, which was sent twice.
    """

    owner: str
    digest: bytes
    num_choices: int
    # Tokens of the request's prompts; 0 until the prompts are tokenized.
    num_tokens: int = 0


class Capacity(NamedTuple):
    """The engine's maximum number of sequences and maximum context length in tokens."""

    max_num_seqs: int
    max_model_len: int

    @classmethod
    def of(cls, ready: Ready | None) -> "Capacity":
        return cls(ready.max_num_seqs, ready.max_model_len) if ready else cls(0, 0)


class QueueTicket:
    """Counts one admitted request in the queue until `close` is called.

    The request's stream or vector batch reports every change with `update`.
    """

    def __init__(self, admission: "Admission", owner: str) -> None:
        self._admission = admission
        self._owner = owner
        self._counts = (0, 0, 0)
        self._input: HeldInput | None = None

    @property
    def others_wait(self) -> bool:
        """Return whether choices of other requests are waiting."""
        return self._admission.num_waiting > self._counts[1]

    def take(self, held: HeldInput) -> None:
        """Count the memory of the request's input, instead of `held`."""
        self._input = held.move()

    def update(self, num_live: int, num_waiting: int, num_tokens: int) -> None:
        """Set the request's current counts.

        `num_live` counts unfinished choices, `num_waiting` counts waiting choices, and `num_tokens`
        counts the prompt tokens of the waiting choices.
        """
        counts = (num_live, num_waiting, num_tokens)
        if counts != self._counts:
            self._admission.count(self._owner, counts, self._counts)
            self._counts = counts

    def leave(self, num_bytes: int) -> None:
        """Leave the queue, but continue to count `num_bytes` of the input."""
        self.update(0, 0, 0)
        if self._input is not None:
            self._input.shrink(num_bytes)

    def close(self) -> None:
        self.update(0, 0, 0)
        if self._input is not None:
            self._input.close()


class _Allowance:
    """The allowance of an API key, kept as a bucket that refills continuously.

    A full bucket holds one minute's allowance. The bucket can be overdrawn, because some amounts
    are known only after their use.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        self._rate = per_minute / _MINUTE_S
        self._most = self._left = float(per_minute)
        self._at = now

    def seconds_until(self, amount: float, now: float) -> float:
        """Return the seconds until the bucket holds `amount`.

        If `amount` exceeds a full bucket, return the seconds until the bucket is full.
        """
        self._left = min(self._most, self._left + (now - self._at) * self._rate)
        self._at = now
        return max(0.0, (min(amount, self._most) - self._left) / self._rate)

    def use(self, amount: float) -> None:
        self._left -= amount


class KeyLimits:
    """The per-minute limits of all API keys, shared by all queues of a server."""

    def __init__(self, config: StreamConfig) -> None:
        self._config = config
        self.has_any = bool(config.key_requests_per_minute or config.key_tokens_per_minute)
        self._requests: dict[str, _Allowance] = {}
        self._tokens: dict[str, _Allowance] = {}

    def check(self, demand: Demand, now: float) -> None:
        """Raise RequestError with the waiting time if the key has used up its allowance."""
        for what, limit, allowance, amount in self._allowances(demand, now):
            wait_s = allowance.seconds_until(max(1, amount), now)
            if wait_s > 0:
                raise RequestError(
                    "rate_limit_exceeded",
                    f"This key has used up its {limit} {what} a minute (--key-{what}-per-minute); "
                    f"try again in {wait_s:.1f} s.",
                    retry_after_s=wait_s,
                ).noting(limit=limit)

    def _allowances(self, demand: Demand, now: float) -> Iterable[tuple[str, int, _Allowance, int]]:
        """Yield a tuple for each limit that is set.

        The tuple contains the limit's name and value, the key's bucket, and the amount that the
        request takes.
        """
        config, owner = self._config, demand.owner
        for what, kept, limit, amount in (
            ("requests", self._requests, config.key_requests_per_minute, 1),
            ("tokens", self._tokens, config.key_tokens_per_minute, demand.num_tokens),
        ):
            if limit:
                if owner not in kept:
                    kept[owner] = _Allowance(limit, now)
                yield what, limit, kept[owner], amount

    def use(self, demand: Demand, now: float) -> None:
        """Charge an admitted request to its key."""
        for _, _, allowance, amount in self._allowances(demand, now):
            allowance.use(amount)

    def used(self, owner: str, num_tokens: int) -> None:
        """Charge a key for tokens that could not be counted at admission, such as generated
        tokens.
        """
        if (allowance := self._tokens.get(owner)) is not None:
            allowance.use(num_tokens)


class RetryPromise(NamedTuple):
    """Records that a refused client was told to retry this demand at time `by`."""

    by: float
    num_choices: int
    num_tokens: int


class Admission:
    """Applies the limits of one queue. The limits count choices (n per prompt) and prompt tokens.

    `eta` estimates when waiting requests will start and how fast prompts are processed.

    A refused client gets a RetryPromise: until shortly after the promised time, a place is reserved
    for the client. Otherwise, a new client could take the place first.

    At most half of the queue is reserved, so that clients that never return cannot block the queue.

    If the server has API keys, the requests of one key may fill at most half of the queue. Then a
    busy key cannot keep out all other keys.
    """

    def __init__(self, config: StreamConfig, limits: KeyLimits, eta: QueueEta) -> None:
        self.num_live = self.num_waiting = self.num_tokens = 0
        # The waiting choices and the prompt tokens of each API key.
        self._waiting_by_key = Counter[str]()
        self._tokens_by_key = Counter[str]()
        self._config = config
        self._limits = limits
        self._eta = eta
        self._promises: dict[tuple[str, bytes], RetryPromise] = {}

    def check(self, demand: Demand, capacity: Capacity, now: float) -> None:
        """Raise RequestError if the request cannot enter the queue.

        `demand.num_tokens` is 0 if the prompts are not tokenized yet.
        """
        if self._limits.has_any:
            self._limits.check(demand, now)
        if demand.owner:
            self._check_share(demand, capacity, now)
        bound = self._config.max_num_queued_reqs
        num_reserved = 0
        if self._promises and self.num_waiting < bound:
            num_reserved = min(self._num_expected(demand, now), bound // 2)
        if self.num_waiting + num_reserved >= bound and self.num_live >= capacity.max_num_seqs:
            kept = (
                f", {num_reserved} places are reserved for clients that were told to retry"
                if num_reserved
                else ""
            )
            reason = f"{self.num_waiting} choices are waiting{kept}, and --max-num-queued-reqs is "
            error = self._overloaded(f"{reason}{bound}", demand, capacity, now)
            raise error.noting(waiting=self.num_waiting, limit=bound)
        if not self.num_tokens:
            return
        most = self._max_tokens(capacity)
        if self.num_tokens + max(1, demand.num_tokens) > most:
            reason = f"{self.num_tokens} prompt tokens are waiting, this request adds "
            reason += f"{demand.num_tokens or 'more'}, and --max-num-queued-tokens is {most}"
            error = self._overloaded(reason, demand, capacity, now)
            raise error.noting(waiting_tokens=self.num_tokens, limit=most)

    def _check_share(self, demand: Demand, capacity: Capacity, now: float) -> None:
        """Raise RequestError if the requests of this key fill half of the queue.

        A refused client gets no RetryPromise, because a promise would reserve a place in the other
        half.
        """
        most = (self._config.max_num_queued_reqs + 1) // 2
        num_waiting = self._waiting_by_key[demand.owner]
        num_tokens = self._tokens_by_key[demand.owner]
        most_tokens = self._max_tokens(capacity) // 2
        if num_waiting and num_waiting >= most and self.num_live >= capacity.max_num_seqs:
            reason = f"{num_waiting} choices of this key are waiting, and one key may have {most}"
            flag = "--max-num-queued-reqs"
        elif num_tokens and num_tokens + max(1, demand.num_tokens) > most_tokens:
            reason = f"{num_tokens} prompt tokens of this key are waiting, this request adds "
            reason += f"{demand.num_tokens or 'more'}, and one key may have {most_tokens}"
            flag = "--max-num-queued-tokens"
        else:
            return
        num_starts = max(1, num_waiting - most + 1)
        wait_s = self._retry_s(self._eta.schedule.seconds_until(num_starts, now))
        message = f"{reason} (half of {flag}); try again in {wait_s:.1f} s."
        error = RequestError("server_overloaded", message, retry_after_s=wait_s)
        raise error.noting(waiting=num_waiting, waiting_tokens=num_tokens)

    def must_wait(self, capacity: Capacity) -> bool:
        """Return whether the queue has more unfinished choices than the engine can run."""
        return self.num_live > capacity.max_num_seqs

    def enter(self, demand: Demand, capacity: Capacity, now: float) -> QueueTicket:
        """Check a request and enter the request into the queue, as one atomic operation."""
        self.check(demand, capacity, now)
        self._promises.pop(demand[:2], None)
        if self._limits.has_any:
            self._limits.use(demand, now)
        ticket = QueueTicket(self, demand.owner)
        ticket.update(demand.num_choices, demand.num_choices, demand.num_tokens)
        return ticket

    def count(self, owner: str, now: tuple[int, int, int], before: tuple[int, int, int]) -> None:
        """Add the difference between a ticket's new and old counts to the queue's counts."""
        live, waiting, tokens = (new - old for new, old in zip(now, before, strict=True))
        self.num_live += live
        self.num_waiting += waiting
        self.num_tokens += tokens
        for by_key, change in ((self._waiting_by_key, waiting), (self._tokens_by_key, tokens)):
            by_key[owner] += change
            if not by_key[owner]:
                del by_key[owner]

    # The methods below estimate when a refused client should retry.

    @property
    def _tokens_per_s(self) -> float:
        return self._eta.tokens_per_s or _UNMEASURED

    def _max_tokens(self, capacity: Capacity) -> int:
        auto = max(capacity.max_model_len, int(_AUTO_S * self._tokens_per_s))
        most = self._config.max_num_queued_tokens
        return auto if most is None else most

    def _overloaded(
        self, reason: str, demand: Demand, capacity: Capacity, now: float
    ) -> RequestError:
        wait_s = self._seconds_until_it_fits(demand, capacity, now)
        client = demand[:2]
        if len(self._promises) < _MAX_PROMISES or client in self._promises:
            self._promises[client] = RetryPromise(
                now + wait_s, demand.num_choices, demand.num_tokens
            )
        message = f"{reason}; there should be room in {wait_s:.1f} s."
        return RequestError("server_overloaded", message, retry_after_s=wait_s)

    def _seconds_until_it_fits(self, demand: Demand, capacity: Capacity, now: float) -> float:
        """Return the estimated seconds until enough earlier requests have started.

        Earlier requests are all waiting requests, and the requests of other clients that were
        refused and told when to retry.
        """
        promises = self._outstanding(demand, now)
        num_before = self.num_waiting + len(promises)
        num_starts = num_before - self._config.max_num_queued_reqs + 1
        num_tokens = self.num_tokens + demand.num_tokens + sum(p.num_tokens for p in promises)
        excess = num_tokens - self._max_tokens(capacity)
        if excess > 0:
            num_more = self._eta.schedule.num_starts_for(excess, num_before, now)
            num_starts = max(num_starts, num_more)
        return self._retry_s(self._eta.schedule.seconds_until(max(1, num_starts), now))

    def _retry_s(self, wait_s: float | None) -> float:
        """Return when to retry if there is room in `wait_s`; None means that this is unknown."""
        if wait_s is None:
            wait_s = self.num_tokens / self._tokens_per_s + 1.0
        return _MARGIN * wait_s + _LEAST_S

    def _num_expected(self, demand: Demand, now: float) -> int:
        """Return how many other clients with a promise are expected to retry around now.

        Returns 0 if this client has a promise too: the promises of other clients must not delay
        this client again.
        """
        if demand[:2] in self._promises:
            return 0
        return sum(promise.by - _EARLY_S <= now for promise in self._outstanding(demand, now))

    def _outstanding(self, demand: Demand, now: float) -> list[RetryPromise]:
        """Delete expired promises; return the remaining promises of other clients."""
        late = [client for client, promise in self._promises.items() if promise.by + _LATE_S < now]
        for client in late:
            del self._promises[client]
        return [promise for client, promise in self._promises.items() if client != demand[:2]]


class Queues:
    """Holds two queues for each model: a normal queue and a queue for background requests.

    While the server shuts down, all requests are refused.
    """

    def __init__(self, config: StreamConfig, fleet: Fleet) -> None:
        self.limits = KeyLimits(config)
        self.inputs = InputMemory(config.max_total_input_bytes)
        self.is_draining = self.is_ending = False
        self._config = config
        self._fleet = fleet
        # A host's queues are freed together with the host: after the host was removed or replaced
        # and the host's streams have ended.
        self._by_host = WeakKeyDictionary[ModelHost, tuple[Admission, Admission]]()

    def stop(self) -> None:
        """Refuse new requests, but let admitted requests continue."""
        self.is_draining = True

    def admit_again(self) -> None:
        """Undo `stop`, unless `end` was called."""
        self.is_draining = self.is_ending

    def end(self) -> None:
        """Refuse new requests permanently."""
        self.is_draining = self.is_ending = True

    def of(self, host: ModelHost, is_background: bool = False) -> Admission:
        """Return the queue of a host. Raises RequestError if the host takes no requests.

        Background requests have a separate queue, so that background requests never fill the normal
        queue.
        """
        self.check_open(host)
        queues = self._by_host.get(host)
        return self._open(host, is_background) if queues is None else queues[is_background]

    def check_open(self, host: ModelHost) -> None:
        """Raise RequestError if this model takes no requests."""
        if host is self._fleet.pinned and host.engine.state == "dead":
            raise RequestError("engine_failed", "The engine stopped for good.", retry_after_s=30)
        if self.is_draining:
            raise RequestError("server_shutdown", "The server is shutting down.", retry_after_s=5)

    def resume(self, host: ModelHost, owner: str, is_background: bool = False) -> QueueTicket:
        """Return a ticket for a stream that was admitted earlier, without checking the limits
        again.
        """
        queues = self._by_host.get(host)
        return QueueTicket(
            self._open(host, is_background) if queues is None else queues[is_background], owner
        )

    def _open(self, host: ModelHost, is_background: bool) -> Admission:
        config, limits, eta = self._config, self.limits, host.users.eta
        queues = Admission(config, limits, eta), Admission(config, limits, eta)
        self._by_host[host] = queues
        return queues[is_background]
