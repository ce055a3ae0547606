import asyncio

import pytest

from headrace.workers.job_queue import LARGE, MAX_LARGE_OF_KEY, OWNER, JobQueue, QueuedJob
from headrace_common.errors import RequestError
from tools.harness.eventually import settle

SMALL = 100


def put(line: JobQueue, owner: str, *sizes: int) -> list[QueuedJob]:
    OWNER.set(owner)
    jobs = [QueuedJob(b"", [bytes(size)]) for size in sizes]
    for job in jobs:
        line.put(job)
        job.done.add_done_callback(asyncio.Future.exception)  # nobody waits for most of them
    return jobs


async def taken(line: JobQueue, number: int, takes_large: bool = True) -> str:
    """Take the next jobs, each finished before the following one, and return their owners."""
    owners = ""
    for _ in range(number):
        job = await line.next(takes_large)
        owners += job.owner
        line.finish(job)
    return owners


async def has_none(line: JobQueue) -> bool:
    waiting = asyncio.create_task(line.next(takes_large=True))
    await settle()
    waiting.cancel()
    return not waiting.done()


async def test_smaller_jobs_of_an_owner_run_first_and_similar_ones_in_order() -> None:
    line = JobQueue(2)
    put(line, "a", 3_000, 20, 60_000, 40_000, 4_000)
    sizes = []
    for _ in range(5):
        sizes.append((await line.next(takes_large=False)).size)
        line.finish(next(iter(line._running)))
    assert sizes == [3_000, 20, 4_000, 60_000, 40_000]


@pytest.mark.parametrize("size", [SMALL, LARGE])
async def test_owners_take_turns(size: int) -> None:
    line = JobQueue(3)
    put(line, "a", *[size] * 4)
    put(line, "b", *[size] * 2)
    put(line, "c", size)
    assert await taken(line, 7) == "abcabaa"


async def test_waiting_large_jobs_are_limited_by_their_bytes() -> None:
    line = JobQueue(2, max_bytes=2 * LARGE)
    first, _ = put(line, "", LARGE, LARGE)
    with pytest.raises(RequestError) as refused:
        put(line, "", LARGE)
    assert refused.value.code == "server_overloaded"
    put(line, "", SMALL)
    line.leave(first)
    put(line, "", LARGE)
    put(JobQueue(2, max_bytes=1), "", LARGE)


async def test_a_key_runs_one_large_job_at_a_time_while_its_small_jobs_pass() -> None:
    line = JobQueue(3)
    put(line, "a", LARGE, LARGE, SMALL)
    first = await line.next(takes_large=True)
    put(line, "b", LARGE)
    assert (await line.next(takes_large=True)).owner == "b"
    assert (await line.next(takes_large=True)).size == SMALL
    assert await has_none(line)
    line.finish(first)
    assert (await line.next(takes_large=True)).size == LARGE


async def test_a_key_leaves_a_worker_for_the_small_jobs_of_others() -> None:
    line = JobQueue(3)
    put(line, "a", SMALL, SMALL, SMALL)
    for _ in range(2):
        await line.next(takes_large=False)
    assert await has_none(line)
    put(line, "b", SMALL)
    assert (await line.next(takes_large=False)).owner == "b"


async def test_without_keys_small_jobs_use_all_workers_and_no_key_limit_applies() -> None:
    line = JobQueue(2)
    put(line, "", *[LARGE] * 100, SMALL, SMALL)
    assert [(await line.next(takes_large=False)).size for _ in range(2)] == [SMALL, SMALL]


async def test_only_a_key_with_too_many_queued_large_jobs_is_refused() -> None:
    line = JobQueue(3)
    put(line, "a", *[LARGE] * (1 + MAX_LARGE_OF_KEY))
    for _ in range(2):
        with pytest.raises(RequestError, match=r"8 bodies of 64 KiB or more .*; wait for") as told:
            put(line, "a", LARGE)
        assert told.value.kind.status == 429
        await line.next(takes_large=True)  # which leaves no more room
        put(line, "a", SMALL)
        put(line, "b", LARGE)


async def test_a_job_that_leaves_the_queue_makes_room() -> None:
    line = JobQueue(3)
    jobs = put(line, "a", *[LARGE] * (1 + MAX_LARGE_OF_KEY))
    for job in jobs:
        line.leave(job)
    assert not len(line) and await has_none(line)
    put(line, "a", *[LARGE] * (1 + MAX_LARGE_OF_KEY))


async def test_a_closed_queue_refuses_waiting_and_new_jobs() -> None:
    line = JobQueue(2)
    (job,) = put(line, "a", SMALL)
    line.close()
    with pytest.raises(RequestError, match="shutting down"):
        await job.done
    with pytest.raises(RequestError, match="shutting down"):
        put(line, "a", SMALL)
