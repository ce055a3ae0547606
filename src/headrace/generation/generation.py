"""Admits requests and owns their streams, whichever model they are for."""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Iterable

import msgspec

from headrace.config.settings import ServerConfig
from headrace.core.errors import ModelError, RequestError
from headrace.core.ids import StreamId
from headrace.core.jobs import CheckedBody
from headrace.core.log_context import note
from headrace.core.request import Request
from headrace.fleet.fleet import Fleet
from headrace.fleet.model_host import ModelHost
from headrace.fleet.model_list import Desired
from headrace.fleet.served_model import Models
from headrace.generation.admission import Admission, Asked, Capacity, KeyLimits, Place
from headrace.generation.event_builder import EventBuilder
from headrace.generation.model_checks import admit, check_generates, see_again
from headrace.generation.new_record import new_record
from headrace.generation.registry import Found, Registry, cut_by, give_up
from headrace.generation.stream import LiveStream
from headrace.generation.vectors import VectorMaker
from headrace.metrics.metrics import Metrics
from headrace.streams.log import Log, LogTaken
from headrace.streams.record import Names, Record
from headrace.streams.store import Ask, Retention, Store, Stored, StoreStalled
from headrace.workers.image_fetch import ImageFetcher, is_public
from headrace.workers.pool import Work

logger = logging.getLogger(__name__)

PLAIN = Names()
_SHUTS_DOWN = RequestError(
    "server_shutdown", "The server is shutting down; send the request again."
)
_RESTARTS = RequestError("server_restarting", "The server is restarting; read on once it is back.")
_TAKEN = RequestError("server_restarting", "Another server goes on with this stream; read on.")
_CANNOT_WRITE = "The server cannot store streams now; read on later."
_PAGE = 256
_SWEEP_INTERVAL_S = 60.0
_CACHED_S = 2.0  # for a model of the hub that is in its cache
_RESUME_AGAIN_S = 1.0  # when the store could not be read
_LEFT = RequestError("client_gone", "The client left before the request was taken.")
_GONE = RequestError("engine_failed", "The engine stopped and could not be restarted.")


class Generation:
    """`run` is its one task, and owns the tasks of all streams."""

    def __init__(
        self,
        config: ServerConfig,
        hosts: tuple[ModelHost, ...],
        store: Store,
        work: Work,
        metrics: Metrics,
    ) -> None:
        self.fleet = Fleet(hosts, config, self._host_loaded, self._host_lost)
        self.work = work
        self.metrics = metrics
        allows = is_public if config.http.allow_image_urls else None
        self.pictures = ImageFetcher(allows, config.http.max_body_bytes)
        self.streams = Registry(store, metrics)
        self.died = asyncio.Event()  # set once the only engine was given up
        self._config = config.streams
        self._limits = KeyLimits(config.streams)
        self.admissions: dict[ModelHost, Admission] = {}
        self.vectors = VectorMaker(self._find, self.fleet, self._limits, work, self.streams)
        self.fleet.on_gone = lambda host: self.admissions.pop(host, None)
        self.desired: Desired | None = None  # where its models can be changed
        self._store = store
        store.on_commit = metrics.committed
        self._is_draining = self._is_ending = False  # an ending one will not admit again
        self._writers: dict[LiveStream, asyncio.Task[None]] = {}
        self._uses: dict[LiveStream, ModelHost] = {}  # that compute them
        self._left_behind: dict[str, list[Stored]] = {}  # by the model that was lost
        self._tasks = asyncio.TaskGroup()

    @property
    def hosts(self) -> Models[ModelHost]:
        return self.fleet.hosts

    @property
    def state(self) -> str:
        """loading, ok, recovering, draining or dead; of several models each has its own."""
        sole = self.hosts.first.state if self.fleet.is_sole else "ok"
        state = "loading" if sole == "unloaded" else sole
        return "draining" if self._is_draining and state != "dead" else state

    @property
    def last_words(self) -> str:
        """Why engines were given up."""
        return "\n".join(host.last_words for host in self.hosts.all() if host.last_words)

    async def run(self) -> None:
        """Runs until it is closed, or the only engine has ended."""
        async with self._tasks:
            own = [
                self._tasks.create_task(self._resume_all(), name="resume"),
                self._tasks.create_task(self._sweep(), name="sweep"),
                self._tasks.create_task(self._watch_store(), name="watch store"),
                self._tasks.create_task(self._adopt(), name="adopt"),
                self._tasks.create_task(self._obey(), name="obey"),
                self._tasks.create_task(self.work.run(), name="work"),
            ]
            self.fleet.start(self._tasks)
            await self.fleet.ended.wait()
            self.fleet.cancel()
            for task in own:
                task.cancel()
            if not self.died.is_set():
                self.streams.close(_RESTARTS)
                self._let_go(self._writers, _SHUTS_DOWN, _RESTARTS)

    async def close(self) -> None:
        """Ends the engines, and with them `run`."""
        await self.fleet.close()

    def streams_of(self, host: ModelHost) -> list[LiveStream]:
        """Streams that are computed there, in the order in which they came."""
        return [tenant for tenant in host.tenants if isinstance(tenant, LiveStream)]

    def _host_loaded(self, host: ModelHost) -> None:
        """Goes on with the durable streams that an earlier engine of it left."""
        for stored in self._left_behind.pop(host.name, ()):
            self.streams.open_again(stored.record.id)
            self._tasks.create_task(self._resume(stored), name="resume one")

    def _host_lost(self, host: ModelHost) -> None:
        if self.fleet.is_sole:
            self.died.set()
            self.streams.close(_GONE)
        streams = self.streams_of(host)
        durable = [stream for stream in streams if stream.record.is_durable]
        for stream in durable:
            self.streams.close_one(stream.record.id, _GONE)
        left = self._left_behind.setdefault(host.name, [])
        left += [Stored(stream.record, stream.log) for stream in durable]
        self._let_go(streams, _GONE, _GONE)

    async def attach(self, names: Names, may_take_over: bool) -> Found | None:
        """The stream that the request would only repeat, whatever else would refuse it."""
        return await self.streams.find_equal(names, may_take_over)

    async def host_for(self, name: str | None, waits: bool) -> ModelHost:
        """The host of that name, whose text side is known; RequestError says why there is none.

        `waits`: also for a download.
        """
        host = await self.fleet.find(name)
        self._admission(host)
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
        host = self.hosts.get(request.model)
        model = host.model
        check_generates(model)
        self.fleet.check_line()
        asked = Asked(names.owner, names.digest, request.num_choices)
        self._admission(host).check(asked, Capacity.of(model.ready), time.monotonic())
        checked = checked or CheckedBody({}, (), msgspec.msgpack.encode(request.prompts))
        packed = await self.pictures.put(self.work, request.prompts, checked.packed)
        admitted = await admit(self.work, model, request, packed, checked.ahead)
        stream_id = stream_id or StreamId("cmpl-" + secrets.token_hex(16))
        is_durable = names.is_opted_in and self._store.is_durable
        record = new_record(stream_id, model, request, admitted, names)
        record = msgspec.structs.replace(record, is_durable=is_durable)
        asked = asked._replace(num_tokens=record.num_prompt_tokens)
        note(prompt_tokens=asked.num_tokens)
        # from here on it counts, whatever its names have to wait for
        place = self._admission(host).enter(asked, Capacity.of(model.ready), time.monotonic())
        stored = await self.streams.put(record, place)
        if stored.record.id != record.id:
            return await self.streams.wrap(stored)
        stream = self._stream(host, record, EventBuilder(record, model), stored.log)
        stream.admitted = admitted
        stream.end_within(self._config.queue_timeout_s, 0)
        self._start(host, stream, place)
        try:
            accepted = stream.interruption.unless(stored.log.wait(-1))
            await self.streams.unless_stalled(record, accepted)
        except BaseException as error:
            stream.stop(error if isinstance(error, RequestError) else _LEFT)
            stream.close_to_readers()
            raise
        return stream

    def stop_admitting(self) -> None:
        """Refuses new requests from now on; what is admitted goes on."""
        self._is_draining = True

    def admit_again(self) -> None:
        """Takes `stop_admitting` back; nothing once the server ends."""
        self._is_draining = self._is_ending

    async def drain(self, seconds: float) -> None:
        """Refuses new requests, and gives the running ones `seconds` to end."""
        self._is_draining = self._is_ending = True
        self.fleet.refuse(_SHUTS_DOWN)
        if ends := [*self._writers.values(), *self.vectors.ends()]:
            await asyncio.wait(ends, timeout=seconds)
        self.vectors.stop(_SHUTS_DOWN)
        self.streams.elsewhere.set(_RESTARTS)
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
            stalled = RequestError("storage_stalled", _CANNOT_WRITE)
            self.streams.elsewhere.set(stalled)
            for stream in self.streams:
                if stream.record.is_durable:
                    stream.interruption.set(stalled)
            await self._store.writable.wait()
            self.streams.elsewhere.clear()
            for stream in self.streams:
                stream.interruption.clear()

    async def _resume_all(self) -> None:
        """Goes on with what an earlier server left unfinished, as soon as the store can write."""
        while True:
            with contextlib.suppress(StoreStalled):
                unfinished = await self._store.unfinished()
                break
            await self._store.writable.wait()
        await self._go_on_with(unfinished)

    async def _go_on_with(self, left: list[Stored]) -> None:
        # those with images take long, and the others need not wait for them
        for stored in sorted(left, key=lambda it: len(it.record.images)):
            self.metrics.recovered()
            cut = cut_by(stored.stop_code) if stored.stop_code else None
            if self.fleet.is_sole:
                await self._resume(stored, cut)
            else:  # one model's download keeps no other's streams
                self._tasks.create_task(self._resume(stored, cut), name="resume one")

    async def _adopt(self) -> None:
        """Goes on with what servers of the same store left that have gone."""
        while True:
            await self._go_on_with(await self._store.orphans())

    async def _obey(self) -> None:
        """Does what other servers of the same store ask of the streams that are written here."""
        while True:
            ask = await self._store.asked()
            self._tasks.create_task(self._do(ask), name="ask")

    async def _do(self, ask: Ask) -> None:
        stream = await self.streams.written_here(ask.stream_id, waits=ask.what == "stop")
        if stream is None:
            return
        if ask.what == "stop":
            stream.stop(cut_by(ask.detail))
        elif ask.what == "beat":
            stream.beat(ask.detail, ask.interval_s)
        else:
            stream.check_log()

    async def _sweep(self) -> None:
        """Once a minute, forgets what retention does not keep."""
        while True:
            await self.streams.sweep()
            with contextlib.suppress(StoreStalled):
                totals = await self._store.sweep(Retention(), time.time())
                self.metrics.swept("durable", totals.num_bytes)
            await asyncio.sleep(_SWEEP_INTERVAL_S)

    async def _resume(self, stored: Stored, cut: RequestError | None = None) -> None:
        """Goes on with a stream that an earlier server left unfinished, or ends it as `cut`."""
        host = self.hosts.find(stored.record.request.model) or self.hosts.first
        try:
            await host.read()
        except ModelError as error:
            host.fail(str(error))
            self.streams.close_one(stored.record.id, _GONE)
            self._left_behind.setdefault(host.name, []).append(stored)
            return
        try:
            builder = EventBuilder(stored.record, host.model)
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
            self._tasks.create_task(give_up(stored.log), name="give up")
            return
        stream = self._stream(host, stored.record, builder, stored.log)
        if stored.record.images and not cut:
            stream.admitted, cut = await see_again(self.work, host.model, stored.record)
        if cut:
            stream.end_now(cut)
        self._start(host, stream, self._queue(host).resume())
        self.fleet.hold(host)
        self._compute(host, stream)
        self.fleet.need(host)

    async def _resume_later(self, stored: Stored, cut: RequestError | None) -> None:
        await asyncio.sleep(_RESUME_AGAIN_S)
        await self._resume(stored, cut)

    def _find(self, name: str | None) -> tuple[ModelHost, Admission]:
        """The host of that name and its queue; RequestError if it takes no requests."""
        host = self.hosts.get(name)
        return host, self._admission(host)

    def _admission(self, host: ModelHost) -> Admission:
        """The queue before a host; RequestError if that takes no requests.

        One of several models is loaded when it is asked for. The only one must have been.
        """
        is_sole = self.fleet.is_sole
        if self._is_draining and not (is_sole and host.state == "dead"):
            raise RequestError("server_shutdown", "The server is shutting down.", retry_after_s=5)
        if is_sole and host.state in ("unloaded", "loading"):
            raise RequestError("model_loading", "Loading model", retry_after_s=2)
        if is_sole and host.state == "dead":
            raise RequestError("engine_failed", "The engine stopped for good.", retry_after_s=30)
        queue = self._queue(host)
        queue.set_schedule(host.schedule, host.tokens_per_s)
        return queue

    def _queue(self, host: ModelHost) -> Admission:
        return self.admissions.setdefault(host, Admission(self._config, self._limits))

    def _stream(
        self, host: ModelHost, record: Record, builder: EventBuilder, log: Log
    ) -> LiveStream:
        host.metrics.follow(builder.tally)
        return LiveStream(record, builder, log, host, self._config.linger_s)

    def _start(self, host: ModelHost, stream: LiveStream, place: Place) -> None:
        stream.take(place)
        stream.end_within(0, self._config.request_timeout_s)
        self.streams.add(stream)
        self._writers[stream] = self._tasks.create_task(self._write(host, stream), name="stream")

    async def _enter(self, host: ModelHost, stream: LiveStream) -> None:
        """Has the stream computed once its model is in memory."""
        try:
            with host.telling(stream):
                entered = await self.fleet.enter(host)
        except RequestError as error:
            if self._is_ending:
                self._let_go([stream], error, _RESTARTS)
            else:
                stream.stop(error)
            return
        if entered.reads_like(host):
            self._compute(entered, stream)
            return
        self.fleet.release(entered)
        message = "The model was replaced while the request waited; send it again."
        stream.stop(RequestError("model_changed", message))

    def _compute(self, host: ModelHost, stream: LiveStream) -> None:
        """Has it computed there until its log has ended; its use of the model is counted."""
        self._uses[stream] = host
        host.add(stream)

    async def _write(self, host: ModelHost, stream: LiveStream) -> None:
        is_new = stream not in self._uses
        entering = self._tasks.create_task(self._enter(host, stream)) if is_new else None
        try:
            await self._run(host, stream)
            if not stream.record.names.is_opted_in:
                await stream.wait_until_abandoned()
        except LogTaken:
            logger.warning("Another server has taken a stream over")
            stream.interruption.set(_TAKEN)
            stream.ended.set()
        except Exception:  # one stream, and not the server
            logger.exception("The log of a stream cannot be written")
            failure = RequestError("internal_error", "The log of this stream cannot be written.")
            stream.interruption.set(failure)
            stream.ended.set()
        finally:
            stream.leave()
            if entering is not None:
                entering.cancel()
            self.streams.remove(stream)
            del self._writers[stream]
            if (used := self._uses.pop(stream, None)) is not None:
                used.remove(stream)
                self.fleet.release(used)

    async def _run(self, host: ModelHost, stream: LiveStream) -> None:
        try:
            if stream.log.next_seq == 0:
                await stream.accept()
            await stream.run()
            stream.note_end(host.metrics)
            self._limits.used(stream.record.names.owner, stream.num_generated)
        except StoreStalled:
            # what the store does not have never happened; once it can write, go on from there
            await self._store.writable.wait()
            await self._resume(Stored(stream.record, stream.log), stream.cut)

    def _let_go(
        self, streams: Iterable[LiveStream], plain: RequestError, durable: RequestError
    ) -> None:
        """Ends these streams, except durable ones: a later engine goes on with those."""
        for stream in list(streams):
            if stream.record.is_durable:
                stream.interruption.set(durable)
                self._writers[stream].cancel()
            else:
                stream.end_now(plain)
                stream.close_to_readers()


def _is_downloaded(host: ModelHost) -> RequestError:
    """The error for a request whose bytes are counted: its log cannot open without a tokenizer."""
    done, total = host.progress or (0, 0)
    share = f" ({100 * done // total} %)" if total else ""
    message = f"The model {host.name!r} is being downloaded{share}; send the request again."
    return RequestError("model_loading", message, "model", retry_after_s=5)
