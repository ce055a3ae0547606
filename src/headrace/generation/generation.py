"""Admits requests, and builds the components that generate the answers."""

import asyncio
import secrets
import time

import msgspec

from headrace.fleet.fleet import Fleet
from headrace.fleet.model_host import ModelHost
from headrace.fleet.model_list import ModelChanges, ModelList
from headrace.fleet.served_model import ServedModel
from headrace.generation.adapters import AdapterService
from headrace.generation.admission import Capacity, Demand, Queues, QueueTicket
from headrace.generation.choice import begins_in_reasoning
from headrace.generation.event_builder import EventBuilder
from headrace.generation.model_checks import admit, check_generates
from headrace.generation.prefix_misses import PrefixMisses
from headrace.generation.registry import Found, Registry, cut_by
from headrace.generation.resume import GONE, Resumption
from headrace.generation.store_tasks import serve_other_servers, sweep, watch
from headrace.generation.stream import LiveStream
from headrace.generation.vectors import VectorMaker
from headrace.generation.writers import RESTARTS, Writers
from headrace.metrics.metrics import Metrics
from headrace.streams.record import RENDERING, Names, Record
from headrace.streams.store import Store, Stored
from headrace.workers.image_fetch import ImageFetcher, is_public
from headrace.workers.image_file import Admitted
from headrace.workers.input_memory import HeldInput
from headrace.workers.pool import JobRunner
from headrace_common.config.settings import ServerConfig
from headrace_common.errors import RequestError
from headrace_common.ids import StreamId
from headrace_common.log_context import note
from headrace_common.request import Request
from headrace_common.system.race import uncut
from headrace_common.worker_jobs import CheckedBody

PLAIN = Names()
_SHUTS_DOWN = RequestError(
    "server_shutdown", "The server is shutting down; send the request again."
)
# The time that a request waits for a hub model that may already be in the download cache.
_CACHED_S = 2.0  # seconds
_LEFT = RequestError("client_gone", "The client left before the request was accepted.")


class Generation:
    """Turns requests into streams. `run` owns the tasks of all components."""

    def __init__(
        self,
        config: ServerConfig,
        hosts: tuple[ModelHost, ...],
        store: Store,
        work: JobRunner,
        metrics: Metrics,
        changes: ModelChanges | None = None,
    ) -> None:
        """Build all components. The list of models is fixed if `changes` is None."""
        changes = changes or ModelChanges.none(hosts)
        self._config = config.streams
        self._tasks = tasks = asyncio.TaskGroup()
        self._renew = changes.renew
        self.fleet = Fleet(hosts, config, self._host_loaded, self._host_lost, self._reread_models)
        self.desired = ModelList(changes, self.fleet)
        self.work = work
        self.metrics = metrics
        self.streams = Registry(store, metrics.server)
        self.queues = Queues(config.streams, self.fleet)
        allows = is_public if config.http.allow_image_urls else None
        most = config.http.max_body_bytes
        self.image_fetcher = ImageFetcher(allows, most, self.queues.inputs)
        self.adapters = AdapterService(self.fleet, self.streams, self._renew_workers)
        self._prefix_misses = PrefixMisses(config.streams.log_prompt_excerpts)
        self.vectors = VectorMaker(self.queues, self.fleet, work)
        self.writers = Writers(
            self.fleet,
            self.streams,
            self.queues,
            config.streams,
            tasks,
            metrics.traces,
            self._outlast_stall,
        )
        self.resumption = Resumption(
            self.fleet, self.streams, self.writers, work, metrics.server, tasks
        )
        # Set when the engine of the only model could not be restarted.
        self.died = asyncio.Event()

    @property
    def state(self) -> str:
        """Return loading, ok, recovering, draining or dead.

        This is the state of the server; with several models, each model also has its own state.
        """
        state = self.fleet.pinned.engine.state if self.fleet.pinned else "ok"
        state = "loading" if state == "unloaded" else state
        return "draining" if self.queues.is_draining and state != "dead" else state

    @property
    def last_words(self) -> str:
        """Return the reasons why engines could not be restarted."""
        words = (host.engine.last_words for host in self.fleet.hosts.all())
        return "\n".join(filter(None, words))

    async def run(self) -> None:
        """Run until the fleet is closed or the only engine has ended."""
        async with self._tasks:
            own = [
                self._tasks.create_task(self.resumption.take_up(), name="resume"),
                self._tasks.create_task(sweep(self.streams, self._config), name="sweep"),
                self._tasks.create_task(watch(self.streams), name="watch store"),
                self._tasks.create_task(self.resumption.adopt(), name="adopt"),
                self._tasks.create_task(
                    serve_other_servers(self.streams, self._tasks), name="other servers"
                ),
                self._tasks.create_task(self.work.run(), name="work"),
                self._tasks.create_task(self.desired.run(), name="pulls"),
            ]
            self.fleet.start(self._tasks)
            await self.fleet.ended.wait()
            self.fleet.cancel()
            for task in own:
                task.cancel()
            if not self.died.is_set():
                self.streams.close(RESTARTS)
                self.writers.let_go(self.writers.tasks, _SHUTS_DOWN, RESTARTS)

    def streams_of(self, host: ModelHost) -> list[LiveStream]:
        """Return the streams that this host runs, in order of arrival."""
        return [user for user in host.users if isinstance(user, LiveStream)]

    async def _reread_models(self) -> None:
        await self.desired.reread()

    def _renew_workers(self) -> None:
        # A server with one model accepts any model name, so its workers need no new names.
        # Replacing the workers would delay requests.
        if self.fleet.pinned is None:
            self._renew(self.fleet.hosts.all())

    def _host_loaded(self, host: ModelHost) -> None:
        self.resumption.host_loaded(host)

    async def _outlast_stall(self, stream: LiveStream) -> None:
        await self.resumption.outlast_stall(stream)

    def _host_lost(self, host: ModelHost) -> None:
        if host is self.fleet.pinned:
            self.died.set()
            self.streams.close(GONE)
        left = list[LiveStream]()
        for it in self.streams_of(host):
            # A stopped stream ends without another engine. If the server ends too, a stalled store
            # must not delay the server's end.
            if it.record.is_durable and it.cut is not None and not self.died.is_set():
                it.end_now(it.cut)
                continue
            if it.record.is_durable:
                self.resumption.keep(host, Stored(it.record, it.log))
            left.append(it)
        self.writers.let_go(left, GONE, GONE)

    async def host_for(self, name: str | None, waits: bool) -> ModelHost:
        """Return the host of the named model once the host's tokenizer is loaded.

        Raises RequestError if there is no such host. If `waits`, also wait for a download of the
        model; otherwise raise RequestError while the model is downloading.
        """
        host = await self.fleet.find(name)
        self.queues.check_open(host)
        if host.known is None:
            if not (waits or host.is_here):
                reading, _ = await asyncio.wait([self.fleet.fetch(host)], timeout=_CACHED_S)
                if not reading:
                    raise _still_downloading(host)
            await self.fleet.read(host)
        return host

    async def open(
        self,
        request: Request,
        names: Names = PLAIN,
        checked: CheckedBody | None = None,
        stream_id: StreamId | None = None,
    ) -> Found:
        """Admit a request. Raises RequestError if the request cannot be served.

        `checked` contains the prompts if `request` contains only stubs of the prompts. If another
        request has just taken the idempotency key, the other request's stream is returned.
        """
        checked = checked or CheckedBody({}, (), msgspec.msgpack.encode(request.prompts))
        with self.queues.inputs.hold(names.owner, checked.num_bytes) as held:
            return await self._admit(request, names, checked, stream_id, held)

    async def _admit(
        self,
        request: Request,
        names: Names,
        checked: CheckedBody,
        stream_id: StreamId | None,
        held: HeldInput,
    ) -> Found:
        """Check a request and start its stream. From then on, `held` belongs to the stream."""
        # While a host is read, another host may replace it, which must be read too.
        while (host := self.fleet.hosts.exact(request.model)).known is None:
            await self.fleet.read(host)
        model = host.model
        adapter = model.adapters.get(request.model)
        is_opted_in, is_background = names.is_opted_in, request.is_background
        check_generates(model)
        self.fleet.check_line()
        asked = Demand(names.owner, names.digest, request.num_choices)
        queue = self.queues.of(host, is_background)
        queue.check(asked, Capacity.of(model.ready), time.monotonic())
        packed = checked.packed
        # A prompt that was tokenized in advance has no images to fetch.
        if checked.ahead is None:
            packed = await self.image_fetcher.put(self.work, request.prompts, packed)
            held.resize(len(packed) + len(checked.kept))
        admitted = await admit(self.work, model, request, packed, checked.ahead)
        if model.adapters.get(request.model) != adapter:
            # The adapter was unloaded during the checks.
            raise self.fleet.hosts.unknown(request.model)
        stream_id = stream_id or StreamId("cmpl-" + secrets.token_hex(16))
        is_durable = is_opted_in and self.streams.store.is_durable
        record = _record(stream_id, model, request, admitted, names)
        record = msgspec.structs.replace(record, is_durable=is_durable)
        asked = asked._replace(num_tokens=record.num_prompt_tokens)
        note(prompt_tokens=asked.num_tokens, **self._prefix_misses.follow(record, model))
        held.resize(record.num_input_bytes + admitted.num_pixel_bytes)
        # From here on the request counts in the queue, although its stream is not stored yet.
        queue = self.queues.of(host, is_background)
        capacity = Capacity.of(model.ready)
        place = queue.enter(asked, capacity, time.monotonic())
        place.take(held)
        if queue.must_wait(capacity):
            self.streams.end_lingering()
        starting = self._begin(host, record, place, admitted)
        if not is_opted_in:
            return await starting
        # Other requests may already find the stream in the store. So start the writer even if the
        # caller is cancelled.
        return await uncut(starting)

    async def _begin(
        self, host: ModelHost, record: Record, place: QueueTicket, admitted: Admitted
    ) -> Found:
        """Return the new stream once its first event is stored, or an existing stream with the same
        names.
        """
        stored = await self.streams.put(record, place)
        if stored.record.id != record.id:
            return await self.streams.wrap(stored)
        if (closed := self.streams.closed) is not None:
            # The server ended while the stream was being stored.
            place.close()
            raise (closed if record.is_durable else _SHUTS_DOWN).with_traceback(None)
        stop_code, stored = stored.stop_code, Stored(record, stored.log)
        figures = host.metrics.of(record.request.is_background)
        builder = EventBuilder(record, host.model, figures)
        stream = self.writers.start(host, stored, builder, place, admitted)
        if stop_code:
            stream.stop(cut_by(stop_code))
        try:
            if record.is_durable:
                accepted = stream.audience.pause.unless(stored.log.wait(-1))
                await self.streams.unless_stalled(record, accepted)
            # A log in memory stores events immediately, so write the first event here.
            else:
                await stream.accept()
        except BaseException as error:
            # With a key, the stream waits for the store, and the client's retry finds the stream.
            if record.names.key is None or not isinstance(error, RequestError):
                stream.stop(error if isinstance(error, RequestError) else _LEFT)
                stream.audience.close()
            raise
        return stream

    async def drain(self, seconds: float) -> None:
        """Refuse new requests and give running requests `seconds` to end."""
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
                # The engine may be loading or hanging, so do not wait for the engine.
                stream.end_now(_SHUTS_DOWN)


def _record(
    stream_id: StreamId, model: ServedModel, request: Request, admitted: Admitted, names: Names
) -> Record:
    """Build the record; add the model's end tokens to the request.

    If the prompt opens reasoning, the grammar applies only after the reasoning.
    """
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


def _still_downloading(host: ModelHost) -> RequestError:
    """Return the error for a request that cannot wait while its model is downloading.

    A stream that is resumed by byte position cannot wait, because the stream's log cannot start
    without a tokenizer.
    """
    done, total = host.loading.downloaded or (0, 0)
    share = f" ({100 * done // total} %)" if total else ""
    message = f"The model {host.name!r} is being downloaded{share}; try again later."
    return RequestError("model_loading", message, "model", retry_after_s=5)
