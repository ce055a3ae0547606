"""The one thread that writes the database: many writes, one transaction, in order."""

import asyncio
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from headrace.streams.store import Hear, StoreStalled, nobody_hears
from headrace_common.system.awake import Countdown

logger = logging.getLogger(__name__)

GROUP_S = 0.005  # writes within it share a transaction, and so one sync of the disk
RETRY_S = 0.25
STALL_S = 8.0  # after this long without a commit, the store has stalled
LAST_TRY_S = 1.0  # for a store that has stalled, when it closes
MAX_WAITING_BYTES = 64 << 20

Result = TypeVar("Result")


class _Write(Generic[Result]):
    """Work for the thread, then `publish` of its result on the loop, then the caller goes on."""

    __slots__ = ("began", "done", "error", "is_patient", "num_bytes", "publish", "result", "work")

    def __init__(
        self,
        work: Callable[[sqlite3.Connection], Any],
        publish: Callable[[Any], Result],
        num_bytes: int | None,
    ) -> None:
        self.work = work
        self.publish = publish
        self.began = time.monotonic()
        self.num_bytes = num_bytes or 0
        self.is_patient = num_bytes is not None
        self.done: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self.result: Any = None
        self.error: Exception | None = None

    def settle(self) -> None:
        """Runs on the loop. The result is published even if nobody waits for it."""
        if self.error is None:
            try:
                result = self.publish(self.result)
            except Exception as error:  # for its own caller, not those of the other writes
                self.error = error
        if self.done.cancelled():
            return
        if self.error is not None:
            self.done.set_exception(self.error)
        else:
            self.done.set_result(result)


class Writer:
    """Its methods are for the event loop; the connection is the thread's alone."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.stalled = asyncio.Event()
        self.writable = asyncio.Event()
        self.writable.set()
        self.on_commit: Hear = nobody_hears
        self._connection = connection
        self._writes: queue.SimpleQueue[_Write[Any] | None] = queue.SimpleQueue()
        self._num_waiting = 0
        self._num_waiting_bytes = 0
        self._watch: Countdown | None = None
        self._failure = ""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stream-writer", daemon=True)
        self._thread.start()

    async def write(
        self,
        work: Callable[[sqlite3.Connection], Any],
        publish: Callable[[Any], Result],
        num_bytes: int | None = None,
    ) -> Result:
        """Commits `work`, then at once calls `publish` with its result; returns what that gives.

        `work` may run again after a failed commit. A write with `num_bytes` waits in the buffer
        through a stall; one without fails with StoreStalled.
        """
        write = _Write(work, publish, num_bytes)
        self._check_room(write)
        self._num_waiting += 1
        self._num_waiting_bytes += write.num_bytes
        if self._watch is None:
            self._start_watch()
        self._writes.put(write)
        return await write.done

    async def close(self) -> None:
        """Tries once to commit what waits, then closes the database; the rest fails."""
        self._closing.set()
        self._writes.put(None)
        patience_s = LAST_TRY_S if self.stalled.is_set() else STALL_S
        await asyncio.to_thread(self._thread.join, patience_s)  # a disk may never answer
        if self._watch is not None:
            self._watch.cancel()

    def _check_room(self, write: _Write[Any]) -> None:
        if self._closing.is_set():
            raise StoreStalled("The stream store is closed.")
        if self.stalled.is_set() and not write.is_patient:
            raise StoreStalled("The server cannot write to its disk now; try again later.")
        waiting = self._num_waiting_bytes
        if waiting and waiting + write.num_bytes > MAX_WAITING_BYTES:
            raise StoreStalled(
                f"{waiting} bytes are waiting to be stored; the limit is {MAX_WAITING_BYTES}."
            )

    # on the loop, called by the thread

    def _settle(self, writes: list[_Write[Any]]) -> None:
        for write in writes:
            self._num_waiting -= 1
            self._num_waiting_bytes -= write.num_bytes
            write.settle()

    def _committed(self, writes: list[_Write[Any]]) -> None:
        self._settle(writes)
        now = time.monotonic()
        for write in writes:
            self.on_commit(now - write.began)
        if self.stalled.is_set():
            logger.warning("The stream store can write again")
            self.stalled.clear()
            self.writable.set()
        assert self._watch is not None, "every write is watched until its commit"
        self._watch.cancel()
        self._watch = None
        if self._num_waiting:
            self._start_watch()

    def _start_watch(self) -> None:
        """Nothing counts against the store while the loop itself is kept from running."""
        self._watch = Countdown(STALL_S, lambda: self._stall(f"no commit for {STALL_S:.0f} s", []))

    def _stall(self, why: str, refused: list[_Write[Any]]) -> None:
        if not self.stalled.is_set():
            logger.warning("The stream store cannot write: %s", why)
            self.stalled.set()
            self.writable.clear()
        self._settle(refused)

    # the thread

    def _run(self) -> None:
        has_more = True
        while has_more:
            writes, has_more = self._gather()
            if writes:
                self._commit(writes)
        self._connection.close()  # the last to close moves the write-ahead log into the database

    def _gather(self) -> tuple[list[_Write[Any]], bool]:
        """Waits for a write and takes those that soon follow; False with the last ones."""
        gathered = [self._writes.get()]
        if gathered[0] is not None:
            time.sleep(GROUP_S)
        while not self._writes.empty():
            gathered.append(self._writes.get())
        return [write for write in gathered if write is not None], gathered[-1] is not None

    def _commit(self, writes: list[_Write[Any]]) -> None:
        """Commits all in one transaction; retries until it succeeds or the store closes."""
        loop = writes[0].done.get_loop()
        while not self._try(writes):
            outlasting = [write for write in writes if self._outlasts(write)]
            refused = [write for write in writes if write.error is not None]
            loop.call_soon_threadsafe(self._stall, self._failure, refused)
            writes = outlasting
            if self._closing.wait(RETRY_S) and not writes:
                return
        loop.call_soon_threadsafe(self._committed, writes)

    def _try(self, writes: list[_Write[Any]]) -> bool:
        """Whether the transaction was committed; writes that can never succeed are left out."""
        while True:
            try:
                self._attempt([write for write in writes if write.error is None])
            except _Refused:
                self._connection.rollback()
            except Exception as failure:
                self._connection.rollback()
                self._failure = str(failure)
                return False
            else:
                return True

    def _attempt(self, writes: list[_Write[Any]]) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        for write in writes:
            try:
                write.result = write.work(self._connection)
            except Exception as error:
                if _is_storage_failure(error):
                    raise
                write.error = error
                raise _Refused from error
        self._connection.commit()

    def _outlasts(self, write: _Write[Any]) -> bool:
        """Whether to try again after a failure; if not, the write fails with it."""
        if write.error is None and not (write.is_patient and not self._closing.is_set()):
            write.error = StoreStalled("The server cannot write to its disk now; try again later.")
        return write.error is None


class _Refused(Exception):
    """A write that can never succeed; its `error` says why."""


def _is_storage_failure(error: Exception) -> bool:
    """Whether the disk or the file failed, rather than one write."""
    return isinstance(error, sqlite3.OperationalError) or type(error) is sqlite3.DatabaseError
