"""Tests when a gateway may trust its lease."""

import asyncio
from typing import Any

import pytest

from headrace.streams.stores import redis_lease
from headrace.streams.stores.redis_lease import GatewayLease
from tools.harness.eventually import settle


class FakeLink:
    """A fake link that answers each renewal with the next of `had` or raises it."""

    def __init__(self, *had: int | TimeoutError) -> None:
        self._had = [*had]

    async def attempt(self, *words: Any) -> tuple[int, int, list[bytes]]:
        if not self._had:
            await asyncio.Event().wait()
        if isinstance(had := self._had.pop(0), TimeoutError):
            raise had
        return had, 0, []

    def heard(self) -> None:
        """Do nothing: the server can write."""

    def missed(self, seconds: float, error: BaseException) -> None:
        """Do nothing: the server did not answer."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_lease, "RENEW_S", 0.0)
    monkeypatch.setattr(redis_lease, "RETRY_S", 0.0)


async def compared(*had: int | TimeoutError, num_failures: int = 0) -> int:
    """Return how often the gateway has compared its streams during these renewals."""
    num = 0

    async def compare() -> None:
        nonlocal num
        num += 1
        if num <= num_failures:
            raise TimeoutError

    async def take_from(gateway: str) -> None:
        raise AssertionError("no gateway is dead")

    lease = GatewayLease(FakeLink(*had), "g", lambda: 0, take_from, compare)  # type: ignore[arg-type]
    renewing = asyncio.create_task(lease.run())
    await settle()
    renewing.cancel()
    assert lease.is_held
    return num


async def test_a_gateway_that_never_lost_its_lease_compares_nothing() -> None:
    assert await compared(0, 1, 1) == 0


async def test_a_lease_that_had_expired_is_held_again_after_a_comparison() -> None:
    assert await compared(0, 0, 1) == 1


async def test_a_failed_comparison_is_repeated() -> None:
    assert await compared(0, 0, 1, num_failures=1) == 2


async def test_streams_are_compared_after_the_answer_to_a_renewal_was_lost() -> None:
    assert await compared(0, TimeoutError(), 1) == 1
