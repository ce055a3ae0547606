"""Admits requests, owns their streams, and brings them what the engine says."""

import asyncio
import logging
import secrets
import time
from collections import defaultdict

import msgspec

from headrace.core.config import ServerConfig
from headrace.core.errors import RequestError
from headrace.core.ids import StreamId
from headrace.core.messages import Outputs, Ready, Status
from headrace.core.request import Request
from headrace.engine.client import EngineClient, EngineDown, EngineUp
from headrace.generation.admission import Admission
from headrace.generation.draft import Draft
from headrace.generation.progress import InQueue
from headrace.generation.sequences import Sequences
from headrace.generation.served import Models, ServedModel
from headrace.generation.stream import Item, Stream
from headrace.streams.log import MemoryLog
from headrace.streams.record import Record

logger = logging.getLogger(__name__)

_ID_PREFIX = {"/v1/chat/completions": "chatcmpl-", "/v1/completions": "cmpl-"}


class Generation:
    """`run` is its one task, and the owner of every stream's."""

    def __init__(self, config: ServerConfig, model: ServedModel, engine: EngineClient) -> None:
        self.models = Models((model,))
        self.state = "loading"
        self.last_words = ""  # why the engine was given up
        self.died = asyncio.Event()  # set once it was
        self.status: Status | None = None  # the engine's newest numbers
        self._was_up = asyncio.Event()
        self._up: EngineUp | None = None  # while it is
        self._config = config
        self._engine = engine
        self.admission = Admission()
        self._sequences: Sequences[Stream] = Sequences(engine)
        self._streams: dict[StreamId, Stream] = {}
        self._writers: set[asyncio.Task[None]] = set()
        self._tasks = asyncio.TaskGroup()

    async def run(self) -> None:
        """Until the engine's client is closed."""
        async with self._tasks:
            async for news in self._engine.outputs():
                if isinstance(news, Outputs):
                    self._deliver(news)
                elif isinstance(news, Status):
                    self._show_queue(news)
                elif isinstance(news, EngineUp):
                    self._engine_is_up(news)
                else:
                    self._engine_is_down(news)
            self._end_all("server_shutdown", "The server was shut down; send the request again.")
        self.admission.close()

    async def wait_until_ready(self) -> Ready:
        """The engine's limits, once it has loaded."""
        await self._was_up.wait()
        ready = self.models.all()[0].ready
        assert ready is not None
        return ready

    async def open(self, request: Request) -> Stream:
        """Admits a request; RequestError says why it is not served."""
        model = self.models.get(request.model)
        self._check_can_serve()
        self._check_queue(model)
        prompts = await self.admission.prompts(model, request)
        self._check_can_serve()
        self._check_queue(model)
        stream = self._make_stream(model, request, prompts)
        await stream.accept()
        self._streams[stream.record.id] = stream
        writer = self._tasks.create_task(self._run_stream(stream), name=stream.record.id)
        self._writers.add(writer)
        writer.add_done_callback(self._writers.discard)
        if self._up is not None:
            stream.tell(self._up)
        return stream

    async def drain(self, seconds: float) -> None:
        """Refuses new requests, lets the others end, and after `seconds` ends them."""
        self.state = "draining"
        if self._writers:
            await asyncio.wait(self._writers, timeout=seconds)
        for stream in self._streams.values():
            stream.stop(RequestError("server_shutdown", "The server is shutting down."))

    @property
    def num_live_streams(self) -> int:
        return len(self._streams)

    def _make_stream(
        self, model: ServedModel, request: Request, prompts: tuple[bytes, ...]
    ) -> Stream:
        sampling = msgspec.structs.replace(request.sampling, end_token_ids=model.spec.end_token_ids)
        record = Record(
            id=StreamId(_ID_PREFIX[request.route] + secrets.token_hex(16)),
            created=int(time.time()),
            request=msgspec.structs.replace(request, sampling=sampling),
            prompts=prompts,
            system_fingerprint=model.system_fingerprint,
        )
        linger_s = self._config.streams.linger_s
        return Stream(record, Draft(record, model), self._sequences, MemoryLog(), linger_s)

    async def _run_stream(self, stream: Stream) -> None:
        try:
            await stream.run()
            await stream.audience.abandoned.wait()
        finally:
            del self._streams[stream.record.id]

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
        self._was_up.set()
        if self.state != "draining":
            self.state = "ok"
        for stream in self._streams.values():
            stream.tell(news)

    def _engine_is_down(self, news: EngineDown) -> None:
        self._up = self.status = None
        if news.given_up:
            self.state, self.last_words = "dead", news.message
            self.died.set()
            self._end_all("engine_failed", "The engine stopped and could not be restarted.")
            return
        if self.state == "ok":
            self.state = "recovering"
        for stream in self._streams.values():
            stream.tell(news)

    def _show_queue(self, status: Status) -> None:
        """Tells every waiting stream its place."""
        self.status = status
        num_ahead = 0
        for position, sequence_id in enumerate(status.queue, 1):
            stream = self._sequences.owner(sequence_id)
            if stream is None:
                continue
            rate = status.prompt_tokens_per_s
            eta_ms = int(num_ahead / rate * 1000) if rate else None
            stream.tell(InQueue(position, status.num_waiting, eta_ms))
            num_ahead += stream.record.num_prompt_tokens

    def _end_all(self, code: str, message: str) -> None:
        for stream in self._streams.values():
            stream.end_now(RequestError(code, message))

    def _check_can_serve(self) -> None:
        if self.state == "loading":
            raise RequestError("model_loading", "Loading model", retry_after_s=2)
        if self.state == "draining":
            raise RequestError("server_shutdown", "The server is shutting down.", retry_after_s=5)
        if self.state == "dead":
            raise RequestError("engine_failed", "The engine stopped for good.", retry_after_s=30)

    def _check_queue(self, model: ServedModel) -> None:
        """Refuses what would wait beyond the bound; a free place is no waiting."""
        num_waiting = sum(not stream.has_started for stream in self._streams.values())
        num_live = sum(stream.num_live for stream in self._streams.values())
        bound = self._config.streams.max_num_queued_reqs
        has_place = model.ready is not None and num_live < model.ready.max_num_seqs
        if num_waiting >= bound and not has_place:
            raise RequestError(
                "server_overloaded",
                f"{num_waiting} requests are waiting, and --max-num-queued-reqs is {bound}; "
                "try again later.",
                retry_after_s=5,
            )
