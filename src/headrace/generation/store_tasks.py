"""Defines background tasks that connect a server with its store. Each task runs until cancelled."""

import asyncio
import contextlib
import time

from headrace.generation.registry import Registry, cut_by
from headrace.streams.store import Retention, StoreStalled, WriterRequest
from headrace_common.config.settings import StreamConfig
from headrace_common.errors import RequestError

_CANNOT_WRITE = RequestError(
    "storage_stalled", "The server cannot store streams now; resume reading later."
)
_SWEEP_INTERVAL_S = 60.0


async def watch(streams: Registry) -> None:
    """Disconnect the readers of durable streams while the store cannot write."""
    while True:
        await streams.store.stalled.wait()
        streams.pause(_CANNOT_WRITE)
        await streams.store.writable.wait()
        streams.unpause(_CANNOT_WRITE)


async def serve_other_servers(streams: Registry, group: asyncio.TaskGroup) -> None:
    """Execute requests of other servers for streams that this server writes."""
    while True:
        group.create_task(_do(streams, await streams.store.asked()), name="ask")


async def _do(streams: Registry, ask: WriterRequest) -> None:
    if ask.what == "stop":
        await streams.stop_here(ask.stream_id, cut_by(ask.detail))
    elif (stream := streams.written_here(ask.stream_id)) is None:
        return
    elif ask.what == "beat":
        stream.beat(ask.detail, ask.interval_s)
    else:
        stream.check_log()


async def sweep(streams: Registry, config: StreamConfig) -> None:
    """Delete expired streams once a minute, and after much data was added."""
    keep_s = config.keep_streams_hours * 3600.0
    retention = Retention(keep_s, config.max_kept_streams, config.max_kept_stream_bytes)
    while True:
        await streams.sweep()
        with contextlib.suppress(StoreStalled):
            totals = await streams.store.sweep(retention, time.time())
            streams.figures.swept("durable", totals.num_bytes)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(streams.is_sweep_due.wait(), _SWEEP_INTERVAL_S)
        streams.is_sweep_due.clear()
