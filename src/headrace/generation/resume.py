"""Goes on with streams that an earlier server or engine, or a stalled store, left unfinished."""

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
from headrace.streams.log import Log, LogConflict
from headrace.streams.record import Record
from headrace.streams.store import Stored, StoreStalled
from headrace.workers.image_file import Admitted
from headrace.workers.pool import Work
from headrace_common.errors import ModelError, RequestError
from headrace_common.system.panics import STEERING

logger = logging.getLogger(__name__)

GONE = RequestError("engine_failed", "The engine stopped and could not be restarted.")
_PAGE = 256
_AGAIN_S = 1.0  # when the store could not be read


class Resumption:
    """Gives streams that have no writer a new one, from their logs. Its tasks are `group`'s."""

    def __init__(
        self,
        fleet: Fleet,
        streams: Registry,
        writers: Writers,
        work: Work,
        figures: ServerFigures,
        group: asyncio.TaskGroup,
    ) -> None:
        self._fleet = fleet
        self._streams = streams
        self._writers = writers
        self._work = work
        self._figures = figures
        self._group = group
        # until an engine of this model comes up; each with why it is to end, if somebody asked
        self._kept: dict[str, list[tuple[Stored, RequestError | None]]] = {}
        writers.on_stalled = self._outlast_stall

    async def take_up(self) -> None:
        """Goes on with what an earlier server left unfinished, as soon as the store can write."""
        while True:
            with contextlib.suppress(StoreStalled):
                unfinished = await self._streams.store.unfinished()
                break
            await self._streams.store.writable.wait()
        await self._go_on_with(unfinished)

    async def adopt(self) -> None:
        """Goes on with what servers of the same store left that have gone."""
        while True:
            await self._go_on_with(await self._streams.store.orphans())

    def keep(self, host: ModelHost, stored: Stored, cut: RequestError | None) -> None:
        """Keeps a durable stream of an engine that was given up; `cut` if it was to end as that."""
        self._streams.close(GONE, stored.record.id)
        self._kept.setdefault(host.name, []).append((stored, cut))

    def host_loaded(self, host: ModelHost) -> None:
        """Goes on with the streams that were kept for a later engine of this host."""
        for stored, cut in self._kept.pop(host.name, ()):
            self._streams.open_again(stored.record.id)
            self._group.create_task(self._resume_kept(stored, cut), name="resume one")

    async def _resume_kept(self, stored: Stored, cut: RequestError | None) -> None:
        try:
            await stored.log.settle()  # its last writer was let go, perhaps in an append
        except StoreStalled:
            await self._resume_later(stored, cut)
        else:
            await self._resume(stored, cut)

    async def _go_on_with(self, left: list[Stored]) -> None:
        # those with images take long, and the others need not wait for them
        for stored in sorted(left, key=lambda it: len(it.record.images)):
            self._figures.recovered()
            cut = cut_by(stored.stop_code) if stored.stop_code else None
            if self._fleet.pinned:
                await self._resume(stored, cut)
            else:  # one model's download keeps no other's streams
                self._group.create_task(self._resume(stored, cut), name="resume one")

    async def _outlast_stall(self, stream: LiveStream) -> None:
        # what the store does not have never happened; once it can write, go on from there
        await self._streams.store.writable.wait()
        await self._resume(Stored(stream.record, stream.log), stream.cut)

    async def _resume(self, stored: Stored, cut: RequestError | None = None) -> None:
        """Goes on with a stream, or ends it as `cut`."""
        host = self._host_of(stored.record)
        self._fleet.hold(host)  # else it could be removed, or replaced, while all is read
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
        except BaseException:  # one stream, and not the server; a panic is not an Exception
            logger.exception("A stream of an earlier run cannot be resumed")
            self._group.create_task(_give_up(stored.log), name="give up")
            return
        admitted = Admitted(stored.record.prompts)
        if stored.record.images and not cut:
            admitted, cut = await see_again(self._work, host.model, stored.record)
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
    """Ends a stream that nobody can go on with."""
    error = RequestError("resume_mismatch", "This server cannot go on with what was generated.")
    with contextlib.suppress(StoreStalled, LogConflict):
        seq = log.next_seq
        await log.append(seq, [to_event(error, seq, at_ms=0)])
