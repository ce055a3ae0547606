"""Several things awaited at once."""

import asyncio

from headrace.race import race


def test_what_is_slower_is_cancelled_and_what_was_given_goes_on() -> None:
    async def run() -> None:
        given = asyncio.get_running_loop().create_future()
        async with race(asyncio.sleep(0, "first"), asyncio.sleep(1000), given) as (first, slow, _):
            assert first.result() == "first"
            assert not slow.done()
        assert slow.cancelled()
        assert not given.done()

    asyncio.run(run())
