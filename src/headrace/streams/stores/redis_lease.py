"""Renews this gateway's lease, and finds gateways whose leases have expired.

The lease only decides when other gateways take over the streams of a gateway. The epoch of a
stream decides which gateway may write the stream.
"""

import asyncio
from collections.abc import Awaitable, Callable

from headrace.streams.stores import redis_scripts as scripts
from headrace.streams.stores.redis_link import ANSWER_S, LOST, RETRY_S, Link

LEASE_S = 6.0
RENEW_S = 1.0
# A gateway counts as dead after this many consecutive checks that found no lease.
NUM_CHECKS = 3
"""After an outage of Redis all leases have expired, so running gateways need time to renew their
leases.
"""


class GatewayLease:
    """Renews the lease and notices whether Redis can write; `run` is its task.

    `on_gone` is called repeatedly with the name of a dead gateway, until the dead gateway has no
    streams left.

    `on_doubt` is called if this gateway's list of its streams may be wrong. There are three
    reasons: this gateway's lease had expired, an answer of Redis was lost, or Redis and `count`
    report different numbers of streams. `count` returns how many streams this gateway writes, or
    None while the number is changing.

    The two numbers must differ in several consecutive checks, because an append or a claim in
    progress changes the two numbers at slightly different times.
    """

    def __init__(
        self,
        link: Link,
        gateway: str,
        count: Callable[[], int | None],
        on_gone: Callable[[str], Awaitable[None]],
        on_doubt: Callable[[], Awaitable[None]],
    ) -> None:
        self._link = link
        self._gateway = gateway
        self._count = count
        self._on_gone = on_gone
        self._on_doubt = on_doubt
        # Returns the data that other gateways read about this gateway.
        self._about: Callable[[], bytes] = bytes
        # The number of consecutive checks without a lease, by gateway.
        self._num_missed: dict[str, int] = {}
        # The number of consecutive checks in which Redis counted a different number of streams.
        self._num_odd = 0
        self._has_run = False
        # Whether `on_doubt` must succeed before the lease counts as held.
        self._has_doubt = False
        # The lease holds at least until this time of the event loop.
        self._ends_at = 0.0

    @property
    def is_held(self) -> bool:
        return asyncio.get_running_loop().time() < self._ends_at

    def tell(self, about: Callable[[], bytes]) -> None:
        """Publish the result of `about` with each renewal, for the other gateways."""
        self._about = about

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                await self._renew()
            except LOST as error:
                self._num_missed.clear()
                # The lease may have expired and been renewed without an answer.
                self._has_doubt = self._has_run
                self._link.missed(min(loop.time() - began, ANSWER_S) + RETRY_S, error)
                await asyncio.sleep(RETRY_S)
            else:
                await asyncio.sleep(RENEW_S)

    async def _renew(self) -> None:
        lease_ms = int(LEASE_S * 1000)
        before = self._count()
        mine = (self._gateway, lease_ms, self._about())
        asked_at = asyncio.get_running_loop().time()
        had, number, missing = await self._link.attempt(scripts.RENEW, *mine)
        self._link.heard()
        is_odd = before is not None and number != before and self._count() == before
        self._num_odd = self._num_odd + 1 if is_odd else 0
        self._has_doubt |= (self._has_run and not had) or self._num_odd >= NUM_CHECKS
        if self._has_doubt:
            self._num_odd = 0
            await self._on_doubt()
            self._has_doubt = False
        self._ends_at = asked_at + LEASE_S
        self._has_run = True
        gone = [gateway.decode() for gateway in missing]
        self._num_missed = {name: self._num_missed.get(name, 0) + 1 for name in gone}
        for name, number in self._num_missed.items():
            if number >= NUM_CHECKS:
                await self._on_gone(name)
