"""Writes the database in one thread: collects many writes into each transaction, in order."""

import asyncio
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from headrace.streams.store import OnCommit, StoreStalled
from headrace_common.system.awake import Countdown

logger = logging.getLogger(__name__)

# Writes within this time share a transaction, and therefore one sync of the disk.
GROUP_S = 0.005
RETRY_S = 0.25
# The store counts as stalled after this many seconds without a commit.
STALL_S = 8.0
# While the store closes, a stalled store tries to commit for at most this many seconds.
LAST_TRY_S = 1.0
MAX_WAITING_BYTES = 64 << 20

Result = TypeVar("Result")


class _Write(Generic[Result]):
    """A write: `work` runs on the thread, then `publish` gets the result on the event loop."""

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
        """Deliver the result on the event loop, even if nobody awaits the write."""
        if self.error is None:
            try:
                result = self.publish(self.result)
            # Only the caller of this write gets the error, not the callers of the other writes.
            except Exception as error:
                self.error = error
        if self.done.cancelled():
            return
        if self.error is not None:
            self.done.set_exception(self.error)
        else:
            self.done.set_result(result)


class Writer:
    """Collects writes and commits them in groups.

    The event loop calls the methods; only the thread uses the connection.

    The thread takes a write, waits GROUP_S for more writes, and commits all of them in one
    transaction, because a sync of the disk costs more than the rows. If one write raises an error,
    the transaction is rolled back and repeated without this write.

    If the disk fails, the store counts as stalled. Writes with `num_bytes` (appends) are then
    retried every RETRY_S, and all writes without `num_bytes` fail immediately.
    """

    def __init__(self, connection: sqlite3.Connection, on_commit: OnCommit) -> None:
        self.stalled = asyncio.Event()
        self.writable = asyncio.Event()
        self.writable.set()
        self._connection = connection
        self._on_commit = on_commit
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
        """Commit `work`, then call `publish` with the result of `work`; return the result of
        `publish`.

        `work` can run again after a failed commit. During a stall, a write with `num_bytes`
        waits, and a write without `num_bytes` raises StoreStalled.
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
        """Try once more to commit pending writes, then close the database; the remaining writes
        fail.
        """
        self._closing.set()
        self._writes.put(None)
        patience_s = LAST_TRY_S if self.stalled.is_set() else STALL_S
        # Limit the wait, because a disk may never answer.
        await asyncio.to_thread(self._thread.join, patience_s)
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

    # The thread schedules the methods below on the event loop.

    def _settle(self, writes: list[_Write[Any]]) -> None:
        for write in writes:
            self._num_waiting -= 1
            self._num_waiting_bytes -= write.num_bytes
            write.settle()

    def _committed(self, writes: list[_Write[Any]]) -> None:
        self._settle(writes)
        now = time.monotonic()
        for write in writes:
            self._on_commit(now - write.began)
        if self.stalled.is_set():
            logger.warning("The stream store can write again")
            self.stalled.clear()
            self.writable.set()
        assert self._watch is not None, "no timer was running for this commit"
        self._watch.cancel()
        self._watch = None
        if self._num_waiting:
            self._start_watch()

    def _start_watch(self) -> None:
        """Start the timer that reports a stall if the next commit takes too long.

        The timer stands still while the event loop itself is blocked, so blocked time does not
        count.
        """
        self._watch = Countdown(STALL_S, lambda: self._stall(f"no commit for {STALL_S:.0f} s", []))

    def _stall(self, why: str, refused: list[_Write[Any]]) -> None:
        if not self.stalled.is_set():
            logger.warning("The stream store cannot write: %s", why)
            self.stalled.set()
            self.writable.clear()
        self._settle(refused)

    # The methods below run on the thread.

    def _run(self) -> None:
        has_more = True
        while has_more:
            writes, has_more = self._gather()
            if writes:
                self._commit(writes)
        # Closing the last connection moves the write-ahead log into the database.
        self._connection.close()

    def _gather(self) -> tuple[list[_Write[Any]], bool]:
        """Wait for a write, and collect the writes that arrive within GROUP_S.

        Returns False as the second value if the store closes after these writes.
        """
        gathered = [self._writes.get()]
        if gathered[0] is not None:
            time.sleep(GROUP_S)
        while not self._writes.empty():
            gathered.append(self._writes.get())
        return [write for write in gathered if write is not None], gathered[-1] is not None

    def _commit(self, writes: list[_Write[Any]]) -> None:
        """Commit all writes in one transaction.

        The commit is retried until it succeeds or the store closes.
        """
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
        """Try to commit the writes in one transaction, without writes that can never succeed.

        Returns whether the transaction was committed.
        """
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
        """Return whether to retry the write after a failure; otherwise set the write's error."""
        if write.error is None and not (write.is_patient and not self._closing.is_set()):
            write.error = StoreStalled("The server cannot write to its disk now; try again later.")
        return write.error is None


class _Refused(Exception):
    """Raised for a write that can never succeed; its `error` says why."""


def _is_storage_failure(error: Exception) -> bool:
    """Return whether the error concerns the disk or the file, not only one write."""
    return isinstance(error, sqlite3.OperationalError) or type(error) is sqlite3.DatabaseError
