"""Manages all batches of a server: creates, finds, stops and runs them.

If servers share a store, only one server at a time runs a batch.
"""

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
    read_record,
)
from headrace.batches.run import BatchDependencies, BatchRun
from headrace.batches.store import BatchStore, ClaimLost
from headrace.streams.store import StoreStalled
from headrace.workers.pool import JobRunner
from headrace_common.config.settings import ServerConfig
from headrace_common.errors import RequestError

logger = logging.getLogger(__name__)

MAX_OPEN = 100
"""The maximum number of unfinished batches per API key."""
MAX_ENDED = 1000
"""The maximum number of ended batches per API key.

When a key creates another batch, the oldest ended batches are deleted with their results.
"""
_LOOK_S = 1.0
_SWEEP_EVERY = 60
_PREFIXES = {"openai": "batch_", "anthropic": "msgbatch_"}


class NewBatch(NamedTuple):
    """A batch that a client wants to create. Its lines are in a file of the client's API key."""

    owner: str
    api: str
    route: str
    input_id: str
    window_s: int
    metadata: Mapping[str, str] = {}


class Batches:
    """Creates, lists and runs batches. `run` owns the tasks of all running batches."""

    def __init__(
        self, shelf: BatchStore, config: ServerConfig, work: JobRunner, answers: LineAnswers
    ) -> None:
        self.files = Files(shelf, config.batches)
        self._records = shelf.records
        self._answers = answers
        self._config = config.batches
        most = config.http.max_body_bytes
        check = LineCheck(shelf.blobs, work, answers, most)
        self._dependencies = BatchDependencies(
            shelf,
            self.files,
            answers,
            check,
            config.batches.max_batch_lines,
            # The requests were accepted already. A line that is made from a request of Anthropic's
            # API is longer than the request, so only the size of the file limits a line.
            config.batches.max_file_bytes,
        )
        self._runs: dict[str, BatchRun] = {}
        self._news = asyncio.Event()
        # Held while a batch is created or files are deleted. Otherwise, a key could exceed
        # MAX_OPEN, and a new batch could lose its input file.
        self._changing = asyncio.Lock()

    # The methods below serve requests of clients.

    @property
    def max_lines(self) -> int:
        """Return how many lines a batch may have."""
        return self._config.max_batch_lines

    async def create(self, wish: NewBatch) -> BatchRecord:
        """Create a batch.

        Raises RequestError if the API key has too many unfinished batches, or lacks the input file.
        """
        async with self._changing:
            return await self._create(wish)

    async def _create(self, wish: NewBatch) -> BatchRecord:
        await self.files.get(wish.owner, wish.input_id)
        batches = await self.of(wish.owner)
        num_open = sum(not batch.has_ended for batch in batches)
        if num_open >= MAX_OPEN:
            message = f"This key has {num_open} unfinished batches, and the limit is "
            message += f"{MAX_OPEN}; wait for one to end, or cancel one."
            raise RequestError("quota_exceeded", message)
        for oldest in [batch for batch in batches if batch.has_ended][MAX_ENDED - 1 :]:
            await self.remove(oldest)
        now = await self._records.now()
        batch = BatchRecord(
            new_id(_PREFIXES[wish.api]), wish.owner, wish.api, wish.route, wish.input_id, now,
            wish.window_s, at={"validating": now}, metadata=wish.metadata,
        )  # fmt: skip
        await self._records.put(BATCH, batch.id, encode_record(batch))
        await self._records.put(OPEN, batch.id, batch.id.encode())
        self._news.set()
        return batch

    async def of(self, owner: str, api: str = "") -> list[BatchRecord]:
        """Return the batches of an API key, newest first; all of them if `api` is empty."""
        batches = in_slices(await self._records.all(BATCH), BatchRecord)
        mine = [it async for it in batches if it.owner == owner and api in ("", it.api)]
        return sorted(mine, key=lambda batch: (batch.created_at, batch.id), reverse=True)

    async def get(self, owner: str, id: str, api: str) -> BatchRecord:
        """Return a batch. Raises RequestError if the API key has no such batch."""
        batch = read_record(await self._records.get(BATCH, id), BatchRecord)
        if batch is None or (batch.owner, batch.api) != (owner, api):
            raise RequestError(
                "batch_not_found", "There is no such batch, or it has expired.", "id"
            )
        return batch

    async def cancel(self, batch: BatchRecord) -> BatchRecord:
        """Ask the server that runs the batch to stop. Do nothing if the batch has ended."""
        if batch.has_ended or batch.status == "cancelling":
            return batch
        await self._records.put(STOP, batch.id, b"canceled")
        return batch.moved("cancelling", await self._records.now())

    async def remove(self, batch: BatchRecord) -> None:
        """Delete an ended batch and its results. For Anthropic's API, also delete its lines.

        Raises RequestError if the batch has not ended.
        """
        if not batch.has_ended:
            message = "The batch has not ended; cancel it first, and wait until it has."
            raise RequestError("batch_not_ended", message, "id")
        own = (batch.output_id, batch.error_id)
        for id in (*own, batch.input_id if batch.api == "anthropic" else None):
            if id is not None:
                await self.files.remove(id)
        # If the batch ended while it was being stopped, the stop is still stored.
        for kind in (STOP, BATCH):
            await self._records.remove(kind, batch.id)

    async def remove_file(self, owner: str, id: str) -> None:
        """Delete a file.

        Raises RequestError if the API key has no such file, or if an unfinished batch needs the
        file.
        """
        async with self._changing:
            file = await self.files.get(owner, id)
            if file.id in await self._in_use():
                message = "An unfinished batch needs this file; cancel the batch first."
                raise RequestError("file_in_use", message, "id")
            await self.files.remove(file.id)

    # The methods below run the batches.

    async def run(self) -> None:
        """Run every unfinished batch that no other server runs."""
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
            # The batch ended after it was listed, or a killed server left the batch in the list.
            if batch is None or batch.has_ended:
                for kind in (OPEN, STOP):
                    await self._records.remove(kind, id)
                continue
            run = BatchRun(self._dependencies, batch, partial(self._share, id))
            self._runs[id] = run
            tasks.create_task(self._run(run), name="batch")

    async def _run(self, run: BatchRun) -> None:
        try:
            await run.run()
        except* ClaimLost:
            logger.warning(
                "This server stopped a batch, because it lost its claim on the batch; another "
                "server can take the batch over"
            )
        # The failure concerns one batch, not the server.
        except* Exception:
            logger.exception("A batch failed; it is retried in one minute")
            await asyncio.sleep(60)
        finally:
            del self._runs[run.batch.id]

    def _share(self, id: str) -> int:
        """Return how many lines of a batch may be answered at the same time.

        API keys get equal shares, and a key's share is divided equally among its batches.
        """
        by_owner = Counter(run.batch.owner for run in self._runs.values())
        mine = by_owner[self._runs[id].batch.owner]
        return max(1, self._answers.num_at_once // len(by_owner) // mine)

    async def _in_use(self) -> set[str]:
        """Return the ids of files that unfinished batches read or write."""
        batches = in_slices(await self._records.all(BATCH), BatchRecord)
        unfinished = [batch async for batch in batches if not batch.has_ended]
        ids = {id for it in unfinished for id in (it.input_id, it.output_id, it.error_id)}
        return {id for id in ids if id is not None}

    async def _sweep(self) -> None:
        """Delete expired batches and files; add missing OPEN records of unfinished batches."""
        oldest = await self._records.now() - self._config.keep_files_days * 24 * 3600
        listed = set(await self._records.all(OPEN))
        async for batch in in_slices(await self._records.all(BATCH), BatchRecord):
            if batch.has_ended and (batch.ended_at or 0) < oldest:
                await self.remove(batch)
            elif not batch.has_ended and batch.id.encode() not in listed:
                await self._records.put(OPEN, batch.id, batch.id.encode())
        async with self._changing:
            await self.files.sweep(await self._in_use())
