"""The tasks that write live streams, and the use of a model that each stream has."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from headrace.config.settings import StreamConfig
from headrace.core.errors import RequestError
from headrace.fleet.fleet import Fleet
from headrace.fleet.model_host import ModelHost
from headrace.generation.event_builder import EventBuilder
from headrace.generation.queues import Queues
from headrace.generation.registry import Registry
from headrace.generation.stay import Stay
from headrace.generation.stream import LiveStream
from headrace.streams.log import LogTaken
from headrace.streams.store import Stored, StoreStalled
from headrace.workers.image_file import Admitted

logger = logging.getLogger(__name__)

RESTARTS = RequestError("server_restarting", "The server is restarting; read on once it is back.")
_TAKEN = RequestError("server_restarting", "Another server goes on with this stream; read on.")


class ModelUse:
    """A stream's use of a model, which stays in memory and computes it until the use ends."""

    def __init__(self, fleet: Fleet, stream: LiveStream) -> None:
        self.host: ModelHost | None = None  # once it has begun
        self._fleet = fleet
        self._stream = stream

    async def enter(self, host: ModelHost) -> None:
        """Begins once the model is in memory; RequestError if it cannot be brought in."""
        with host.tenants.telling(self._stream):
            entered = await self._fleet.enter(host)
        if entered.reads_like(host):
            self._begin(entered)
            return
        self._fleet.release(entered)
        message = "The model was replaced while the request waited; send it again."
        self._stream.stop(RequestError("model_changed", message))

    def resume(self, host: ModelHost) -> None:
        """Begins at once, whether the model is in memory yet or not."""
        self._fleet.hold(host)
        self._begin(host)
        self._fleet.need(host)

    def _begin(self, host: ModelHost) -> None:
        self.host = host
        host.tenants.add(self._stream)

    def end(self) -> None:
        if self.host is not None:
            self.host.tenants.remove(self._stream)
            self._fleet.release(self.host)


class Writers:
    """Has each live stream written by a task of its own, to its end or until it is let go.

    The tasks are those of `group`.
    """

    def __init__(
        self,
        fleet: Fleet,
        streams: Registry,
        queues: Queues,
        config: StreamConfig,
        group: asyncio.TaskGroup,
    ) -> None:
        self.tasks: dict[LiveStream, asyncio.Task[None]] = {}
        self.on_stalled: Callable[[LiveStream], Awaitable[None]]  # the store has not all of it
        self._fleet = fleet
        self._streams = streams
        self._queues = queues
        self._config = config
        self._group = group

    def start(
        self, host: ModelHost, stored: Stored, builder: EventBuilder, stay: Stay
    ) -> LiveStream:
        """Has a new stream computed once its model is in memory."""
        stream, _ = self._start(host, stored, builder, stay)
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
        stay = Stay(self._queues.resume(host), admitted)
        stream, use = self._start(host, stored, builder, stay)
        if cut:
            stream.end_now(cut)
        use.resume(host)

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
        self, host: ModelHost, stored: Stored, builder: EventBuilder, stay: Stay
    ) -> tuple[LiveStream, ModelUse]:
        host.metrics.requests.follow(builder.tally)
        stream = LiveStream(stored.record, builder, stored.log, stay, self._config.linger_s)
        stream.end_within(0, self._config.request_timeout_s)
        self._streams.add(stream)
        use = ModelUse(self._fleet, stream)
        self.tasks[stream] = self._group.create_task(self._write(host, stream, use), name="stream")
        return stream, use

    async def _enter(self, host: ModelHost, stream: LiveStream, use: ModelUse) -> None:
        try:
            await use.enter(host)
        except RequestError as error:
            if self._queues.is_ending:
                self.let_go([stream], error, RESTARTS)
            else:
                stream.stop(error)

    async def _write(self, host: ModelHost, stream: LiveStream, use: ModelUse) -> None:
        is_new = use.host is None
        entering = self._group.create_task(self._enter(host, stream, use)) if is_new else None
        try:
            await self._run(host, stream)
            if not stream.record.names.is_opted_in:
                await stream.audience.abandoned.wait()
        except LogTaken:
            logger.warning("Another server has taken a stream over")
            stream.audience.pause.set(_TAKEN)
            stream.ended.set()
        except Exception:  # one stream, and not the server
            logger.exception("The log of a stream cannot be written")
            failure = RequestError("internal_error", "The log of this stream cannot be written.")
            stream.audience.pause.set(failure)
            stream.ended.set()
        finally:
            stream.stay.end()
            if entering is not None:
                entering.cancel()
            self._streams.remove(stream)
            del self.tasks[stream]
            use.end()

    async def _run(self, host: ModelHost, stream: LiveStream) -> None:
        try:
            if stream.log.next_seq == 0:
                await stream.accept()
            await stream.run()
            stream.note_end(host.metrics.requests)
            self._queues.limits.used(
                stream.record.names.owner, stream.tally.usage.completion_tokens
            )
        except StoreStalled:
            await self.on_stalled(stream)
