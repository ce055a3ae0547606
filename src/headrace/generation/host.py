"""One model a server runs: its engine, what that says, and the streams it works on."""

import asyncio
import contextlib
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
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
from headrace.generation.event_builder import EventBuilder, InQueue
from headrace.generation.forecast import Forecast, Schedule, TokensAsked
from headrace.generation.in_thread import in_thread
from headrace.generation.loading import LoadWatch
from headrace.generation.model_names import names_of, paths_of, root_of
from headrace.generation.replica import Replica
from headrace.generation.replicas import Replicas, between
from headrace.generation.sequences import Item, SequenceOwner, Sequences
from headrace.generation.served import (
    ServedModel,
    check_can_begin,
    check_can_go_on,
)
from headrace.generation.stream import LiveStream
from headrace.generation.vector_batch import VectorBatch, VectorWork
from headrace.metrics.metrics import Metrics
from headrace.streams.log import Log
from headrace.streams.record import Record

_GONE = RequestError("engine_failed", "The engine stopped and could not be restarted.")
_NO_ENGINE = EngineDown("engine_failed", "", given_up=False)
_TELL_LOAD_S = 1.0  # at most as often do streams hear of the load they wait for

CACHE_BYTES = 1 << 30
"""Memory of each model for keys and values, where it is budgeted and settings say nothing."""

Start = Callable[[ModelConfig], EngineClient]


class EngineClosed(Exception):
    """The engine was closed before it had loaded."""


class Host:
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
        self._streams: dict[LiveStream, None] = {}  # in the order in which they came
        self._waiting: dict[LiveStream, None] = {}  # those that hear of the load
        self._told_load_at = -math.inf
        self._batches: set[VectorBatch] = set()

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
        """The same, of one that was loaded."""
        assert self._model is not None
        return self._model

    @property
    def local(self) -> ModelConfig:
        """Its settings, with the folder that it was read from."""
        return msgspec.structs.replace(self.config, model=str(self.model.folder))

    def reads_like(self, other: "Host") -> bool:
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
        """Where it is, if it is no hub id."""
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
        """Until the engine has loaded; ModelError if it cannot."""
        assert self._settled is not None
        await self._settled

    def fail(self, last_words: str) -> None:
        """Notes that the model could not be loaded."""
        self.state, self.last_words = "dead", last_words

    async def run(self) -> None:
        """Until the engine is closed or given up."""
        assert self._engine is not None
        await self._hear(self._engine)
        self._engine = self._up = self.status = self.share = None
        self.loading.end()
        self.metrics.unloaded()
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

    # what its streams call

    def submit(self, submit: Submit) -> None:
        if self._engine is not None:
            self._engine.submit(submit)

    def cancel(self, cancel: Cancel) -> None:
        if self._engine is not None:
            self._engine.cancel(cancel)

    # what generation calls

    def stream(
        self, record: Record, builder: EventBuilder, log: Log, linger_s: float
    ) -> LiveStream:
        """A stream that is computed here; it is submitted once it is added."""
        return LiveStream(record, builder, log, self, self._sequences, linger_s)

    def add(self, stream: LiveStream) -> None:
        """Submits it now and to each later engine, until it is removed."""
        self._streams[stream] = None
        if self._up is None:
            stream.tell(_NO_ENGINE)
        else:
            self._submit(stream, self._up)

    def remove(self, stream: LiveStream) -> None:
        self._streams.pop(stream, None)

    @contextlib.contextmanager
    def telling(self, stream: LiveStream) -> Iterator[None]:
        """Tells a stream of the load that it waits for, until the context is left."""
        self._waiting[stream] = None
        if self.state not in ("ok", "recovering"):
            stream.tell_load(self.share)
        try:
            yield
        finally:
            del self._waiting[stream]

    @contextlib.contextmanager
    def batch(self, work: VectorWork) -> Iterator[VectorBatch]:
        """Inputs to turn into vectors here, until the context is left."""
        batch = VectorBatch(work, self, self._sequences)
        self._batches.add(batch)
        if self._up is not None:
            batch.tell(self._up)
        try:
            yield batch
        finally:
            self._batches.remove(batch)

    def __iter__(self) -> Iterator[LiveStream]:
        """The streams that were added, in order."""
        return iter(list(self._streams))

    def _deliver(self, outputs: Outputs) -> None:
        self._forecast.hear(outputs)
        by_stream: defaultdict[SequenceOwner, list[Item]] = defaultdict(list)
        for items in (
            outputs.started,
            outputs.prompt_logprobs,
            outputs.progress,
            outputs.tokens,
            outputs.finished,
        ):
            for item in items:
                if (stream := self._sequences.owner(item.sequence_id)) is not None:
                    by_stream[stream].append(item)
        for stream, mine in by_stream.items():
            stream.tell(mine)

    def _show_load(self, news: Loading) -> None:
        self.share = news.share if news.stage == WEIGHTS else self.share
        now = time.monotonic()
        if now >= self._told_load_at + _TELL_LOAD_S:
            self._told_load_at = now
            for stream in list(self._waiting):
                stream.tell_load(self.share)

    def _engine_is_up(self, news: EngineUp) -> None:
        self.model.ready = news.ready
        self._up, self.share = news, None
        self.loading.end()
        self.num_engine_starts += 1
        self.metrics.engine_is_up(news.ready)
        self.steps.clear()
        self.state = "ok"
        self._was_up.set()
        if self._settled and not self._settled.done():
            self._settled.set_result(None)
        for stream in self:
            self._submit(stream, news)
        for batch in self._batches:
            batch.tell(news)

    def _resize(self, news: EngineResized) -> None:
        assert self._up is not None
        self.model.ready = news.ready
        self._up = msgspec.structs.replace(self._up, ready=news.ready, pid=news.pid)
        if news.has_started:
            self.num_engine_starts += 1
            self.metrics.engine_is_up(news.ready)

    def _move(self, news: EngineDown, lost: tuple[SequenceId, ...]) -> None:
        """One of several engines is gone; another takes what it had."""
        assert self._up is not None
        self.metrics.replica_is_down(news)
        self._forecast.forget(lost)
        for owner in filter(None, dict.fromkeys(map(self._sequences.owner, lost))):
            owner.tell(news)
            owner.tell(self._up)

    def _submit(self, stream: LiveStream, up: EngineUp) -> None:
        try:
            if stream.served is None:
                check_can_begin(stream.record, self.model)
                stream.serve(self.model, self, self._sequences)
            else:
                began, num_tokens = stream.served, stream.num_tokens
                stream.smaller_context = check_can_go_on(*began, num_tokens, self.model)
        except RequestError as change:
            stream.end_now(change)
        stream.tell(up)

    def _engine_is_down(self, news: EngineDown) -> None:
        self._up = self.status = self.share = None
        self.loading.begin(ENGINE)
        self.metrics.engine_is_down(news)
        self._forecast.forget_running()
        if news.given_up:
            self.state, self.last_words = "dead", news.message
            for batch in self._batches:
                batch.stop(_GONE)
            return
        if self.state == "ok":
            self.state = "recovering"
        for owner in (*self, *self._batches):
            owner.tell(news)

    def _show_queue(self, status: Status) -> None:
        """Tells every waiting stream its place."""
        self.status = status
        self.metrics.show_status(status, self.model.ready)
        self.steps.extend(status.steps)
        self.tokens_per_s = status.prompt_tokens_per_s
        now = time.monotonic()
        self._forecast.measure_pace(status, now)
        if self._up is None:
            return
        starts = self._forecast.starts(status, self._num_places(status), self._asked)
        self.schedule = Schedule(now, starts)
        told: set[SequenceOwner] = set()
        for position, id in enumerate(status.queue, 1):
            stream = self._sequences.owner(id)
            if stream is not None and stream not in told:
                told.add(stream)
                wait_s = self.schedule.start(position).in_s
                eta_ms = None if wait_s is None else int(wait_s * 1000)
                stream.tell_place(InQueue(position, status.num_waiting, eta_ms))

    def _num_places(self, status: Status) -> int:
        """Sequences that can run at once; while memory is short, those that do run."""
        assert self._up is not None
        ready = self._up.ready
        first = self._asked(status.queue[0]).num_prompt if status.queue else 0
        has_memory = status.blocks_free >= ready.layout.blocks_for(first)
        return ready.max_num_seqs if has_memory else max(status.num_running, 1)

    def _asked(self, sequence_id: SequenceId) -> TokensAsked:
        stream = self._sequences.owner(sequence_id)
        return stream.asked(sequence_id) if stream else TokensAsked(0, 0)

    def _download(self, done: int, total: int) -> None:
        self.progress = (done, total)
        self.loading.download(done, total)
