"""Runs one batch: answers its lines and writes each result once, in order of completion."""

import asyncio
import contextlib
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, NamedTuple

import msgspec

from headrace.batches.answers import (
    LineAnswer,
    LineAnswers,
    LineCheck,
    LineRequest,
    Verdict,
    retrying,
)
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
)
from headrace.batches.store import BatchStore, ClaimLost
from headrace.protocols.batch_lines import FORMS, custom_id_of
from headrace.streams.store import StoreStalled
from headrace.workers.job_queue import LARGE, OWNER
from headrace_common.errors import RequestError
from headrace_common.system.race import race
from headrace_common.worker_jobs import LineFault

TICK_S = 1.0
# The maximum number of results, and of their bytes, in one write.
_MANY, _MANY_BYTES = 1000, 4 << 20
_ENDS = {"": "completed", CANCELED: "cancelled", EXPIRED: "expired"}


class BatchDependencies(NamedTuple):
    """The components of a server that all runs of batches share."""

    shelf: BatchStore
    files: Files
    answers: LineAnswers
    check: LineCheck
    max_lines: int
    max_line_bytes: int


class _Result(NamedTuple):
    number: int
    kind: str
    line: bytes
    asked: LineRequest


class BatchRun:
    """Runs one batch to its end, continuing where an earlier server stopped.

    `share` returns how many lines of the batch may be answered at the same time. If a run is
    cancelled, the batch is unchanged and the streams of its lines continue. The next run attaches
    to these streams.

    Each line must get exactly one result, although servers can be killed at any time. Three rules
    ensure this:

    1. The key of a line's stream depends only on the batch and the line number. A later run
       therefore finds the stream instead of generating a second answer.
    2. A line counts as done only when the durable result file contains its result.
    3. Results are appended only while this server holds the claim on the batch.
    """

    def __init__(
        self, dependencies: BatchDependencies, batch: BatchRecord, share: Callable[[], int]
    ) -> None:
        self.batch = batch
        self._dependencies = dependencies
        self._records, self._blobs = dependencies.shelf
        self._share = share
        self._format = FORMS[batch.api]
        self._counts = Counter[str](batch.counts)
        # Numbers of lines that have a result.
        self._done = set[int]()
        # The bytes of each result file, by file id.
        self._sizes = Counter[str]()
        # The tasks of lines whose result is not written yet, by line number.
        self._answering: dict[int, asyncio.Task[None]] = {}
        self._results: asyncio.Queue[_Result] = asyncio.Queue()
        self._saving = asyncio.Lock()
        # Set when a line has ended or the batch should stop.
        self._changed = asyncio.Event()
        # "canceled" or "expired" if no more lines are to be answered; otherwise empty.
        self._stop_reason = ""

    async def run(self) -> None:
        """Run the batch to its end.

        Raises ClaimLost, inside an exception group, if another server has taken over the batch or
        if a failover of Redis has lost results. The next run answers these lines again.
        """
        OWNER.set(self.batch.owner)
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(work) for work in (self._tick(), self._write())]
            if self.batch.status != "validating" or await self._begin():
                await self._answer_all(tasks)
                await self._add_missing()
                await self._results.join()
                await self._end()
            for task in beside:
                task.cancel()

    def stop(self, reason: str) -> None:
        """Stop answering lines; only the first reason counts."""
        self._stop_reason = self._stop_reason or reason
        self._changed.set()

    # The methods below change the status.

    async def _begin(self) -> bool:
        """Check all lines; return whether to answer them."""
        # In Anthropic's API, a line's fault becomes the line's result.
        is_apart = self.batch.api == "openai"
        verdict = await self._verdict()
        if verdict is None and is_apart:
            # Unchecked lines get no results: a file can have far more lines than a batch may have.
            await self._close(_ENDS[self._stop_reason])
            return False
        verdict = verdict or Verdict(0, ())
        known: dict[str, Any] = {"num_lines": verdict.num_lines}
        if verdict.faults and is_apart:
            await self._close("failed", faults=verdict.faults, **known)
            return False
        known["output_id"] = await self._new_file("output")
        known["error_id"] = await self._new_file("errors") if is_apart else None
        await self._save("in_progress", **known)
        return True

    async def _verdict(self) -> Verdict | None:
        """Check all lines. Return None if the batch should stop first."""
        check = partial(self._dependencies.check.verdict, self.batch, self._dependencies.max_lines)
        async with race(retrying(check), self._until(lambda: False)) as (checking, _):
            return await checking if checking.done() else None

    async def _new_file(self, what: str) -> str:
        batch = self.batch
        name = f"{batch.id}_{what}.jsonl"
        new = partial(self._dependencies.files.new, batch.owner, name, "batch_output")
        file = await retrying(new)
        file = msgspec.structs.replace(file, is_listed=batch.api == "openai")
        await retrying(partial(self._dependencies.files.put, file))
        return file.id

    async def _end(self) -> None:
        """Record the end of the batch, after all results are written."""
        for id, num_bytes in self._sizes.items():
            await retrying(partial(self._dependencies.files.resized, id, num_bytes))
        counts, num_results = dict(self._counts), sum(self._counts.values())
        num_lost = self.batch.num_lines - num_results
        if num_lost > 0:
            message = f"The file of this batch is not complete any more: {num_lost} of "
            message += f"{self.batch.num_lines} lines have no result. Send these lines again."
            fault = LineFault(1, "file_not_found", message)
            await self._close("failed", counts=counts, faults=(fault,))
            return
        if not self._stop_reason:
            await self._save("finalizing")
        # If the batch was stopped before its lines were checked, the lines were not counted.
        await self._close(_ENDS[self._stop_reason], counts=counts, num_lines=num_results)

    async def _close(self, status: str, **fields: Any) -> None:
        await self._save(status, **fields)
        for kind in (OPEN, STOP):
            await retrying(partial(self._records.remove, kind, self.batch.id))

    async def _tick(self) -> None:
        """Once a second, renew the claim, save the progress, and check whether to stop."""
        while True:
            with contextlib.suppress(StoreStalled):
                is_held = await self._records.claim(self.batch.id, is_held=True)
                # The end of a batch also ends the claim.
                if not is_held and not self.batch.has_ended:
                    raise ClaimLost
                if await self._records.get(STOP, self.batch.id) is not None:
                    self.stop(CANCELED)
                if await self._records.now() >= self.batch.expires_at:
                    self.stop(EXPIRED)
                await self._save_progress()
            await asyncio.sleep(TICK_S)

    async def _save_progress(self) -> None:
        """Save the progress if it has changed."""
        is_stopped = self._stop_reason == CANCELED and self.batch.status == "in_progress"
        if is_stopped or dict(self.batch.counts) != self._counts:
            await self._save("cancelling" if is_stopped else "", counts=dict(self._counts))

    async def _save(self, status: str = "", **fields: Any) -> None:
        """Save the batch with these fields and, unless `status` is empty, with the new status."""
        async with self._saving:
            # The batch may have been deleted since its end.
            if self.batch.has_ended:
                return
            batch = msgspec.structs.replace(self.batch, **fields)
            if status:
                batch = batch.moved(status, await retrying(self._records.now))
            record, sizes = encode_record(batch), dict(self._sizes)
            await retrying(partial(self._records.put, BATCH, batch.id, record, batch.id, sizes))
            self.batch = batch

    # The methods below answer the lines.

    async def _answer_all(self, tasks: asyncio.TaskGroup) -> None:
        """Answer the lines that have no result yet, several at the same time."""
        self._done, self._counts, self._sizes = await retrying(
            partial(answered, self._blobs, self.batch)
        )
        async for number, line in self._lines():
            await self._until(lambda: len(self._answering) < self._share())
            if self._stop_reason:
                break
            if number not in self._done:
                self._answering[number] = tasks.create_task(self._answer(number, line))
        await self._until(lambda: not self._answering)
        if self._answering:
            await self._cancel_lines()

    def _lines(self) -> AsyncIterator[tuple[int, bytes]]:
        return lines_of(self._blobs, self.batch.input_id, self._dependencies.max_line_bytes)

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds or the batch should stop."""
        while not (self._stop_reason or condition()):
            self._changed.clear()
            await self._changed.wait()

    async def _answer(self, number: int, line: bytes) -> None:
        asked = self._asked(number, line)
        answer = await retrying(partial(self._attempt, asked))
        kind = SUCCEEDED if answer.status == 200 else ERRORED
        data = self._format.answered(self._id(number), *answer)
        self._results.put_nowait(_Result(number, kind, data, asked))

    async def _attempt(self, asked: LineRequest) -> LineAnswer:
        """Answer a line if this server still holds the claim on the batch.

        This server may have been suspended. Another server can then have answered the line and
        deleted the line's stream, so the line would be answered twice.
        """
        if not await self._records.claim(self.batch.id, is_held=True):
            raise ClaimLost
        return await self._dependencies.answers.answer(asked)

    async def _cancel_lines(self) -> None:
        """Cancel the lines that are being answered. Results that exist are still written."""
        for task in self._answering.values():
            task.cancel()
        await asyncio.gather(*self._answering.values(), return_exceptions=True)
        await self._results.join()
        for number in self._answering:
            # A stream that cannot be deleted now is deleted when it expires.
            with contextlib.suppress(RequestError):
                await self._dependencies.answers.forget(self._asked(number, b""))

    async def _add_missing(self) -> None:
        """If the batch was stopped, add a result with the reason for each line without a result."""
        if not self._stop_reason:
            return
        async for number, line in self._lines():
            if number not in self._done:
                naming = asyncio.to_thread(custom_id_of, line) if len(line) > LARGE else None
                custom_id = custom_id_of(line) if naming is None else await naming
                data = self._format.missed(self._id(number), custom_id, self._stop_reason)
                asked = self._asked(number, b"")
                self._results.put_nowait(_Result(number, self._stop_reason, data, asked))
                if self._results.qsize() >= _MANY:
                    await self._results.join()
        await self._results.join()

    # The methods below write the results.

    async def _write(self) -> None:
        """Write results durably. All results that have arrived meanwhile are written together."""
        while True:
            taken = [await self._results.get()]
            num_bytes = len(taken[0].line)
            while not self._results.empty() and len(taken) < _MANY and num_bytes < _MANY_BYTES:
                taken.append(self._results.get_nowait())
                num_bytes += len(taken[-1].line)
            await self._append(taken)
            finished = [it for it in taken if it.number in self._answering]
            for result in taken:
                self._answering.pop(result.number, None)
            self._changed.set()
            forgetting = (self._dependencies.answers.forget(it.asked) for it in finished)
            await asyncio.gather(*forgetting, return_exceptions=True)
            for _ in taken:
                self._results.task_done()

    async def _append(self, results: list[_Result]) -> None:
        """Append each result to its file. A result counts only once it is stored."""
        error_id = self.batch.error_id or self.batch.output_id
        by_file: dict[str | None, list[_Result]] = {self.batch.output_id: [], error_id: []}
        for result in results:
            id = self.batch.output_id if result.kind == SUCCEEDED else error_id
            by_file[id].append(result)
        for id, mine in by_file.items():
            if id is None or not mine:
                continue
            data = b"".join(it.line for it in mine)
            await retrying(partial(self._blobs.append, id, data, self.batch.id))
            self._sizes[id] += len(data)
            self._done.update(it.number for it in mine)
            self._counts.update(it.kind for it in mine)

    def _asked(self, number: int, line: bytes) -> LineRequest:
        batch = self.batch
        return LineRequest(batch.route, batch.owner, f"{batch.id}:{number}", line)

    def _id(self, number: int) -> str:
        """Return the id of a line's result. The id is the same in every run."""
        digest = hashlib.blake2b(self.batch.id.encode(), digest_size=8).hexdigest()
        return f"batch_req_{digest}_{number}"
