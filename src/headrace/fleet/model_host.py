"""One model a server runs: its engine, what that says, and the tenants it works for."""

import asyncio
import contextlib
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from headrace.checkpoints.find import MINI, find_model
from headrace.config.settings import ModelConfig
from headrace.core.errors import ModelError, RequestError
from headrace.core.ids import SequenceId
from headrace.core.loading import ENGINE, READING
from headrace.core.messages import (
    NUM_TRACED_STEPS,
    WEIGHTS,
    Cancel,
    Loading,
    Outputs,
    Ready,
    Status,
    StepTrace,
    Submit,
)
from headrace.engine.client import EngineClient, EngineDown, EngineResized, EngineUp
from headrace.fleet.in_thread import in_thread
from headrace.fleet.load_watch import LoadWatch
from headrace.fleet.model_names import names_of, paths_of, root_of
from headrace.fleet.queue_eta import Forecast, Schedule, TokensAsked
from headrace.fleet.replica import Replica
from headrace.fleet.replicas import Replicas, between
from headrace.fleet.served_model import ServedModel
from headrace.fleet.tenants import InQueue, Item, Sequences, Tenant, Waiter
from headrace.metrics.metrics import Metrics

_GONE = RequestError("engine_failed", "The engine stopped and could not be restarted.")
_NO_ENGINE = EngineDown("engine_failed", "", given_up=False)
_TELL_LOAD_S = 1.0  # at most as often do streams hear of the load they wait for

CACHE_BYTES = 1 << 30
"""Memory of each model for keys and values, where it is budgeted and settings say nothing."""

Start = Callable[[ModelConfig], EngineClient]


class EngineClosed(Exception):
    """The engine was closed before it had loaded."""


class ModelHost:
    """A life of its engine: `read`, `begin`, then `run` until it has ended, or `close` ends it.

    `start` makes an engine; `model` may have been read before. `cache_bytes` is the memory for
    keys and values where the model's settings say nothing.
    """

    def __init__(
        self,
        config: ModelConfig,
        start: Start,
        metrics: Metrics,
        model: ServedModel | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        if config.kv_cache_memory_bytes is None and cache_bytes is not None:
            config = msgspec.structs.replace(config, kv_cache_memory_bytes=cache_bytes)
        self.config = config
        self.names = model.names if model else names_of(config)
        self.paths = model.paths if model else paths_of(config)
        self.state = "unloaded"  # loading, ok, recovering; dead once a load or engine has failed
        self.progress: tuple[int, int] | None = None  # bytes of a download, done and in all
        self.share: float | None = None  # of the weights, while they are loaded
        self.loading = LoadWatch("" if model else self.names[0])  # one that was read is alone
        self.status: Status | None = None  # the engine's latest numbers
        self.steps: deque[StepTrace] = deque(maxlen=NUM_TRACED_STEPS)  # and its last steps
        self.num_engine_starts = 0
        self.last_words = ""  # why the engine was given up
        self.schedule = Schedule(0.0, iter(()))  # when those that wait will start
        self.tokens_per_s = 0.0  # of prompts; 0 while unmeasured
        self._model = model
        self._start = start
        self._engine: EngineClient | None = None
        self._settled: asyncio.Future[None] | None = None
        self._reading = asyncio.Lock()
        self.metrics = metrics
        self._was_up = asyncio.Event()
        self._up: EngineUp | None = None  # while it is
        self._sequences = Sequences()
        self._forecast = Forecast()
        self._tenants: dict[Tenant, None] = {}  # in the order in which they came
        self._waiting: dict[Waiter, None] = {}  # those that hear of the load
        self._told_load_at = -math.inf

    @property
    def name(self) -> str:
        """The name by which the server itself knows the model."""
        return self.names[0]

    @property
    def is_here(self) -> bool:
        """Whether the size is known, since nothing need be downloaded."""
        return self._model is not None or self._path.exists()

    @property
    def known(self) -> ServedModel | None:
        """The model as it was read; it stays when the engine is unloaded."""
        return self._model

    @property
    def model(self) -> ServedModel:
        """The model, once it was read."""
        assert self._model is not None
        return self._model

    @property
    def local(self) -> ModelConfig:
        """The model's settings, with the folder that it was read from."""
        return msgspec.structs.replace(self.config, model=str(self.model.folder))

    def reads_like(self, other: "ModelHost") -> bool:
        """Whether both make the same prompt of a request, and the same answer of its tokens."""
        fields = ("model", "revision", "chat_template", "tool_format", "reasoning_format")
        return all(getattr(self.config, it) == getattr(other.config, it) for it in fields)

    @property
    def root(self) -> str:
        """The hub's id, or the folder's name."""
        return root_of(self.config)

    @property
    def ready(self) -> Ready | None:
        """The limits of the engine that was up last."""
        return self._model.ready if self._model else None

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, weights and cache; an estimate until it has been loaded."""
        cache = self.config.kv_cache_memory_bytes or 0
        if self._model is not None and self._model.ready is not None:
            return (self._model.ready.weight_bytes + cache) * self.config.replicas
        path = self._model.folder if self._model is not None else self._path
        files = [path] if path.is_file() else path.glob("*.safetensors")
        files = list(files) or list(path.glob("*.gguf"))
        return (sum(file.stat().st_size for file in files) + cache) * self.config.replicas

    @property
    def _path(self) -> Path:
        """The model's path, if it is no hub id."""
        return find_model(MINI) if self.config.model == MINI else Path(self.config.model)

    @property
    def is_engine_up(self) -> bool:
        return self._up is not None

    @property
    def engine_pid(self) -> int | None:
        """The process of an engine that is up, if it has one of its own."""
        return self._up.pid if self._up else None

    @property
    def replicas(self) -> list[Replica]:
        """The engines, where there are several."""
        return self._engine.all() if isinstance(self._engine, Replicas) else []

    async def replace(self, replica: int, within_s: float) -> None:
        """Puts a fresh engine in this one's place (see Replicas)."""
        if isinstance(self._engine, Replicas):
            await self._engine.replace(replica, within_s)

    def resize(self, config: ModelConfig, within_s: float) -> bool:
        """Takes another number of engines at once; False if it cannot, or if more has changed.

        Streams of engines that leave have `within_s` to end.
        """
        numbers = {"replicas": config.replicas, "min_replicas": config.min_replicas}
        if config != msgspec.structs.replace(self.config, **numbers):
            return False
        if isinstance(self._engine, Replicas):
            self._engine.resize(*between(config), within_s)
        elif self._engine is not None and config.replicas > 1:
            return False  # one that was started alone stays alone
        self.config = config
        return True

    async def read(self) -> None:
        """Reads all but the weights, which may be a download; ModelError if it cannot be served."""
        async with self._reading:
            if self._model is None:
                with self.loading.during(READING):
                    self._model = await in_thread(lambda: ServedModel(self.config, self._download))
                self.progress = None

    def begin(self) -> None:
        """Starts the engine; `run` hears of it."""
        self.state, self.last_words = "loading", ""
        self._settled = asyncio.get_running_loop().create_future()
        self.loading.begin(ENGINE)
        self._engine = self._start(self.local)

    async def settled(self) -> None:
        """Waits until the engine has loaded; ModelError if it cannot."""
        assert self._settled is not None
        await self._settled

    def fail(self, last_words: str) -> None:
        """Notes that the model could not be loaded."""
        self.state, self.last_words = "dead", last_words

    async def run(self) -> None:
        """Runs until the engine is closed or given up."""
        assert self._engine is not None
        await self._hear(self._engine)
        self._engine = self._up = self.status = self.share = None
        self.loading.end()
        self.metrics.engine.unloaded()
        self._forecast.forget_running()
        if self.state != "dead":
            self.state = "unloaded"
        if self._settled and not self._settled.done():
            lost = ModelError(self.last_words) if self.state == "dead" else EngineClosed()
            self._settled.set_exception(lost)

    async def _hear(self, engine: EngineClient) -> None:
        async for news in engine.outputs():
            if isinstance(news, Outputs):
                self._deliver(news)
            elif isinstance(news, Status):
                self._show_queue(news)
            elif isinstance(news, EngineUp):
                self._engine_is_up(news)
            elif isinstance(news, EngineResized):
                self._resize(news)
            elif isinstance(news, Loading):
                self.loading.tell(news)
                self._show_load(news)
            elif news.lost is not None:
                self._move(news, news.lost)
            else:
                self._engine_is_down(news)
                if news.given_up:
                    return

    async def wait_until_ready(self) -> Ready:
        """The engine's limits, once it has loaded."""
        await self._was_up.wait()
        assert self.model.ready is not None
        return self.model.ready

    async def close(self) -> None:
        """Ends the engine, if there is one."""
        if self._engine is not None:
            await self._engine.close()

    # what its tenants call

    def open(self, tenant: Tenant) -> SequenceId:
        """A new sequence of this tenant."""
        return self._sequences.open(tenant)

    def submit(self, submit: Submit) -> None:
        if self._engine is not None:
            self._engine.submit(submit)

    def cancel(self, cancel: Cancel) -> None:
        if self._engine is not None:
            self._engine.cancel(cancel)

    def forget(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Forgets these sequences: news about them reaches nobody from now on."""
        self._sequences.close(sequence_ids)

    # what generation calls

    @property
    def tenants(self) -> list[Tenant]:
        """The tenants, in the order in which they were added."""
        return list(self._tenants)

    def add(self, tenant: Tenant) -> None:
        """Adds a tenant, which begins now and on each later engine, until it is removed."""
        self._tenants[tenant] = None
        if self._up is None:
            tenant.tell(_NO_ENGINE)
        else:
            tenant.begin(self.model, self, self._up)

    def remove(self, tenant: Tenant) -> None:
        self._tenants.pop(tenant, None)

    @contextlib.contextmanager
    def telling(self, waiter: Waiter) -> Iterator[None]:
        """Tells it of the load that it waits for, until the context is left."""
        self._waiting[waiter] = None
        if self.state not in ("ok", "recovering"):
            waiter.tell_load(self.share)
        try:
            yield
        finally:
            del self._waiting[waiter]

    def _deliver(self, outputs: Outputs) -> None:
        self._forecast.hear(outputs)
        by_tenant: defaultdict[Tenant, list[Item]] = defaultdict(list)
        for items in (
            outputs.started,
            outputs.prompt_logprobs,
            outputs.progress,
            outputs.tokens,
            outputs.finished,
        ):
            for item in items:
                if (tenant := self._sequences.owner(item.sequence_id)) is not None:
                    by_tenant[tenant].append(item)
        for tenant, mine in by_tenant.items():
            tenant.tell(mine)

    def _show_load(self, news: Loading) -> None:
        self.share = news.share if news.stage == WEIGHTS else self.share
        now = time.monotonic()
        if now >= self._told_load_at + _TELL_LOAD_S:
            self._told_load_at = now
            for waiter in list(self._waiting):
                waiter.tell_load(self.share)

    def _engine_is_up(self, news: EngineUp) -> None:
        self.model.ready = news.ready
        self._up, self.share = news, None
        self.loading.end()
        self.num_engine_starts += 1
        self.metrics.engine.is_up(news.ready)
        self.steps.clear()
        self.state = "ok"
        self._was_up.set()
        if self._settled and not self._settled.done():
            self._settled.set_result(None)
        for tenant in self.tenants:
            tenant.begin(self.model, self, news)

    def _resize(self, news: EngineResized) -> None:
        assert self._up is not None
        self.model.ready = news.ready
        self._up = msgspec.structs.replace(self._up, ready=news.ready, pid=news.pid)
        if news.has_started:
            self.num_engine_starts += 1
            self.metrics.engine.is_up(news.ready)

    def _move(self, news: EngineDown, lost: tuple[SequenceId, ...]) -> None:
        """Notes that one of several engines is gone; another takes what it had."""
        assert self._up is not None
        self.metrics.engine.replica_is_down(news)
        self._forecast.forget(lost)
        for owner in filter(None, dict.fromkeys(map(self._sequences.owner, lost))):
            owner.tell(news)
            owner.tell(self._up)

    def _engine_is_down(self, news: EngineDown) -> None:
        self._up = self.status = self.share = None
        self.loading.begin(ENGINE)
        self.metrics.engine.is_down(news)
        self._forecast.forget_running()
        if news.given_up:
            self.state, self.last_words = "dead", news.message
            for tenant in self.tenants:
                tenant.lose(_GONE)
            return
        if self.state == "ok":
            self.state = "recovering"
        for tenant in self.tenants:
            tenant.tell(news)

    def _show_queue(self, status: Status) -> None:
        """Tells every waiting tenant its place."""
        self.status = status
        self.metrics.engine.show_status(status, self.model.ready)
        self.steps.extend(status.steps)
        self.tokens_per_s = status.prompt_tokens_per_s
        now = time.monotonic()
        self._forecast.measure_pace(status, now)
        if self._up is None:
            return
        starts = self._forecast.starts(status, self._num_places(status), self._asked)
        self.schedule = Schedule(now, starts)
        told: set[Tenant] = set()
        for position, id in enumerate(status.queue, 1):
            tenant = self._sequences.owner(id)
            if tenant is not None and tenant not in told:
                told.add(tenant)
                wait_s = self.schedule.start(position).in_s
                eta_ms = None if wait_s is None else int(wait_s * 1000)
                tenant.tell_place(InQueue(position, status.num_waiting, eta_ms))

    def _num_places(self, status: Status) -> int:
        """Sequences that can run at once; while memory is short, those that do run."""
        assert self._up is not None
        ready = self._up.ready
        first = self._asked(status.queue[0]).num_prompt if status.queue else 0
        has_memory = status.blocks_free >= ready.layout.blocks_for(first)
        return ready.max_num_seqs if has_memory else max(status.num_running, 1)

    def _asked(self, sequence_id: SequenceId) -> TokensAsked:
        tenant = self._sequences.owner(sequence_id)
        return tenant.asked(sequence_id) if tenant else TokensAsked(0, 0)

    def _download(self, done: int, total: int) -> None:
        self.progress = (done, total)
        self.loading.download(done, total)
