"""Tests the memory log: order, cursors, waiting readers and refused appends."""

import asyncio

import pytest

from headrace.streams.events import AnyEvent, Error, Tokens
from headrace.streams.log import LogConflict, MemoryLog, follow
from tools.harness.eventually import settle


def tokens(seq: int) -> Tokens:
    return Tokens(seq=seq, at_ms=seq, choice=0, ids=(seq,))


def end(seq: int) -> Error:
    return Error(seq=seq, at_ms=0, code="x", type="x", message="x", status=500, retryable=False)


async def seqs(log: MemoryLog, after: int = -1) -> list[int]:
    return [event.seq async for event in follow(log, after)]


async def test_a_reader_sees_every_event_after_its_cursor_up_to_the_end() -> None:
    log = MemoryLog()
    await log.append(0, [tokens(0), tokens(1)])
    await log.append(2, [end(2)])
    assert [await seqs(log), await seqs(log, 0), await seqs(log, 1)] == [[0, 1, 2], [1, 2], [2]]


async def test_waiting_readers_get_events_appended_later() -> None:
    log = MemoryLog()
    readers = [asyncio.create_task(seqs(log)) for _ in range(3)]
    for seq in range(5):
        await settle()
        await log.append(seq, [tokens(seq)])
    await log.append(5, [end(5)])
    assert (await asyncio.gather(*readers)) == [[0, 1, 2, 3, 4, 5]] * 3


@pytest.mark.parametrize(
    ("already", "expected"), [([], 1), ([tokens(0)], 0), ([tokens(0), end(1)], 2)]
)
def test_an_append_that_does_not_continue_the_log_is_refused(
    already: list[AnyEvent], expected: int
) -> None:
    async def run() -> None:
        log = MemoryLog()
        await log.append(0, already)
        await log.append(expected, [tokens(expected)])

    with pytest.raises(LogConflict):
        asyncio.run(run())


async def test_a_cancelled_reader_leaves_no_waiter_behind() -> None:
    log = MemoryLog()
    reader = asyncio.create_task(seqs(log))
    await settle()
    reader.cancel()
    await asyncio.wait([reader])
    assert len(log.tail._waiting) == 0


async def test_a_reader_cancelled_just_before_an_append_does_not_break_it() -> None:
    log = MemoryLog()
    reader = asyncio.create_task(seqs(log))
    await settle()
    reader.cancel()
    await log.append(0, [tokens(0)])
    await asyncio.wait([reader])
    assert reader.cancelled() and log.next_seq == 1
