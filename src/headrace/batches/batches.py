"""All batches of a server: made, found, stopped, and each run by one server at a time."""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from headrace.batches.answers import LineAnswers, LineCheck
from headrace.batches.files import Files
from headrace.batches.records import (
    BATCH,
    OPEN,
    STOP,
    BatchRecord,
    encode_record,
    in_slices,
    new_id,
    now_s,
    read_record,
)
from headrace.batches.run import BatchRun, Bench
from headrace.batches.shelf import ClaimLost, Shelf
from headrace.streams.store import StoreStalled
from headrace.workers.pool import Work
from headrace_common.config.settings import ServerConfig
from headrace_common.errors import RequestError

logger = logging.getLogger(__name__)

MAX_OPEN = 100
"""Batches that one key may have unfinished."""
MAX_ENDED = 1000
"""Ended ones that are kept of a key; before another begins, the oldest leave with their results."""
_LOOK_S = 1.0
_SWEEP_EVERY = 60
_PREFIXES = {"openai": "batch_", "anthropic": "msgbatch_"}


class BatchWish(NamedTuple):
    """A batch that is asked for, of lines in a file of the key."""

    owner: str
    api: str
    route: str
    input_id: str
    window_s: int
    metadata: Mapping[str, str] = {}


class Batches:
    """`run` is its one task, and owns those of all batches that this server works on."""

    def __init__(
        self, shelf: Shelf, config: ServerConfig, work: Work, answers: LineAnswers
    ) -> None:
        self.files = Files(shelf, config.batches)
        self._records = shelf.records
        self._answers = answers
        self._config = config.batches
        most = config.http.max_body_bytes
        check = LineCheck(shelf.blobs, work, answers, most)
        self._bench = Bench(shelf, self.files, answers, check, config.batches.max_batch_lines, most)
        self._runs: dict[str, BatchRun] = {}
        self._news = asyncio.Event()

    # what clients ask

    @property
    def max_lines(self) -> int:
        """The lines that a batch may have."""
        return self._config.max_batch_lines

    async def create(self, wish: BatchWish) -> BatchRecord:
        """RequestError if the key has too many unfinished ones, or no such file."""
        await self.files.get(wish.owner, wish.input_id)
        batches = await self.of(wish.owner)
        num_open = sum(not batch.has_ended for batch in batches)
        if num_open >= MAX_OPEN:
            message = f"This key has {num_open} unfinished batches, and {MAX_OPEN} are taken; "
            message += "wait for one to end, or cancel it."
            raise RequestError("quota_exceeded", message)
        for oldest in [batch for batch in batches if batch.has_ended][MAX_ENDED - 1 :]:
            await self.remove(oldest)
        now = now_s()
        batch = BatchRecord(
            new_id(_PREFIXES[wish.api]), wish.owner, wish.api, wish.route, wish.input_id, now,
            wish.window_s, at={"validating": now}, metadata=wish.metadata,
        )  # fmt: skip
        await self._records.put(BATCH, batch.id, encode_record(batch))
        await self._records.put(OPEN, batch.id, batch.id.encode())
        self._news.set()
        return batch

    async def of(self, owner: str, api: str = "") -> list[BatchRecord]:
        """The batches of a key, newest first, of one API or of all."""
        batches = in_slices(await self._records.all(BATCH), BatchRecord)
        mine = [it async for it in batches if it.owner == owner and api in ("", it.api)]
        return sorted(mine, key=lambda batch: (batch.created_at, batch.id), reverse=True)

    async def get(self, owner: str, id: str, api: str) -> BatchRecord:
        """RequestError if this key has no such batch."""
        batch = read_record(await self._records.get(BATCH, id), BatchRecord)
        if batch is None or (batch.owner, batch.api) != (owner, api):
            raise RequestError(
                "batch_not_found", "There is no such batch, or it has expired.", "id"
            )
        return batch

    async def cancel(self, batch: BatchRecord) -> BatchRecord:
        """Has it stopped, by whichever server works on it. Nothing if it has ended."""
        if batch.has_ended or batch.status == "cancelling":
            return batch
        await self._records.put(STOP, batch.id, b"canceled")
        return batch.moved("cancelling")

    async def remove(self, batch: BatchRecord) -> None:
        """Forgets an ended batch with its lines and results; RequestError if it has not ended."""
        if not batch.has_ended:
            message = "The batch has not ended; cancel it first, and wait until it has."
            raise RequestError("batch_not_ended", message, "id")
        own = (batch.output_id, batch.error_id)
        for id in (*own, batch.input_id if batch.api == "anthropic" else None):
            if id is not None:
                await self.files.remove(id)
        await self._records.remove(BATCH, batch.id)

    async def remove_file(self, owner: str, id: str) -> None:
        """RequestError if the key has no such file, or a batch still needs it."""
        file = await self.files.get(owner, id)
        if file.id in await self._in_use():
            message = "A batch that has not ended needs this file; cancel that first."
            raise RequestError("file_in_use", message, "id")
        await self.files.remove(file.id)

    # what runs

    async def run(self) -> None:
        """Works on every unfinished batch that no other server has."""
        async with asyncio.TaskGroup() as tasks:
            number = 0
            while True:
                try:
                    await self._look(tasks)
                    if number % _SWEEP_EVERY == 0:
                        await self._sweep()
                except StoreStalled as stalled:
                    logger.warning("%s", stalled)
                number += 1
                await self._wait()

    async def _wait(self) -> None:
        self._news.clear()
        try:
            async with asyncio.timeout(_LOOK_S):
                await self._news.wait()
        except TimeoutError:
            pass

    async def _look(self, tasks: asyncio.TaskGroup) -> None:
        for id in sorted(
            packed.decode(errors="replace") for packed in await self._records.all(OPEN)
        ):
            if id in self._runs or not await self._records.claim(id):
                continue
            batch = read_record(await self._records.get(BATCH, id), BatchRecord)
            if batch is None or batch.has_ended:  # it ended since, or a kill left it listed
                for kind in (OPEN, STOP):
                    await self._records.remove(kind, id)
                continue
            run = BatchRun(self._bench, batch, partial(self._share, id))
            self._runs[id] = run
            tasks.create_task(self._run(run), name="batch")

    async def _run(self, run: BatchRun) -> None:
        try:
            await run.run()
        except* ClaimLost:
            logger.warning("The claim on a batch was lost; whoever has it next goes on with it")
        except* Exception:  # one batch, and not the server
            logger.exception("A batch cannot go on; it is tried again in a minute")
            await asyncio.sleep(60)
        finally:
            del self._runs[run.batch.id]

    def _share(self, id: str) -> int:
        """Lines of a batch that may be in work: keys share alike, and so do the batches of one."""
        by_owner = Counter(run.batch.owner for run in self._runs.values())
        mine = by_owner[self._runs[id].batch.owner]
        return max(1, self._answers.num_at_once // len(by_owner) // mine)

    async def _in_use(self) -> set[str]:
        """Files that unfinished batches read or write."""
        batches = in_slices(await self._records.all(BATCH), BatchRecord)
        unfinished = [batch async for batch in batches if not batch.has_ended]
        ids = {id for it in unfinished for id in (it.input_id, it.output_id, it.error_id)}
        return {id for id in ids if id is not None}

    async def _sweep(self) -> None:
        """Forgets ended batches and files that are kept no longer; lists what only began."""
        oldest = now_s() - self._config.keep_files_days * 24 * 3600
        listed = set(await self._records.all(OPEN))
        async for batch in in_slices(await self._records.all(BATCH), BatchRecord):
            if batch.has_ended and (batch.ended_at or 0) < oldest:
                await self.remove(batch)
            elif not batch.has_ended and batch.id.encode() not in listed:
                await self._records.put(OPEN, batch.id, batch.id.encode())
        await self.files.sweep(await self._in_use())
