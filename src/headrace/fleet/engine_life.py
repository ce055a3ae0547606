"""The life of a model's engine: its start, its deaths and returns, its end."""

import asyncio
import time
from collections import deque

from msgspec.structs import replace

from headrace.engines.client import EngineClient, EngineDown, EngineResized, EngineUp, StateNews
from headrace.fleet.load_watch import LoadWatch
from headrace.fleet.replica import Replica
from headrace.fleet.replicas import Replicas, between
from headrace.fleet.served_model import ServedModel
from headrace.fleet.tenants import Tenants
from headrace.metrics.metrics import EngineFigures
from headrace_common.config.settings import ModelConfig
from headrace_common.errors import ModelError
from headrace_common.loading import ENGINE
from headrace_common.messages import (
    NUM_TRACED_STEPS,
    AdapterRead,
    Loading,
    Ready,
    Status,
    StepTrace,
)


class EngineClosed(Exception):
    """The engine was closed before it had loaded."""


class EngineLife:
    """The life of a model's engine: `begin`, then `run` until it has ended, or `close` ends it.

    What it says goes on to the tenants, to figures, and into what is seen here.
    """

    def __init__(self, tenants: Tenants, loading: LoadWatch, figures: EngineFigures) -> None:
        self.state = "unloaded"  # loading, ok, recovering; dead once a load or engine has failed
        self.last_words = ""  # why the engine was given up
        self.num_starts = 0
        self.up: EngineUp | None = None  # while it is
        self.status: Status | None = None  # its latest numbers
        self.steps: deque[StepTrace] = deque(maxlen=NUM_TRACED_STEPS)  # and its last steps
        self._tenants, self._loading, self._figures = tenants, loading, figures
        self._model: ServedModel
        self._client: EngineClient | None = None
        self.settled: asyncio.Future[None]  # it has loaded; ModelError if it cannot
        self._ended: asyncio.Future[None]  # nothing more will be heard of it
        self._was_up = asyncio.Event()

    def begin(self, model: ServedModel, client: EngineClient) -> None:
        """Takes an engine that has just been started; `run` hears of it."""
        self.state, self.last_words = "loading", ""
        self.settled = asyncio.get_running_loop().create_future()
        self._loading.begin(ENGINE)
        self._model, self._client = model, client

    async def wait_until_ready(self) -> Ready:
        """The engine's limits, once it has loaded."""
        await self._was_up.wait()
        assert self._model.ready is not None
        return self._model.ready

    def fail(self, last_words: str) -> None:
        """Notes that the model could not be loaded."""
        self.state, self.last_words = "dead", last_words

    async def run(self) -> None:
        """Runs until the engine is closed or given up."""
        assert self._client is not None
        self._ended = asyncio.get_running_loop().create_future()
        self._client.news.hand_to(self._tenants.deliver, self._hear, self._end)
        await self._ended
        self._client = self.up = self.status = None
        self._loading.end()
        self._figures.unloaded()
        self._tenants.end()
        if self.state != "dead":
            self.state = "unloaded"
        if not self.settled.done():
            lost = ModelError(self.last_words) if self.state == "dead" else EngineClosed()
            self.settled.set_exception(lost)

    async def close(self) -> None:
        """Ends the engine, if there is one."""
        if self._client is not None:
            await self._client.close()

    @property
    def last_step_age_s(self) -> float | None:
        """Seconds since its last step; None before the first."""
        return self._figures.last_step_age_s

    @property
    def replicas(self) -> list[Replica]:
        """The engines, where there are several."""
        return self._client.all() if isinstance(self._client, Replicas) else []

    async def replace(self, replica: int, within_s: float) -> None:
        """Puts a fresh engine in this one's place (see Replicas)."""
        if isinstance(self._client, Replicas):
            await self._client.replace(replica, within_s)

    def resize(self, config: ModelConfig, within_s: float) -> bool:
        """Takes another number of engines; one that was started alone stays alone."""
        if isinstance(self._client, Replicas):
            self._client.resize(*between(config), within_s)
            return True
        return self._client is None or config.replicas == 1

    def _end(self, failure: BaseException | None) -> None:
        if self._ended.done():
            return
        if failure is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(failure)

    def _hear(self, news: StateNews) -> None:
        if self._ended.done():
            return
        if isinstance(news, Status):
            self._show(news)
        elif isinstance(news, AdapterRead):
            self._tenants.has_read(news)
        elif isinstance(news, EngineUp):
            self._is_up(news)
        elif isinstance(news, EngineResized):
            self._is_resized(news)
        elif isinstance(news, Loading):
            self._loading.tell(news)
            self._tenants.tell_load(time.monotonic())
        elif news.lost is not None:
            self._figures.replica_is_down(news)
            self._tenants.move(news, news.lost)
        else:
            self._is_down(news)
            if news.given_up:
                self._end(None)

    def _show(self, status: Status) -> None:
        self.status = status
        self._figures.show_status(status, self._model.ready)
        self.steps.extend(status.steps)
        self._tenants.tell_places(status, time.monotonic())

    def _is_up(self, news: EngineUp) -> None:
        assert self._client is not None
        self._model.ready, self.up = news.ready, news
        self._loading.end()
        self._has_started(news.ready)
        self.steps.clear()
        self.state = "ok"
        self._was_up.set()
        if not self.settled.done():
            self.settled.set_result(None)
        self._tenants.begin(self._model, self._client, news)

    def _has_started(self, ready: Ready) -> None:
        self.num_starts += 1
        self._figures.is_up(ready)

    def _is_resized(self, news: EngineResized) -> None:
        assert self.up is not None
        self._model.ready = news.ready
        self.up = replace(self.up, ready=news.ready, pid=news.pid)
        self._tenants.resize(self._model, self.up)
        if news.has_started:
            self._has_started(news.ready)

    def _is_down(self, news: EngineDown) -> None:
        self.up = self.status = None
        self._loading.begin(ENGINE)
        self._figures.is_down(news)
        if news.given_up:
            self.fail(news.message)
        elif self.state == "ok":
            self.state = "recovering"
        self._tenants.pause(news)
