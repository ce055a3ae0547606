"""Admits requests, owns their streams, and delivers to each what the engine says of it."""

import asyncio
import contextlib
import logging
import secrets
import time
from collections import defaultdict, deque

import msgspec

from headrace.core.config import ServerConfig
from headrace.core.errors import RequestError
from headrace.core.ids import SequenceId, StreamId
from headrace.core.messages import NUM_TRACED_STEPS, Outputs, Ready, Status, StepTrace
from headrace.core.request import Request
from headrace.engine.client import EngineClient, EngineDown, EngineUp
from headrace.generation.choice import begins_in_reasoning
from headrace.generation.event_builder import EventBuilder, InQueue, to_event
from headrace.generation.forecast import Forecast, TokensAsked
from headrace.generation.metrics import Metrics
from headrace.generation.registry import Found, Registry
from headrace.generation.served import Models, ServedModel, admit, check_can_go_on
from headrace.generation.stream import Item, LiveStream, Sequences
from headrace.generation.work import Work
from headrace.streams.log import Log, LogConflict, MemoryLog
from headrace.streams.record import Names, Record
from headrace.streams.store import Retention, Store, Stored, StoreStalled

logger = logging.getLogger(__name__)

PLAIN = Names()
_SHUTS_DOWN = RequestError(
    "server_shutdown", "The server is shutting down; send the request again."
)
_RESTARTS = RequestError("server_restarting", "The server is restarting; read on once it is back.")
_CANNOT_WRITE = "The server cannot write to its disk now; read on later."
_PAGE = 256
_SWEEP_INTERVAL_S = 60.0
_RESUME_AGAIN_S = 1.0  # when the store could not be read
_NO_ENGINE = EngineDown("engine_failed", "", given_up=False)


class Generation:
    """`run` is its one task, and owns the tasks of all streams."""

    def __init__(
        self,
        config: ServerConfig,
        model: ServedModel,
        engine: EngineClient,
        store: Store,
        work: Work,
    ) -> None:
        self.models = Models((model,))
        self.work = work
        self.streams = Registry(store)
        self.state = "loading"
        self.status: Status | None = None  # the engine's latest numbers
        self.steps: deque[StepTrace] = deque(maxlen=NUM_TRACED_STEPS)  # and its last steps
        self.num_engine_starts = 0
        self.metrics = Metrics()
        self.last_words = ""  # why the engine was given up
        self.died = asyncio.Event()  # set once it was
        self._config = config.streams
        self._model = model
        self._engine = engine
        self._store = store
        self._was_up = asyncio.Event()
        self._up: EngineUp | None = None  # while it is
        self._sequences = Sequences()
        self._forecast = Forecast()
        self._writers: dict[LiveStream, asyncio.Task[None]] = {}
        self._tasks = asyncio.TaskGroup()

    @property
    def is_engine_up(self) -> bool:
        return self._up is not None

    @property
    def engine_pid(self) -> int | None:
        """The process of an engine that is up, if it has one of its own."""
        return self._up.pid if self._up else None

    async def run(self) -> None:
        """Runs until the engine's client is closed."""
        async with self._tasks:
            own = [
                self._tasks.create_task(self._resume_all(), name="resume"),
                self._tasks.create_task(self._sweep(), name="sweep"),
                self._tasks.create_task(self._watch_store(), name="watch store"),
                self._tasks.create_task(self.work.run(), name="work"),
            ]
            async for news in self._engine.outputs():
                if isinstance(news, Outputs):
                    self._deliver(news)
                elif isinstance(news, Status):
                    self._show_queue(news)
                elif isinstance(news, EngineUp):
                    self._engine_is_up(news)
                else:
                    self._engine_is_down(news)
            for task in own:
                task.cancel()
            if not self.died.is_set():
                self._let_go(_SHUTS_DOWN, _RESTARTS)

    async def wait_until_ready(self) -> Ready:
        """The engine's limits, once it has loaded."""
        await self._was_up.wait()
        assert self._model.ready is not None
        return self._model.ready

    async def attach(self, names: Names, may_take_over: bool) -> Found | None:
        """The stream that the request would only repeat, whatever else would refuse it."""
        return await self.streams.find_equal(names, may_take_over)

    async def open(
        self,
        request: Request,
        names: Names = PLAIN,
        packed: bytes | None = None,
        id_prefix: str = "cmpl-",
    ) -> Found:
        """Admits a request; RequestError says why it is not served.

        `packed` are its prompts, if the request has only stubs of them. If another request has
        just taken the idempotency key, the stream is that one's.
        """
        model = self.models.get(request.model)
        self._check_room(model)
        packed = msgspec.msgpack.encode(request.prompts) if packed is None else packed
        prompts = await admit(self.work, model, request, packed)
        self._check_room(model)
        stream_id = StreamId(id_prefix + secrets.token_hex(16))
        record = self._record(stream_id, model, request, prompts, names)
        stored = Stored(record, MemoryLog())
        if names.is_opted_in:
            stored = await self.streams.claim(record)
        elif names.is_kept:
            stored = await self.streams.keep(record)
        if stored.record.id != record.id:
            return await self.streams.wrap(stored)
        stream = self._stream(record, EventBuilder(record, model), stored.log)
        self._start(stream)
        try:
            accepted = stream.interruption.unless(stored.log.wait(-1))
            await self.streams.unless_stalled(record, accepted)
        except BaseException as error:
            gone = RequestError("client_gone", "The client left before the request was taken.")
            stream.stop(error if isinstance(error, RequestError) else gone)
            stream.close_to_readers()
            raise
        return stream

    async def drain(self, seconds: float) -> None:
        """Refuses new requests, and gives the running ones `seconds` to end."""
        self.state = "draining"
        if self._writers:
            await asyncio.wait(self._writers.values(), timeout=seconds)
        for stream in self.streams:
            if stream.record.is_durable:
                stream.interruption.set(_RESTARTS)
            else:
                # the engine may be loading or hang: no waiting for it
                stream.end_now(_SHUTS_DOWN)

    async def _watch_store(self) -> None:
        """Sends the readers of durable streams away while the store cannot write."""
        while True:
            await self._store.stalled.wait()
            for stream in self.streams:
                if stream.record.is_durable:
                    stream.interruption.set(RequestError("storage_stalled", _CANNOT_WRITE))
            await self._store.writable.wait()
            for stream in self.streams:
                stream.interruption.clear()

    async def _resume_all(self) -> None:
        """Goes on with what an earlier server left unfinished, as soon as the store can write."""
        while True:
            with contextlib.suppress(StoreStalled):
                unfinished = await self._store.unfinished()
                break
            await self._store.writable.wait()
        for stored in unfinished:
            self.metrics.recovered()
            await self._resume(stored)

    async def _sweep(self) -> None:
        """Once a minute, forgets what retention does not keep."""
        while True:
            await self.streams.sweep()
            with contextlib.suppress(StoreStalled):
                await self._store.sweep(Retention(), time.time())
            await asyncio.sleep(_SWEEP_INTERVAL_S)

    async def _resume(self, stored: Stored, cut: RequestError | None = None) -> None:
        """Goes on with a stream that an earlier server left unfinished, or ends it as `cut`."""
        try:
            builder = EventBuilder(stored.record, self._model)
            after = -1
            while page := (await stored.log.read(after, _PAGE))[0]:
                mismatch = builder.replay(page)
                cut = cut or mismatch
                after = page[-1].seq
        except StoreStalled:
            self._tasks.create_task(self._resume_later(stored, cut), name="resume later")
            return
        except Exception:  # one stream, and not the server
            logger.exception("A stream of an earlier run cannot be resumed")
            self._tasks.create_task(_give_up(stored.log), name="give up")
            return
        stream = self._stream(stored.record, builder, stored.log)
        if cut:
            stream.end_now(cut)
        self._start(stream)

    async def _resume_later(self, stored: Stored, cut: RequestError | None) -> None:
        await asyncio.sleep(_RESUME_AGAIN_S)
        await self._resume(stored, cut)

    def _check_room(self, model: ServedModel) -> None:
        """RequestError unless the engine is up, or about to be again, and there is room."""
        if self.state == "loading":
            raise RequestError("model_loading", "Loading model", retry_after_s=2)
        if self.state == "draining":
            raise RequestError("server_shutdown", "The server is shutting down.", retry_after_s=5)
        if self.state == "dead":
            raise RequestError("engine_failed", "The engine stopped for good.", retry_after_s=30)
        self.streams.check_room(model, self._config.max_num_queued_reqs)

    def _record(
        self,
        stream_id: StreamId,
        model: ServedModel,
        request: Request,
        prompts: tuple[bytes, ...],
        names: Names,
    ) -> Record:
        sampling = msgspec.structs.replace(request.sampling, end_token_ids=model.spec.end_token_ids)
        record = Record(
            id=stream_id,
            created=int(time.time()),
            request=msgspec.structs.replace(request, sampling=sampling),
            prompts=prompts,
            system_fingerprint=model.system_fingerprint,
            names=names,
            is_durable=names.is_opted_in and self._store.is_durable,
            served=model.form,
        )
        if not (sampling.grammar_tags and begins_in_reasoning(record, 0, model.tokenizer)):
            return record
        sampling = msgspec.structs.replace(sampling, grammar_waits=True)
        return msgspec.structs.replace(
            record, request=msgspec.structs.replace(request, sampling=sampling)
        )

    def _stream(self, record: Record, builder: EventBuilder, log: Log) -> LiveStream:
        linger_s = self._config.linger_s
        return LiveStream(record, builder, log, self._engine, self._sequences, linger_s)

    def _start(self, stream: LiveStream) -> None:
        self.streams.add(stream)
        self._writers[stream] = self._tasks.create_task(self._write(stream), name="stream")
        if self._up is None:
            stream.tell(_NO_ENGINE)
        else:
            self._submit(stream, self._up)

    async def _write(self, stream: LiveStream) -> None:
        try:
            await self._run(stream)
            if not stream.record.names.is_opted_in:
                await stream.wait_until_abandoned()
        except Exception:  # one stream, and not the server
            logger.exception("The log of a stream cannot be written")
            failure = RequestError("internal_error", "The log of this stream cannot be written.")
            stream.interruption.set(failure)
            stream.ended.set()
        finally:
            self.streams.remove(stream)
            del self._writers[stream]

    async def _run(self, stream: LiveStream) -> None:
        try:
            if stream.log.next_seq == 0:
                await stream.accept()
            await stream.run()
            outcome = stream.cut.code if stream.cut else "finished"
            route = stream.record.request.route
            self.metrics.ended(route, outcome, stream.tally, stream.age_s)
        except StoreStalled:
            # what the store does not have never happened; once it can write, go on from there
            await self._store.writable.wait()
            await self._resume(Stored(stream.record, stream.log), stream.cut)

    def _deliver(self, outputs: Outputs) -> None:
        self._forecast.hear(outputs)
        by_stream: defaultdict[LiveStream, list[Item]] = defaultdict(list)
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

    def _engine_is_up(self, news: EngineUp) -> None:
        self._model.ready = news.ready
        self._up = news
        self.num_engine_starts += 1
        self.metrics.engine_is_up(news.ready)
        self.steps.clear()
        self._was_up.set()
        if self.state != "draining":
            self.state = "ok"
        for stream in self.streams:
            self._submit(stream, news)

    def _submit(self, stream: LiveStream, up: EngineUp) -> None:
        try:
            num_tokens = stream.num_tokens
            stream.smaller_context = check_can_go_on(stream.record, num_tokens, self._model)
        except RequestError as change:
            stream.end_now(change)
        stream.tell(up)

    def _engine_is_down(self, news: EngineDown) -> None:
        self._up = self.status = None
        self.metrics.engine_is_down()
        self._forecast.forget_running()
        if news.given_up:
            self.state, self.last_words = "dead", news.message
            self.died.set()
            gone = RequestError("engine_failed", "The engine stopped and could not be restarted.")
            self._let_go(gone, gone)
            return
        if self.state == "ok":
            self.state = "recovering"
        for stream in self.streams:
            stream.tell(news)

    def _show_queue(self, status: Status) -> None:
        """Tells every waiting stream its place."""
        self.status = status
        self.metrics.look(status, self._model.ready)
        self.steps.extend(status.steps)
        self._forecast.look(status, time.monotonic())
        if self._up is None:
            return
        told: set[LiveStream] = set()
        waits = self._forecast.waits(status, self._num_places(status), self._asked)
        for position, (id, wait) in enumerate(zip(status.queue, waits, strict=False), 1):
            stream = self._sequences.owner(id)
            if stream is not None and stream not in told:
                told.add(stream)
                eta_ms = None if wait is None else int(wait * 1000)
                stream.tell(InQueue(position, status.num_waiting, eta_ms))

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

    def _let_go(self, plain: RequestError, durable: RequestError) -> None:
        """Ends all streams but the durable ones: a later server goes on with those."""
        self.streams.close(durable)
        for stream, writer in list(self._writers.items()):
            if stream.record.is_durable:
                stream.interruption.set(durable)
                writer.cancel()
            else:
                stream.end_now(plain)
                stream.close_to_readers()


async def _give_up(log: Log) -> None:
    """Ends a stream that nobody can go on with."""
    error = RequestError("resume_mismatch", "This server cannot go on with what was generated.")
    with contextlib.suppress(StoreStalled, LogConflict):
        seq = log.next_seq
        await log.append(seq, [to_event(error, seq, at_ms=0)])
