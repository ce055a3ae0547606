"""A gateway's lease, renewed while it lives, and the gateways that have let theirs run out.

Leases decide when streams change hands, never who may write: that is the epoch's.
"""

import asyncio
from collections.abc import Awaitable, Callable

from headrace.streams.stores import redis_scripts as scripts
from headrace.streams.stores.redis_link import ANSWER_S, LOST, RETRY_S, Link

LEASE_S = 6.0
RENEW_S = 1.0
NUM_CHECKS = 3  # in a row that find no lease, before a gateway counts as gone
"""After an outage of Redis all leases have run out, and the living ones renew theirs first."""


class GatewayLease:
    """`run` is its task; it also notices when the server cannot write, and when it can again.

    `on_gone` is called with a gateway that has gone, until it has no streams. `on_doubt` is called
    when the gateway may not write just the streams it believes: its lease had run out, or the
    server counts others. `count` says how many it believes to write; None: it is changing.
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
        self.about: Callable[[], bytes] = bytes  # what others are told of this gateway
        self._num_missed: dict[str, int] = {}  # checks in a row, by gateway
        self._num_odd = 0  # checks in a row in which the server counted other streams
        self._has_run = False

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                await self._renew()
            except LOST as error:
                self._num_missed.clear()
                self._link.missed(min(loop.time() - began, ANSWER_S) + RETRY_S, error)
                await asyncio.sleep(RETRY_S)
            else:
                await asyncio.sleep(RENEW_S)

    async def _renew(self) -> None:
        lease_ms = int(LEASE_S * 1000)
        before = self._count()
        mine = (self._gateway, lease_ms, self.about())
        had, number, missing = await self._link.attempt(scripts.RENEW, *mine)
        self._link.heard()
        is_odd = before is not None and number != before and self._count() == before
        self._num_odd = self._num_odd + 1 if is_odd else 0
        if (self._has_run and not had) or self._num_odd >= NUM_CHECKS:
            self._num_odd = 0
            await self._on_doubt()
        self._has_run = True
        gone = [gateway.decode() for gateway in missing]
        self._num_missed = {name: self._num_missed.get(name, 0) + 1 for name in gone}
        for name, number in self._num_missed.items():
            if number >= NUM_CHECKS:
                await self._on_gone(name)
