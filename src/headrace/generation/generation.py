"""Admits requests, and puts together what answers them."""

import asyncio
import secrets
import time

import msgspec

from headrace.fleet.fleet import Fleet
from headrace.fleet.model_host import ModelHost
from headrace.fleet.model_list import Desired
from headrace.fleet.served_model import ServedModel
from headrace.generation.adapters import AdapterDesk
from headrace.generation.admission import Asked, Capacity, Place, Queues
from headrace.generation.choice import begins_in_reasoning
from headrace.generation.event_builder import EventBuilder
from headrace.generation.model_checks import admit, check_generates
from headrace.generation.prompt_trail import PromptTrail
from headrace.generation.registry import Found, Registry
from headrace.generation.resume import GONE, Resumption
from headrace.generation.store_chores import obey, sweep, watch
from headrace.generation.stream import LiveStream
from headrace.generation.vectors import VectorMaker
from headrace.generation.writers import RESTARTS, Writers
from headrace.metrics.metrics import Metrics
from headrace.streams.record import RENDERING, Names, Record
from headrace.streams.store import Store, Stored
from headrace.workers.image_fetch import ImageFetcher, is_public
from headrace.workers.image_file import Admitted
from headrace.workers.pool import Work
from headrace_common.config.settings import ServerConfig
from headrace_common.errors import RequestError
from headrace_common.ids import StreamId
from headrace_common.jobs import CheckedBody
from headrace_common.log_context import note
from headrace_common.request import Request
from headrace_common.system.race import uncut

PLAIN = Names()
_SHUTS_DOWN = RequestError(
    "server_shutdown", "The server is shutting down; send the request again."
)
_CACHED_S = 2.0  # for a model of the hub that is in its cache
_LEFT = RequestError("client_gone", "The client left before the request was taken.")


class Generation:
    """Turns a request into a stream. `run` is its one task, and owns those of all its parts."""

    def __init__(
        self,
        config: ServerConfig,
        hosts: tuple[ModelHost, ...],
        store: Store,
        work: Work,
        metrics: Metrics,
    ) -> None:
        self._tasks = tasks = asyncio.TaskGroup()
        self.fleet = Fleet(hosts, config, self._host_loaded, self._host_lost)
        self.work = work
        self.metrics = metrics
        allows = is_public if config.http.allow_image_urls else None
        self.pictures = ImageFetcher(allows, config.http.max_body_bytes)
        self.streams = Registry(store, metrics.server)
        self.queues = Queues(config.streams, self.fleet)
        self.adapters = AdapterDesk(self.fleet, self.streams)
        self._trail = PromptTrail(config.streams.log_prompt_excerpts)
        self.vectors = VectorMaker(self.queues, self.fleet, work)
        self.writers = Writers(
            self.fleet, self.streams, self.queues, config.streams, tasks, metrics.traces
        )
        self.resumption = Resumption(
            self.fleet, self.streams, self.writers, work, metrics.server, tasks
        )
        self.died = asyncio.Event()  # set once the only engine was given up
        self.desired: Desired | None = None  # where its models can be changed
        store.on_commit = metrics.server.committed

    @property
    def state(self) -> str:
        """loading, ok, recovering, draining or dead; of several models each has its own."""
        state = self.fleet.pinned.engine.state if self.fleet.pinned else "ok"
        state = "loading" if state == "unloaded" else state
        return "draining" if self.queues.is_draining and state != "dead" else state

    @property
    def last_words(self) -> str:
        """Why engines were given up."""
        words = (host.engine.last_words for host in self.fleet.hosts.all())
        return "\n".join(filter(None, words))

    async def run(self) -> None:
        """Runs until the fleet is closed, or the only engine has ended."""
        async with self._tasks:
            own = [
                self._tasks.create_task(self.resumption.take_up(), name="resume"),
                self._tasks.create_task(sweep(self.streams), name="sweep"),
                self._tasks.create_task(watch(self.streams), name="watch store"),
                self._tasks.create_task(self.resumption.adopt(), name="adopt"),
                self._tasks.create_task(obey(self.streams, self._tasks), name="obey"),
                self._tasks.create_task(self.work.run(), name="work"),
            ]
            if self.desired is not None:
                own.append(self._tasks.create_task(self.desired.pulls.run(), name="pulls"))
            self.fleet.start(self._tasks)
            await self.fleet.ended.wait()
            self.fleet.cancel()
            for task in own:
                task.cancel()
            if not self.died.is_set():
                self.streams.close(RESTARTS)
                self.writers.let_go(self.writers.tasks, _SHUTS_DOWN, RESTARTS)

    def streams_of(self, host: ModelHost) -> list[LiveStream]:
        """Streams that are computed there, in the order in which they came."""
        return [tenant for tenant in host.tenants if isinstance(tenant, LiveStream)]

    def _host_loaded(self, host: ModelHost) -> None:
        self.resumption.host_loaded(host)

    def _host_lost(self, host: ModelHost) -> None:
        if host is self.fleet.pinned:
            self.died.set()
            self.streams.close(GONE)
        streams = self.streams_of(host)
        for it in streams:
            if it.record.is_durable:
                self.resumption.keep(host, Stored(it.record, it.log), it.cut)
        self.writers.let_go(streams, GONE, GONE)

    async def host_for(self, name: str | None, waits: bool) -> ModelHost:
        """The host of that name, whose text side is known; RequestError says why there is none.

        `waits`: also for a download.
        """
        host = await self.fleet.find(name)
        self.queues.check_open(host)
        if host.known is None:
            if not (waits or host.is_here):
                reading, _ = await asyncio.wait([self.fleet.fetch(host)], timeout=_CACHED_S)
                if not reading:
                    raise _is_downloaded(host)
            await self.fleet.read(host)
        return host

    async def open(
        self,
        request: Request,
        names: Names = PLAIN,
        checked: CheckedBody | None = None,
        stream_id: StreamId | None = None,
    ) -> Found:
        """Admits a request; RequestError says why it is not served.

        `checked` has its prompts, if the request has only stubs of them. If another request has
        just taken the idempotency key, the stream is that one's.
        """
        host = self.fleet.hosts.exact(request.model)
        model = host.model
        adapter = model.adapters.get(request.model)
        check_generates(model)
        self.fleet.check_line()
        asked = Asked(names.owner, names.digest, request.num_choices)
        queue = self.queues.of(host, request.is_background)
        queue.check(asked, Capacity.of(model.ready), time.monotonic())
        checked = checked or CheckedBody({}, (), msgspec.msgpack.encode(request.prompts))
        packed = await self.pictures.put(self.work, request.prompts, checked.packed)
        admitted = await admit(self.work, model, request, packed, checked.ahead)
        if model.adapters.get(request.model) != adapter:
            raise self.fleet.hosts.unknown(request.model)  # it was unloaded meanwhile
        stream_id = stream_id or StreamId("cmpl-" + secrets.token_hex(16))
        is_durable = names.is_opted_in and self.streams.store.is_durable
        record = _record(stream_id, model, request, admitted, names)
        record = msgspec.structs.replace(record, is_durable=is_durable)
        asked = asked._replace(num_tokens=record.num_prompt_tokens)
        note(prompt_tokens=asked.num_tokens, **self._trail.follow(record, model))
        # from here on it counts, whatever its names have to wait for
        queue = self.queues.of(host, request.is_background)
        place = queue.enter(asked, Capacity.of(model.ready), time.monotonic())
        beginning = self._begin(host, record, place, admitted)
        if not names.is_opted_in:
            return await beginning
        # given up or not: what has a place in the store gets the writer it is found with
        return await uncut(beginning)

    async def _begin(
        self, host: ModelHost, record: Record, place: Place, admitted: Admitted
    ) -> Found:
        """The new stream, once it is accepted; or another one, if that holds its names."""
        stored = await self.streams.put(record, place)
        if stored.record.id != record.id:
            return await self.streams.wrap(stored)
        stored = Stored(record, stored.log)
        figures = host.metrics.of(record.request.is_background)
        builder = EventBuilder(record, host.model, figures)
        stream = self.writers.start(host, stored, builder, place, admitted)
        try:
            accepted = stream.audience.pause.unless(stored.log.wait(-1))
            await self.streams.unless_stalled(record, accepted)
        except BaseException as error:
            stream.stop(error if isinstance(error, RequestError) else _LEFT)
            stream.audience.close()
            raise
        return stream

    async def drain(self, seconds: float) -> None:
        """Refuses new requests, and gives the running ones `seconds` to end."""
        self.queues.end()
        self.fleet.refuse(_SHUTS_DOWN)
        tasks = self.writers.tasks.items()
        writing = [task for it, task in tasks if not it.record.request.is_background]
        if ends := [*writing, *self.vectors.ends()]:
            await asyncio.wait(ends, timeout=seconds)
        self.vectors.stop(_SHUTS_DOWN)
        self.streams.pause(RESTARTS)
        for stream in self.streams:
            if not stream.record.is_durable:
                # the engine may be loading or hang: no waiting for it
                stream.end_now(_SHUTS_DOWN)


def _record(
    stream_id: StreamId, model: ServedModel, request: Request, admitted: Admitted, names: Names
) -> Record:
    """Adds the model's end tokens, and a grammar that waits where the prompt opens reasoning."""
    sampling = msgspec.structs.replace(request.sampling, end_token_ids=model.spec.end_token_ids)
    record = Record(
        id=stream_id,
        created=int(time.time()),
        request=msgspec.structs.replace(request, sampling=sampling),
        prompts=admitted.prompts,
        images=admitted.images,
        system_fingerprint=model.system_fingerprint,
        names=names,
        served=model.setup,
        tokenization=admitted.tokenization,
        changes=admitted.changes,
        adapter=model.adapters.get(request.model),
        rendering=RENDERING,
    )
    if sampling.grammar_tags and begins_in_reasoning(record, 0, model.tokenizer):
        sampling = msgspec.structs.replace(sampling, grammar_waits=True)
        request = msgspec.structs.replace(request, sampling=sampling)
        record = msgspec.structs.replace(record, request=request)
    return record


def _is_downloaded(host: ModelHost) -> RequestError:
    """The error for a request whose bytes are counted: its log cannot open without a tokenizer."""
    done, total = host.loading.downloaded or (0, 0)
    share = f" ({100 * done // total} %)" if total else ""
    message = f"The model {host.name!r} is being downloaded{share}; send the request again."
    return RequestError("model_loading", message, "model", retry_after_s=5)
