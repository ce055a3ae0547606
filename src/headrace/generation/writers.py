"""The tasks that write live streams, each with its use of a model."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from headrace.fleet.fleet import Fleet
from headrace.fleet.model_host import ModelHost
from headrace.generation.admission import Place, Queues
from headrace.generation.event_builder import EventBuilder
from headrace.generation.registry import Registry
from headrace.generation.stream import LiveStream
from headrace.metrics.traces import Traces
from headrace.streams.log import LogTaken
from headrace.streams.store import Stored, StoreStalled
from headrace.workers.image_file import Admitted
from headrace_common.config.settings import StreamConfig
from headrace_common.errors import RequestError

logger = logging.getLogger(__name__)

RESTARTS = RequestError("server_restarting", "The server is restarting; read on once it is back.")
_TAKEN = RequestError("server_restarting", "Another server goes on with this stream; read on.")


class Writers:
    """Has each live stream written by a task of its own, to its end or until it is let go.

    The tasks are those of `group`. A stream's model stays in memory until its task has ended.
    """

    def __init__(
        self,
        fleet: Fleet,
        streams: Registry,
        queues: Queues,
        config: StreamConfig,
        group: asyncio.TaskGroup,
        traces: Traces,
    ) -> None:
        self.tasks: dict[LiveStream, asyncio.Task[None]] = {}
        self.on_stalled: Callable[[LiveStream], Awaitable[None]]  # the store has not all of it
        self._fleet = fleet
        self._streams = streams
        self._queues = queues
        self._config = config
        self._group = group
        self._traces = traces

    def start(
        self,
        host: ModelHost,
        stored: Stored,
        builder: EventBuilder,
        place: Place,
        admitted: Admitted,
    ) -> LiveStream:
        """Has a new stream computed once its model is in memory."""
        stream = self._start(host, stored, builder, place, admitted, used=None)
        stream.end_within(self._config.queue_timeout_s, 0)
        return stream

    def resume(
        self,
        host: ModelHost,
        stored: Stored,
        builder: EventBuilder,
        admitted: Admitted,
        cut: RequestError | None,
    ) -> None:
        """Has a stream computed that was admitted before, or ends it as `cut`."""
        place = self._queues.resume(host, stored.record.request.is_background)
        stream = self._start(host, stored, builder, place, admitted, used=host)
        if cut:
            stream.end_now(cut)
        self._fleet.hold(host)
        host.tenants.add(stream)
        self._fleet.need(host)

    def let_go(
        self, streams: Iterable[LiveStream], plain: RequestError, durable: RequestError
    ) -> None:
        """Ends these streams, except durable ones: a later engine goes on with those."""
        for stream in list(streams):
            if stream.record.is_durable:
                stream.audience.pause.set(durable)
                self.tasks[stream].cancel()
            else:
                stream.end_now(plain)
                stream.audience.close()

    def _start(
        self,
        host: ModelHost,
        stored: Stored,
        builder: EventBuilder,
        place: Place,
        admitted: Admitted,
        used: ModelHost | None,
    ) -> LiveStream:
        linger_s = self._config.linger_s
        stream = LiveStream(stored.record, builder, stored.log, place, admitted, linger_s)
        stream.end_within(0, self._config.request_timeout_s)
        self._streams.add(stream)
        writing = self._write(host, stream, used)
        self.tasks[stream] = self._group.create_task(writing, name="stream")
        return stream

    async def _enter(self, host: ModelHost, stream: LiveStream) -> ModelHost | None:
        """The host that computes it, once that is in memory; None if it was cut instead."""
        try:
            with host.tenants.telling(stream):
                entered = await self._fleet.enter(host)
        except RequestError as error:
            if self._queues.is_ending:
                self.let_go([stream], error, RESTARTS)
            else:
                stream.stop(error)
            return None
        if not entered.reads_like(host):
            self._fleet.release(entered)
            message = "The model was replaced while the request waited; send it again."
            stream.stop(RequestError("model_changed", message))
            return None
        entered.tenants.add(stream)
        return entered

    async def _write(self, host: ModelHost, stream: LiveStream, used: ModelHost | None) -> None:
        entering = None if used else self._group.create_task(self._enter(host, stream))
        try:
            await self._run(host, stream)
            if not stream.record.names.is_opted_in:
                await stream.audience.abandoned.wait()
        except LogTaken:
            logger.warning("Another server has taken a stream over")
            stream.audience.pause.set(_TAKEN)
        except Exception:  # one stream, and not the server
            logger.exception("The log of a stream cannot be written")
            failure = RequestError("internal_error", "The log of this stream cannot be written.")
            stream.audience.pause.set(failure)
            self._streams.close(failure, stream.record.id)  # its log has no end to be waited for
        finally:
            stream.release()
            self._streams.remove(stream)
            stream.ended.set()  # also if it was let go: nothing more comes of this one
            del self.tasks[stream]
            if entering is not None and not entering.cancel() and not entering.cancelled():
                used = entering.result()
            if used is not None:
                used.tenants.remove(stream)
                self._fleet.release(used)

    async def _run(self, host: ModelHost, stream: LiveStream) -> None:
        try:
            if stream.log.next_seq == 0:
                await stream.accept()
            # In a task of its own, so that a token does not resume the coroutines around it.
            await asyncio.create_task(stream.run(), name="stream")
            figures = host.metrics.of(stream.record.request.is_background)
            stream.note_end(figures, self._traces)
            self._queues.limits.used(
                stream.record.names.owner, stream.tally.usage.completion_tokens
            )
        except StoreStalled:
            await self.on_stalled(stream)
