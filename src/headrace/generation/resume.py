"""Continues streams that an earlier server or engine, or a stalled store, left unfinished."""

import asyncio
import contextlib
import logging

from headrace.fleet.fleet import Fleet
from headrace.fleet.model_host import ModelHost
from headrace.generation.event_builder import EventBuilder, to_event
from headrace.generation.model_checks import see_again
from headrace.generation.registry import Registry, cut_by
from headrace.generation.stream import LiveStream
from headrace.generation.writers import Writers
from headrace.metrics.metrics import ServerFigures
from headrace.streams.log import Log, LogConflict, LogGone
from headrace.streams.record import Record
from headrace.streams.store import Stored, StoreStalled
from headrace.workers.image_file import Admitted
from headrace.workers.pool import JobRunner
from headrace_common.errors import ModelError, RequestError
from headrace_common.system.panics import STEERING

logger = logging.getLogger(__name__)

GONE = RequestError("engine_failed", "The engine stopped and could not be restarted.")
_PAGE = 256
# Wait this many seconds after the store could not be read.
_AGAIN_S = 1.0


class Resumption:
    """Starts a new writer, from the stored log, for each stream without a writer.

    The tasks of this class belong to `group`.

    A log contains every token that a client may have seen. So the log is replayed into a new
    EventBuilder, which restores each choice's state after the last stored event. Then the prompts
    and the tokens of the log are submitted to an engine.

    If the replay no longer produces the delivered text, for example after a change of the
    tokenizer, the stream ends with `resume_mismatch`.
    """

    def __init__(
        self,
        fleet: Fleet,
        streams: Registry,
        writers: Writers,
        work: JobRunner,
        figures: ServerFigures,
        group: asyncio.TaskGroup,
    ) -> None:
        self._fleet = fleet
        self._streams = streams
        self._writers = writers
        self._work = work
        self._figures = figures
        self._group = group
        # The streams that wait for an engine, by the name of their host. The second item is an
        # error that will end the stream, or None.
        self._kept: dict[str, list[tuple[Stored, RequestError | None]]] = {}

    async def take_up(self) -> None:
        """Continue the streams of an earlier server, as soon as the store can write."""
        try:
            unfinished = await self._claim_unfinished()
        finally:
            self._streams.has_taken_up.set()
        await self._continue(unfinished)

    async def _claim_unfinished(self) -> list[Stored]:
        while True:
            with contextlib.suppress(StoreStalled):
                return await self._streams.store.unfinished()
            await self._streams.store.writable.wait()

    async def adopt(self) -> None:
        """Continue streams of dead servers that use the same store."""
        while True:
            await self._continue(await self._streams.store.orphans())

    def keep(self, host: ModelHost, stored: Stored, cut: RequestError | None = None) -> None:
        """Keep a durable stream for a later engine, because its engine could not be restarted.

        `cut` is an error that will end the stream, or None.
        """
        self._streams.suspend(stored, GONE)
        self._kept.setdefault(host.name, []).append((stored, cut))

    def host_loaded(self, host: ModelHost) -> None:
        """Continue the streams that were kept for a later engine of this host."""
        for stored, cut in self._kept.pop(host.name, ()):
            if self._streams.continues(stored.record.id):
                self._group.create_task(self._resume_kept(stored, cut), name="resume one")

    async def _resume_kept(self, stored: Stored, cut: RequestError | None) -> None:
        try:
            # The last writer was cancelled, perhaps during an append.
            await stored.log.settle()
        except StoreStalled:
            await self._resume_later(stored, cut)
        else:
            await self._resume(stored, cut)

    async def _continue(self, left: list[Stored]) -> None:
        # Streams with images take long to prepare, so streams without images go first.
        for stored in sorted(left, key=lambda it: len(it.record.images)):
            self._figures.recovered()
            cut = cut_by(stored.stop_code) if stored.stop_code else None
            if self._fleet.pinned:
                await self._resume(stored, cut)
            # Streams of one model must not wait for the download of another model.
            else:
                self._group.create_task(self._resume(stored, cut), name="resume one")

    async def outlast_stall(self, stream: LiveStream) -> None:
        """Continue a stream from its stored events, once the store can write."""
        # No reader has received events that are not stored, so the stream continues from the stored
        # events.
        await self._streams.store.writable.wait()
        await self._resume(Stored(stream.record, stream.log), stream.cut)
        # A client may have stopped the stream while its log was read.
        self._streams.pass_on_stop(stream)

    async def _resume(self, stored: Stored, cut: RequestError | None = None) -> None:
        """Continue a stream. If `cut` is not None, only end the stream with the error `cut`."""
        host = self._host_of(stored.record)
        # Hold the host, so that the host is not removed or replaced while the log is read.
        self._fleet.hold(host)
        try:
            await self._resume_at(host, stored, cut)
        finally:
            self._fleet.release(host)

    async def _resume_at(self, host: ModelHost, stored: Stored, cut: RequestError | None) -> None:
        try:
            await host.read()
        except ModelError as error:
            host.engine.fail(str(error))
            self.keep(host, stored, cut)
            return
        try:
            figures = host.metrics.of(stored.record.request.is_background)
            builder = EventBuilder(stored.record, host.model, figures)
            after = -1
            while page := (await stored.log.read(after, _PAGE))[0]:
                mismatch = builder.replay(page)
                cut = cut or mismatch
                after = page[-1].seq
        except StoreStalled:
            self._group.create_task(self._resume_later(stored, cut), name="resume later")
            return
        except STEERING:
            raise
        # The failure concerns one stream, not the server. Catch BaseException, because a panic in a
        # native library is not an Exception.
        except BaseException as error:
            if isinstance(error, LogGone):
                logger.warning("A stream is no longer stored, perhaps after a failover of Redis")
            else:
                logger.exception("A stream of an earlier run cannot be resumed")
            self._group.create_task(_give_up(stored.log), name="give up")
            return
        admitted = Admitted(stored.record.prompts)
        if stored.record.images and not cut:
            admitted, cut = await see_again(self._work, host.model, stored.record)
        # After the fleet's end, no engine would run the stream, and the server would never end.
        # The next server continues the stream.
        if not self._fleet.ended.is_set():
            self._writers.resume(host, stored, builder, admitted, cut)

    def _host_of(self, record: Record) -> ModelHost:
        hosts = self._fleet.hosts
        names = record.request.model, record.adapter.parent if record.adapter else ""
        found = (host for name in names if (host := hosts.find(name)) is not None)
        return next(found, hosts.first)

    async def _resume_later(self, stored: Stored, cut: RequestError | None) -> None:
        await asyncio.sleep(_AGAIN_S)
        await self._resume(stored, cut)


async def _give_up(log: Log) -> None:
    """End a stream that cannot be continued."""
    error = RequestError(
        "resume_mismatch", "This server cannot continue the stored stream; send the request again."
    )
    with contextlib.suppress(StoreStalled, LogConflict):
        seq = log.next_seq
        await log.append(seq, [to_event(error, seq, at_ms=0)])
