"""Runs the tasks that write live streams, and keeps the streams' models in memory meanwhile."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from headrace.fleet.fleet import Fleet
from headrace.fleet.model_host import ModelHost
from headrace.generation.admission import Queues, QueueTicket
from headrace.generation.event_builder import EventBuilder
from headrace.generation.registry import Registry
from headrace.generation.stream import LiveStream
from headrace.metrics.traces import Traces
from headrace.streams.log import LogGone, LogTaken
from headrace.streams.store import Stored, StoreStalled
from headrace.workers.image_file import Admitted
from headrace_common.config.settings import StreamConfig
from headrace_common.errors import RequestError

logger = logging.getLogger(__name__)

RESTARTS = RequestError(
    "server_restarting", "The server is restarting; resume reading once it is back."
)
_TAKEN = RequestError(
    "server_restarting", "Another server now writes this stream; reconnect to continue reading."
)


class Writers:
    """Runs one task per live stream. The task writes the log until the stream ends or is released.

    The tasks belong to `group`. A stream's model stays in memory until the stream's task has
    ended. If the store cannot write all events of a stream, `on_stalled` is awaited with the
    stream.
    """

    def __init__(
        self,
        fleet: Fleet,
        streams: Registry,
        queues: Queues,
        config: StreamConfig,
        group: asyncio.TaskGroup,
        traces: Traces,
        on_stalled: Callable[[LiveStream], Awaitable[None]],
    ) -> None:
        self.tasks: dict[LiveStream, asyncio.Task[None]] = {}
        self._fleet = fleet
        self._streams = streams
        self._queues = queues
        self._config = config
        self._group = group
        self._traces = traces
        self._on_stalled = on_stalled

    def start(
        self,
        host: ModelHost,
        stored: Stored,
        builder: EventBuilder,
        place: QueueTicket,
        admitted: Admitted,
    ) -> LiveStream:
        """Start writing a new stream; its answer is generated once its model is in memory."""
        used = host if self._fleet.enter_now(host) else None
        stream = self._start(host, stored, builder, place, admitted, used)
        stream.end_within(self._config.queue_timeout_s, self._config.request_timeout_s)
        if used is not None:
            host.users.add(stream)
        return stream

    def resume(
        self,
        host: ModelHost,
        stored: Stored,
        builder: EventBuilder,
        admitted: Admitted,
        cut: RequestError | None,
    ) -> None:
        """Start writing a stream that was admitted earlier.

        If `cut` is not None, only end the stream with the error `cut`.
        """
        record = stored.record
        owner = record.names.owner
        place = self._queues.resume(host, owner, record.request.is_background)
        num_bytes = record.num_input_bytes + admitted.num_pixel_bytes
        place.take(self._queues.inputs.add(owner, num_bytes))
        stream = self._start(host, stored, builder, place, admitted, used=host)
        stream.end_within(0, self._config.request_timeout_s)
        if cut:
            stream.end_now(cut)
        self._fleet.hold(host)
        host.users.add(stream)
        self._fleet.need(host)

    def let_go(
        self, streams: Iterable[LiveStream], plain: RequestError, durable: RequestError
    ) -> None:
        """End these streams with the error `plain`, except durable streams.

        A durable stream only loses its writer, because a later engine continues the stream. Readers
        of a durable stream get the error `durable`.
        """
        for stream in list(streams):
            if stream.record.is_durable:
                stream.audience.pause.set(durable)
                # A task that is cancelled before its first step would release nothing. The event
                # loop has already scheduled that step, so cancel the task after it.
                asyncio.get_running_loop().call_soon(self.tasks[stream].cancel)
            else:
                stream.end_now(plain)
                stream.audience.close()

    def _start(
        self,
        host: ModelHost,
        stored: Stored,
        builder: EventBuilder,
        place: QueueTicket,
        admitted: Admitted,
        used: ModelHost | None,
    ) -> LiveStream:
        linger_s = self._config.linger_s
        stream = LiveStream(stored.record, builder, stored.log, place, admitted, linger_s)
        self._streams.add(stream)
        writing = self._write(host, stream, used)
        self.tasks[stream] = self._group.create_task(writing, name="stream")
        return stream

    async def _enter(self, host: ModelHost, stream: LiveStream) -> ModelHost | None:
        """Wait until the model is in memory; return the host that will run the stream.

        Returns None if the stream was cut instead.
        """
        try:
            with host.users.telling(stream):
                entered = await self._fleet.enter(host)
        except RequestError as error:
            if self._queues.is_ending:
                # Only the next server continues the stream, so readers must not wait for a writer.
                self._streams.close(RESTARTS, stream.record.id)
                self.let_go([stream], error, RESTARTS)
            else:
                stream.stop(error)
            return None
        if not entered.reads_like(host):
            self._fleet.release(entered)
            message = "The model was replaced while the request waited; send the request again."
            stream.stop(RequestError("model_changed", message))
            return None
        entered.users.add(stream)
        return entered

    async def _write(self, host: ModelHost, stream: LiveStream, used: ModelHost | None) -> None:
        entering = None if used else self._group.create_task(self._enter(host, stream))
        try:
            await self._run(host, stream)
            if not stream.record.names.is_opted_in:
                await stream.audience.abandoned.wait()
        except asyncio.CancelledError:
            # A client may have stopped the stream after `let_go`.
            self._streams.pass_on_stop(stream)
            raise
        except LogTaken:
            logger.warning("Another server has taken a stream over")
            stream.audience.pause.set(_TAKEN)
        # The failure concerns one stream, not the server.
        except Exception as error:
            if isinstance(error, LogGone):
                logger.warning("A stream is no longer stored, perhaps after a failover of Redis")
            else:
                logger.exception("The log of a stream cannot be written")
            failure = RequestError(
                "internal_error",
                "The log of this stream cannot be written; send the request again.",
            )
            stream.audience.pause.set(failure)
            # The log gets no terminal event, so readers must not wait for one.
            self._streams.close(failure, stream.record.id)
        finally:
            if not stream.ended.is_set():
                stream.release()
            stream.close()
            self._streams.remove(stream)
            # Set `ended` even if another writer continues the stream: this writer appends nothing
            # more.
            stream.ended.set()
            del self.tasks[stream]
            if entering is not None and not entering.cancel() and not entering.cancelled():
                used = entering.result()
            if used is not None:
                used.users.remove(stream)
                self._fleet.release(used)

    async def _run(self, host: ModelHost, stream: LiveStream) -> None:
        try:
            if stream.log.next_seq == 0:
                await stream.accept()
            # Use a separate task, so that a token resumes only `stream.run` and not its callers.
            await asyncio.create_task(stream.run(), name="stream")
            figures = host.metrics.of(stream.record.request.is_background)
            usage = stream.note_end(figures, self._traces)
            if self._queues.limits.has_any:
                self._queues.limits.used(stream.record.names.owner, usage.completion_tokens)
        except StoreStalled:
            await self._on_stalled(stream)
