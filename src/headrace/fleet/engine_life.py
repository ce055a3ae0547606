"""Follows a model's engine from the first start to the final end, across crashes and restarts."""

import asyncio
import time
from collections import deque

from msgspec.structs import replace

from headrace.engines.client import EngineClient, EngineDown, EngineResized, EngineUp, StateNews
from headrace.fleet.engine_users import EngineUsers
from headrace.fleet.load_progress import LoadProgressWatch
from headrace.fleet.replica import Replica
from headrace.fleet.replicas import Replicas, between
from headrace.fleet.served_model import ServedModel
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
    """Raised when the engine was closed before it had loaded."""


class EngineLife:
    """Follows the engine of one model from `begin` to the end of `run`; `close` ends the engine.

    Passes the engine's messages on to the engine's users and to the metrics, and stores the
    latest state.
    """

    def __init__(
        self, users: EngineUsers, loading: LoadProgressWatch, figures: EngineFigures
    ) -> None:
        # One of unloaded, loading, ok, recovering, dead. "dead" means that loading failed or that
        # the engine was given up.
        self.state = "unloaded"
        # The reason why the state is "dead".
        self.last_words = ""
        self.num_starts = 0
        # None while the engine is down.
        self.up: EngineUp | None = None
        # The engine's latest status report, and traces of the engine's last steps.
        self.status: Status | None = None
        self.steps: deque[StepTrace] = deque(maxlen=NUM_TRACED_STEPS)
        self._users, self._loading, self._figures = users, loading, figures
        self._model: ServedModel
        self._client: EngineClient | None = None
        # Done when the engine has loaded the model. Raises ModelError or EngineClosed if the
        # engine ended before the end of the load.
        self.settled: asyncio.Future[None]
        # Done when no more messages will arrive from this engine.
        self._ended: asyncio.Future[None]
        self._was_up = asyncio.Event()
        # Set unless `run` is running.
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def expect(self) -> None:
        """Record that an engine is about to be started."""
        self.state = "loading"

    def begin(self, model: ServedModel, client: EngineClient) -> None:
        """Take over an engine that was just started; `run` handles the engine's messages."""
        self.state, self.last_words = "loading", ""
        self.settled = asyncio.get_running_loop().create_future()
        self._loading.begin(ENGINE)
        self._model, self._client = model, client

    async def wait_until_ready(self) -> Ready:
        """Wait until the engine has loaded, and return the engine's limits."""
        await self._was_up.wait()
        assert self._model.ready is not None
        return self._model.ready

    def fail(self, last_words: str) -> None:
        """Set the state to "dead", and store the reason."""
        self.state, self.last_words = "dead", last_words

    async def run(self) -> None:
        """Handle the engine's messages until the engine is closed or given up."""
        assert self._client is not None
        self._is_idle.clear()
        try:
            await self._follow(self._client)
        finally:
            self._is_idle.set()

    async def _follow(self, client: EngineClient) -> None:
        self._ended = asyncio.get_running_loop().create_future()
        client.news.subscribe(self._users.deliver, self._on_news, self._end)
        await self._ended
        self._client = self.up = self.status = None
        self._loading.end()
        self._figures.unloaded()
        self._users.end()
        if self.state != "dead":
            self.state = "unloaded"
        if not self.settled.done():
            lost = ModelError(self.last_words) if self.state == "dead" else EngineClosed()
            self.settled.set_exception(lost)

    async def close(self) -> None:
        """End the engine if it runs, and wait for the end of `run`.

        Without this wait, a load that starts right after this call could count as closed too.
        """
        if self._client is not None:
            await self._client.close()
            await self._is_idle.wait()

    @property
    def last_step_age_s(self) -> float | None:
        """Return the seconds since the last step, or None before the first step."""
        return self._figures.last_step_age_s

    @property
    def replicas(self) -> list[Replica]:
        """Return the replicas, or an empty list if the model has a single engine."""
        return self._client.all() if isinstance(self._client, Replicas) else []

    async def replace(self, replica: int, within_s: float) -> None:
        """Replace one replica with a new engine (see Replicas.replace)."""
        if isinstance(self._client, Replicas):
            await self._client.replace(replica, within_s)

    def resize(self, config: ModelConfig, within_s: float) -> bool:
        """Change the number of replicas; return False if the change needs a reload of the model.

        A model that was started with a single engine cannot get more replicas while the engine
        runs.
        """
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

    def _on_news(self, news: StateNews) -> None:
        if self._ended.done():
            return
        if isinstance(news, Status):
            self._on_status(news)
        elif isinstance(news, AdapterRead):
            self._users.has_read(news)
        elif isinstance(news, EngineUp):
            self._on_up(news)
        elif isinstance(news, EngineResized):
            self._on_resized(news)
        elif isinstance(news, Loading):
            self._loading.tell(news)
            self._users.set_load_progress(time.monotonic())
        elif news.lost is not None:
            self._figures.record_replica_down(news)
            self._users.move(news, news.lost)
        else:
            self._on_down(news)
            if news.given_up:
                self._end(None)

    def _on_status(self, status: Status) -> None:
        self.status = status
        self._figures.show_status(status, self._model.ready)
        self.steps.extend(status.steps)
        self._users.report_positions(status, time.monotonic())

    def _on_up(self, news: EngineUp) -> None:
        assert self._client is not None
        self._model.came_up(news.ready)
        self.up = news
        self._loading.end()
        self._count_start(news.ready)
        self.steps.clear()
        self.state = "ok"
        self._was_up.set()
        if not self.settled.done():
            self.settled.set_result(None)
        self._users.begin(self._model, self._client, news)

    def _count_start(self, ready: Ready) -> None:
        self.num_starts += 1
        self._figures.is_up(ready)

    def _on_resized(self, news: EngineResized) -> None:
        assert self.up is not None
        self._model.came_up(news.ready)
        self.up = replace(self.up, ready=news.ready, pid=news.pid)
        self._users.resize(self._model, self.up)
        if news.has_started:
            self._count_start(news.ready)

    def _on_down(self, news: EngineDown) -> None:
        self.up = self.status = None
        self._loading.begin(ENGINE)
        self._figures.is_down(news)
        if news.given_up:
            self.fail(news.message)
        elif self.state == "ok":
            self.state = "recovering"
        self._users.pause(news)
