"""Simulates the model hub, the download cache on the disk and the download processes."""

import asyncio
import copy
import signal
import time
from pathlib import Path

import msgspec
from detangle import choice, randint, uniform

from headrace.fleet.served_model import ServedModel
from headrace.text.model_names import names_of, paths_of, root_of
from headrace_common.checkpoints.fetch import AnyNews, Fetched, FetchFailed, IsHere
from headrace_common.checkpoints.hub import OnProgress
from headrace_common.config.settings import ModelConfig
from headrace_common.errors import ModelError
from stress.simulated_server.faults import Faults
from stress.simulated_server.requests import MODEL
from stress.simulated_server.system import PROCESS, Process, sleep

HUB_MODELS = ("far/one", "far/two:Q8_0", "far/two:Q4_0")
NUM_PIECES = 8
END_S = 2.5


class Hub:
    """A machine's connection to the model hub. `folder` contains the downloaded models."""

    def __init__(self, folder: Path, model: ServedModel, faults: Faults) -> None:
        self.folder, self._model, self._faults = folder, model, faults
        # The processes that run now.
        self.running: list[SimDownload] = []

    def file(self, model: str) -> Path:
        """Return the file whose length shows how many pieces of a model are here."""
        repo, _, name = model.partition(":")
        return self.folder / f"models--{repo.replace('/', '--')}" / (name or "model")

    def num_pieces(self, model: str) -> int:
        file = self.file(model)
        return file.stat().st_size if file.exists() else 0

    def add_piece(self, model: str) -> None:
        file = self.file(model)
        file.parent.mkdir(parents=True, exist_ok=True)
        # A process and a thread may download the same model.
        file.write_bytes(b"x" * min(NUM_PIECES, self.num_pieces(model) + 1))

    async def begin(self, model: str) -> "SimDownload":
        """Start a simulated download process, in place of `DownloadProcess.begin`."""
        await asyncio.sleep(0.05)
        if self._faults.hits("download: cannot be started"):
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return SimDownload(self, model, self._faults)

    def fetch(self, config: ModelConfig, on_progress: OnProgress) -> str:
        """Return the path of a model, in place of `fetch_apart`. Runs in a thread."""
        if config.model not in HUB_MODELS:
            return MODEL
        while (num_pieces := self.num_pieces(config.model)) < NUM_PIECES:
            on_progress(num_pieces, NUM_PIECES)
            sleep(uniform(0.1, 1.0))
            if self._faults.hits("download: failure"):
                raise ModelError("The hub does not answer.", "download_failed")
            self.add_piece(config.model)
        return MODEL

    def read(self, config: ModelConfig, _: str) -> ServedModel:
        """Read a model, in place of `read_checked`. All models have the files of headrace-mini."""
        sleep(0.1)
        return self.model(config)

    def model(self, config: ModelConfig) -> ServedModel:
        made = copy.copy(self._model)
        made.names = made.own_names = names_of(config)
        made.root, made.paths = root_of(config), paths_of(config)
        made.number = next(ServedModel._numbers)
        made.adapters, made.ready, made.created = {}, None, int(time.time())
        return made


class SimDownload:
    """A simulated `headrace.fleet.download_process.DownloadProcess`."""

    def __init__(self, hub: Hub, model: str, faults: Faults) -> None:
        self.stdout = asyncio.StreamReader()
        self.model = model
        self._hub, self._faults = hub, faults
        self._process = Process(f"download of {model}")
        self._code: int | None = None
        self._exited = asyncio.Event()
        hub.running.append(self)
        token = PROCESS.set(self._process)
        try:
            self._task = asyncio.create_task(self._run(), name=f"download of {model}")
        finally:
            PROCESS.reset(token)

    @property
    def is_running(self) -> bool:
        return self._code is None and not self._process.has_ended

    async def wait(self) -> int:
        await self._exited.wait()
        assert self._code is not None
        return self._code

    async def end(self) -> None:
        if self._code is None:
            # A process that reads from a slow hub has to be killed.
            await asyncio.sleep(END_S if self._faults.hits("download: ends late") else 0.01)
            self._die(-signal.SIGTERM)

    def _die(self, code: int) -> None:
        if self._code is None:
            self._code = code
            self._process.kill()
            self._hub.running.remove(self)
            self.stdout.feed_eof()
            self._exited.set()

    def _tell(self, *news: AnyNews) -> None:
        data = b"".join(msgspec.json.encode(it) + b"\n" for it in news)
        # Several lines can arrive at once, and a line in two parts.
        cut = randint(0, len(data))
        self.stdout.feed_data(data[:cut])
        self.stdout.feed_data(data[cut:])

    async def _run(self) -> None:
        faults, model = self._faults, self.model
        while (num_pieces := self._hub.num_pieces(model)) < NUM_PIECES:
            self._tell(Fetched(num_pieces, NUM_PIECES))
            await asyncio.sleep(uniform(0.1, 2.0))
            if faults.hits("download: death"):
                self._die(choice((-signal.SIGKILL, 1, 0)))
                return
            if faults.hits("download: hangs"):
                await asyncio.sleep(1e6)
            if faults.hits("download: failure"):
                self._tell(FetchFailed("download_denied", "The hub refuses this model."))
                self._die(0)
                return
            if faults.hits("download: garbage"):
                self.stdout.feed_data(b"Traceback\n")
            else:
                self._hub.add_piece(model)
        self._tell(Fetched(NUM_PIECES, NUM_PIECES), IsHere())
        self._die(0)
