"""One batch on its way: its lines answered, each result written once, in the order they come."""

import asyncio
import contextlib
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, NamedTuple

import msgspec

from headrace.batches.answers import LineAnswers, LineAsked, LineCheck, patiently
from headrace.batches.files import Files
from headrace.batches.lines import answered, lines_of
from headrace.batches.records import (
    BATCH,
    CANCELED,
    ERRORED,
    EXPIRED,
    OPEN,
    STOP,
    SUCCEEDED,
    BatchRecord,
    encode_record,
    now_s,
)
from headrace.batches.shelf import ClaimLost, Shelf
from headrace.protocols.batch_lines import FORMS, custom_id_of
from headrace.streams.store import StoreStalled
from headrace.workers.job_line import LARGE, OWNER
from headrace_common.errors import RequestError

TICK_S = 1.0
_MANY, _MANY_BYTES = 1000, 4 << 20  # results that are written at once
_ENDS = {"": "completed", CANCELED: "cancelled", EXPIRED: "expired"}


class Bench(NamedTuple):
    """The parts that all batches of a server work with."""

    shelf: Shelf
    files: Files
    answers: LineAnswers
    check: LineCheck
    max_lines: int
    max_line_bytes: int


class _Result(NamedTuple):
    number: int
    kind: str
    line: bytes
    asked: LineAsked


class BatchRun:
    """Runs one batch to its end, from wherever an earlier server left it.

    `share` says how many of its lines may be in work now. Cancelled, it leaves the batch as it is:
    its streams go on, and the next run attaches to them.
    """

    def __init__(self, bench: Bench, batch: BatchRecord, share: Callable[[], int]) -> None:
        self.batch = batch
        self._bench = bench
        self._records, self._blobs = bench.shelf
        self._share = share
        self._form = FORMS[batch.api]
        self._counts = Counter[str](batch.counts)
        self._done = set[int]()  # lines with a result
        self._sizes = Counter[str]()  # of the files of results
        self._working: dict[int, asyncio.Task[None]] = {}  # until the result is written
        self._results: asyncio.Queue[_Result] = asyncio.Queue()
        self._saving = asyncio.Lock()
        self._changed = asyncio.Event()  # a line has ended, or the batch is to stop
        self._why = ""  # canceled or expired: the rest is not answered

    async def run(self) -> None:
        """ClaimLost, in a group, if another server has taken it over."""
        OWNER.set(self.batch.owner)
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(work) for work in (self._tick(), self._write())]
            if self.batch.status != "validating" or await self._begin():
                await self._answer_all(tasks)
                await self._miss_rest()
                await self._results.join()
                await self._end()
            for task in beside:
                task.cancel()

    def stop(self, why: str) -> None:
        """Answers no further line; the first reason counts."""
        self._why = self._why or why
        self._changed.set()

    # its statuses

    async def _begin(self) -> bool:
        """Checks all lines; whether they are to be answered."""
        check = self._bench.check.verdict
        verdict = await patiently(partial(check, self.batch, self._bench.max_lines))
        is_apart = self.batch.api == "openai"  # the other API tells faults as results
        known: dict[str, Any] = {"num_lines": verdict.num_lines}
        if verdict.faults and is_apart:
            await self._close("failed", faults=verdict.faults, **known)
            return False
        known["output_id"] = await self._new_file("output")
        known["error_id"] = await self._new_file("errors") if is_apart else None
        await self._save("in_progress", **known)
        return True

    async def _new_file(self, what: str) -> str:
        batch = self.batch
        file = self._bench.files.new(batch.owner, f"{batch.id}_{what}.jsonl", "batch_output")
        file = msgspec.structs.replace(file, is_listed=batch.api == "openai")
        await patiently(partial(self._bench.files.put, file))
        return file.id

    async def _end(self) -> None:
        """Everything is written: says so, and forgets that there was something to do."""
        for id, num_bytes in self._sizes.items():
            await patiently(partial(self._bench.files.resized, id, num_bytes))
        if not self._why:
            await self._save("finalizing")
        await self._close(_ENDS[self._why], counts=dict(self._counts))

    async def _close(self, status: str, **fields: Any) -> None:
        await self._save(status, **fields)
        for kind in (OPEN, STOP):
            await patiently(partial(self._records.remove, kind, self.batch.id))

    async def _tick(self) -> None:
        """Once a second: keeps the claim, tells the progress, sees whether to stop."""
        while True:
            with contextlib.suppress(StoreStalled):
                if not await self._records.claim(self.batch.id, is_held=True):
                    raise ClaimLost
                if await self._records.get(STOP, self.batch.id) is not None:
                    self.stop(CANCELED)
                if now_s() >= self.batch.expires_at:
                    self.stop(EXPIRED)
                await self._tell()
            await asyncio.sleep(TICK_S)

    async def _tell(self) -> None:
        """Saves how far it has come, if that has changed."""
        is_stopped = self._why == CANCELED and self.batch.status == "in_progress"
        if is_stopped or dict(self.batch.counts) != self._counts:
            await self._save("cancelling" if is_stopped else "", counts=dict(self._counts))

    async def _save(self, status: str = "", **fields: Any) -> None:
        """Saves the batch with these fields, at this status if one is given."""
        async with self._saving:
            batch = msgspec.structs.replace(self.batch, **fields)
            batch = batch.moved(status) if status else batch
            put = partial(self._records.put, BATCH, batch.id, encode_record(batch), batch.id)
            await patiently(put)
            self.batch = batch

    # its lines

    async def _answer_all(self, tasks: asyncio.TaskGroup) -> None:
        """Answers the lines that have no result yet, a share of them at a time."""
        self._done, self._counts, self._sizes = await patiently(
            partial(answered, self._blobs, self.batch)
        )
        async for number, line in self._lines():
            await self._until(lambda: len(self._working) < self._share())
            if self._why:
                break
            if number not in self._done:
                self._working[number] = tasks.create_task(self._answer(number, line))
        await self._until(lambda: not self._working)
        if self._working:
            await self._drop()

    def _lines(self) -> AsyncIterator[tuple[int, bytes]]:
        return lines_of(self._blobs, self.batch.input_id, self._bench.max_line_bytes)

    async def _until(self, is_so: Callable[[], bool]) -> None:
        """Returns once it is so, or the batch is to stop."""
        while not (self._why or is_so()):
            self._changed.clear()
            await self._changed.wait()

    async def _answer(self, number: int, line: bytes) -> None:
        asked = self._asked(number, line)
        answer = await patiently(partial(self._bench.answers.answer, asked))
        kind = SUCCEEDED if answer.status == 200 else ERRORED
        data = self._form.answered(self._id(number), *answer)
        self._results.put_nowait(_Result(number, kind, data, asked))

    async def _drop(self) -> None:
        """Ends the lines that are in work; a result that has come is written all the same."""
        for task in self._working.values():
            task.cancel()
        await asyncio.gather(*self._working.values(), return_exceptions=True)
        await self._results.join()
        for number in self._working:
            with contextlib.suppress(RequestError):  # once it is retained no longer, it goes
                await self._bench.answers.forget(self._asked(number, b""))

    async def _miss_rest(self) -> None:
        """Gives every line without an answer a result that says why, if the batch was stopped."""
        if not self._why:
            return
        async for number, line in self._lines():
            if number not in self._done:
                naming = asyncio.to_thread(custom_id_of, line) if len(line) > LARGE else None
                custom_id = custom_id_of(line) if naming is None else await naming
                data = self._form.missed(self._id(number), custom_id, self._why)
                asked = self._asked(number, b"")
                self._results.put_nowait(_Result(number, self._why, data, asked))
                if self._results.qsize() >= _MANY:
                    await self._results.join()
        await self._results.join()

    # its results

    async def _write(self) -> None:
        """Makes results durable, all at once that have come meanwhile."""
        while True:
            taken = [await self._results.get()]
            num_bytes = len(taken[0].line)
            while not self._results.empty() and len(taken) < _MANY and num_bytes < _MANY_BYTES:
                taken.append(self._results.get_nowait())
                num_bytes += len(taken[-1].line)
            await self._append(taken)
            finished = [it for it in taken if it.number in self._working]
            for result in taken:
                self._working.pop(result.number, None)
            self._changed.set()
            forgetting = (self._bench.answers.forget(it.asked) for it in finished)
            await asyncio.gather(*forgetting, return_exceptions=True)
            for _ in taken:
                self._results.task_done()

    async def _append(self, results: list[_Result]) -> None:
        """Each file gets its lines; only once they are there do they count."""
        error_id = self.batch.error_id or self.batch.output_id
        by_file: dict[str | None, list[_Result]] = {self.batch.output_id: [], error_id: []}
        for result in results:
            id = self.batch.output_id if result.kind == SUCCEEDED else error_id
            by_file[id].append(result)
        for id, mine in by_file.items():
            if id is None or not mine:
                continue
            data = b"".join(it.line for it in mine)
            await patiently(partial(self._blobs.append, id, data, self.batch.id))
            self._sizes[id] += len(data)
            self._done.update(it.number for it in mine)
            self._counts.update(it.kind for it in mine)

    def _asked(self, number: int, line: bytes) -> LineAsked:
        batch = self.batch
        return LineAsked(batch.route, batch.owner, f"{batch.id}:{number}", line)

    def _id(self, number: int) -> str:
        """The id of a line's result: the same, however often it is made."""
        digest = hashlib.blake2b(self.batch.id.encode(), digest_size=8).hexdigest()
        return f"batch_req_{digest}_{number}"
