"""Measures a server's health check in a separate process, which a busy attacker does not delay.

`python -m stress.attack.prober PORT` prints the number of each request when it is sent, and again
with the seconds that the answer took, or with "-" if the server did not answer.
"""

import asyncio
import itertools
import sys
import time

from stress.http import Call, exchange

_PERIOD_S = 0.1
_GIVES_UP_S = 60.0


async def _probe_once(port: int, number: int) -> None:
    print(number, flush=True)
    call = Call("GET", "/health/live", silence_s=_GIVES_UP_S)
    made = await exchange(port, call)
    print(number, time.monotonic() - made.began if made.got.status else "-", flush=True)


async def _probe(port: int) -> None:
    """Sends ten requests a second, even if earlier requests have not been answered."""
    async with asyncio.TaskGroup() as asking:
        for number in itertools.count():
            asking.create_task(_probe_once(port, number))
            await asyncio.sleep(_PERIOD_S)


if __name__ == "__main__":
    asyncio.run(_probe(int(sys.argv[1])))
