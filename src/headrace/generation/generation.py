"""Admits requests, owns their streams, and brings them what the engine says."""

import asyncio
import contextlib
import logging
import secrets
import time
from collections import defaultdict, deque

import msgspec

from headrace.core.config import ServerConfig
from headrace.core.errors import RequestError
from headrace.core.ids import StreamId
from headrace.core.messages import NUM_TRACED_STEPS, Outputs, Ready, Status, StepTrace
from headrace.core.request import Request
from headrace.engine.client import EngineClient, EngineDown, EngineUp
from headrace.generation.admission import Admission
from headrace.generation.bounds import check_can_serve, check_queue
from headrace.generation.draft import Draft
from headrace.generation.progress import InQueue
from headrace.generation.registry import Found, Registry
from headrace.generation.sequences import Sequences
from headrace.generation.served import Models, ServedModel
from headrace.generation.stream import Item, Stream
from headrace.streams.log import Log, MemoryLog
from headrace.streams.record import Names, Record
from headrace.streams.store import Retention, Store, Stored, StoreStalled

logger = logging.getLogger(__name__)

PLAIN = Names()
_PAGE = 256
_SWEEP_INTERVAL_S = 60.0
_ID_PREFIX = {"/v1/chat/completions": "chatcmpl-", "/v1/completions": "cmpl-"}


class Generation:
    """`run` is its one task, and the owner of every stream's."""

    def __init__(
        self, config: ServerConfig, model: ServedModel, engine: EngineClient, store: Store
    ) -> None:
        self.models = Models((model,))
        self.admission = Admission()
        self.streams = Registry(store)
        self.state = "loading"
        self.status: Status | None = None  # the engine's newest numbers
        self.steps: deque[StepTrace] = deque(maxlen=NUM_TRACED_STEPS)  # and its last steps
        self.num_engine_starts = 0
        self.last_words = ""  # why the engine was given up
        self.died = asyncio.Event()  # set once it was
        self._config = config
        self._engine = engine
        self._was_up = asyncio.Event()
        self._up: EngineUp | None = None  # while it is
        self._sequences: Sequences[Stream] = Sequences(engine)
        self._writers: dict[Stream, asyncio.Task[None]] = {}
        self._tasks = asyncio.TaskGroup()

    @property
    def is_engine_up(self) -> bool:
        return self._up is not None

    async def run(self) -> None:
        """Until the engine's client is closed."""
        async with self._tasks:
            for stored in await self.streams.store.unfinished():
                await self._resume(stored)
            sweeping = self._tasks.create_task(self._sweep(), name="sweep")
            watching = self._tasks.create_task(self._watch_store(), name="watch store")
            async for news in self._engine.outputs():
                if isinstance(news, Outputs):
                    self._deliver(news)
                elif isinstance(news, Status):
                    self._show_queue(news)
                elif isinstance(news, EngineUp):
                    self._engine_is_up(news)
                else:
                    self._engine_is_down(news)
            sweeping.cancel()
            watching.cancel()
            self._let_go("server_shutdown", "The server was shut down; send the request again.")
        self.admission.close()

    async def wait_until_ready(self) -> Ready:
        """The engine's limits, once it has loaded."""
        await self._was_up.wait()
        ready = self.models.all()[0].ready
        assert ready is not None
        return ready

    async def attach(self, names: Names, may_take_over: bool) -> Found | None:
        """The stream that the request would only repeat, whatever else would refuse it."""
        return await self.streams.find_equal(names, may_take_over)

    async def open(self, request: Request, names: Names = PLAIN) -> Found:
        """Admits a request; RequestError says why it is not served.

        The stream is another's if its idempotency key was taken in this very moment.
        """
        model = self.models.get(request.model)
        self._check_room(model)
        prompts = await self.admission.prompts(model, request)
        self._check_room(model)
        record = self._record(model, request, prompts, names)
        log: Log = MemoryLog()
        if names.is_opted_in:
            stored = await self.streams.claim(record)
            if stored.record.id != record.id:
                return await self.streams.wrap(stored)
            log = stored.log
        stream = self._stream(record, Draft(record, model), log)
        await stream.accept()
        self._start(stream)
        return stream

    async def drain(self, seconds: float) -> None:
        """Refuses new requests, and gives the others `seconds` to end by themselves."""
        self.state = "draining"
        if self._writers:
            await asyncio.wait(self._writers.values(), timeout=seconds)
        for stream in self.streams:
            if stream.record.is_durable:
                stream.interruption.set(
                    RequestError("server_restarting", "The server restarts; read on after it.")
                )
            else:
                # without waiting for the engine: it may be loading, or hang
                stream.end_now(RequestError("server_shutdown", "The server is shutting down."))

    async def _watch_store(self) -> None:
        """Sends the readers of durable streams away while the store takes nothing."""
        store = self.streams.store
        stalled = RequestError("storage_stalled", "The disk takes nothing now; read on later.")
        while True:
            await store.stalled.wait()
            for stream in self.streams:
                if stream.record.is_durable:
                    stream.interruption.set(stalled)
            await store.writable.wait()
            for stream in self.streams:
                stream.interruption.clear()

    async def _sweep(self) -> None:
        """Forgets what retention does not keep, again and again."""
        while True:
            with contextlib.suppress(StoreStalled):
                await self.streams.store.sweep(Retention(), time.time())
            await asyncio.sleep(_SWEEP_INTERVAL_S)

    async def _resume(self, stored: Stored) -> None:
        """Goes on with a stream that an earlier server left unfinished."""
        draft = Draft(stored.record, self.models.all()[0])
        mismatch: RequestError | None = None
        after = -1
        while page := (await stored.log.read(after, _PAGE))[0]:
            mismatch = mismatch or draft.replay(page)
            after = page[-1].seq
        stream = self._stream(stored.record, draft, stored.log)
        if after < 0:
            await stream.accept()
        if mismatch:
            stream.end_now(mismatch)
        self._start(stream)

    def _check_room(self, model: ServedModel) -> None:
        check_can_serve(self.state)
        check_queue(self.streams, model, self._config.streams.max_num_queued_reqs)

    def _record(
        self, model: ServedModel, request: Request, prompts: tuple[bytes, ...], names: Names
    ) -> Record:
        sampling = msgspec.structs.replace(request.sampling, end_token_ids=model.spec.end_token_ids)
        return Record(
            id=StreamId(_ID_PREFIX[request.route] + secrets.token_hex(16)),
            created=int(time.time()),
            request=msgspec.structs.replace(request, sampling=sampling),
            prompts=prompts,
            system_fingerprint=model.system_fingerprint,
            names=names,
            is_durable=names.is_opted_in and self.streams.store.is_durable,
        )

    def _stream(self, record: Record, draft: Draft, log: Log) -> Stream:
        return Stream(record, draft, self._sequences, log, self._config.streams.linger_s)

    def _start(self, stream: Stream) -> None:
        self.streams.add(stream)
        self._writers[stream] = self._tasks.create_task(self._write(stream), name="stream")
        if self._up is not None:
            stream.tell(self._up)

    async def _write(self, stream: Stream) -> None:
        try:
            await self._run(stream)
            if not stream.record.names.is_opted_in:
                await stream.audience.abandoned.wait()
        finally:
            self.streams.remove(stream)
            del self._writers[stream]

    async def _run(self, stream: Stream) -> None:
        try:
            await stream.run()
        except StoreStalled:
            # what the store has not taken never happened; once it takes again, go on from there
            await self.streams.store.writable.wait()
            await self._resume(Stored(stream.record, stream.log))

    def _deliver(self, outputs: Outputs) -> None:
        by_stream: defaultdict[Stream, list[Item]] = defaultdict(list)
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
        self.models.all()[0].ready = news.ready
        self._up = news
        self.num_engine_starts += 1
        self.steps.clear()
        self._was_up.set()
        if self.state != "draining":
            self.state = "ok"
        for stream in self.streams:
            if stream.record.system_fingerprint != self.models.all()[0].system_fingerprint:
                stream.end_now(RequestError("model_changed", "The server now runs other weights."))
            stream.tell(news)

    def _engine_is_down(self, news: EngineDown) -> None:
        self._up = self.status = None
        if news.given_up:
            self.state, self.last_words = "dead", news.message
            self.died.set()
            self._let_go("engine_failed", "The engine stopped and could not be restarted.")
            return
        if self.state == "ok":
            self.state = "recovering"
        for stream in self.streams:
            stream.tell(news)

    def _show_queue(self, status: Status) -> None:
        """Tells every waiting stream its place."""
        self.status = status
        self.steps.extend(status.steps)
        num_ahead = 0
        for position, sequence_id in enumerate(status.queue, 1):
            stream = self._sequences.owner(sequence_id)
            if stream is None:
                continue
            rate = status.prompt_tokens_per_s
            eta_ms = int(num_ahead / rate * 1000) if rate else None
            stream.tell(InQueue(position, status.num_waiting, eta_ms))
            num_ahead += stream.record.num_prompt_tokens

    def _let_go(self, code: str, message: str) -> None:
        """Ends every stream but the durable ones: a later server goes on with those."""
        for stream, writer in list(self._writers.items()):
            if stream.record.is_durable:
                stream.interruption.set(RequestError(code, message))
                writer.cancel()
            else:
                stream.end_now(RequestError(code, message))
                stream.audience.close()
