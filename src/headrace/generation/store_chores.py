"""The lasting tasks of a server with its store: each runs until it is cancelled."""

import asyncio
import contextlib
import time

from headrace.generation.registry import Registry, cut_by
from headrace.streams.store import Ask, Retention, StoreStalled
from headrace_common.errors import RequestError

_CANNOT_WRITE = RequestError(
    "storage_stalled", "The server cannot store streams now; read on later."
)
_SWEEP_INTERVAL_S = 60.0


async def watch(streams: Registry) -> None:
    """Sends the readers of durable streams away while the store cannot write."""
    while True:
        await streams.store.stalled.wait()
        streams.pause(_CANNOT_WRITE)
        await streams.store.writable.wait()
        streams.unpause()


async def obey(streams: Registry, group: asyncio.TaskGroup) -> None:
    """Does what other servers of the same store ask of the streams that are written here."""
    while True:
        group.create_task(_do(streams, await streams.store.asked()), name="ask")


async def _do(streams: Registry, ask: Ask) -> None:
    stream = await streams.written_here(ask.stream_id, waits=ask.what == "stop")
    if stream is None:
        return
    if ask.what == "stop":
        stream.stop(cut_by(ask.detail))
    elif ask.what == "beat":
        stream.beat(ask.detail, ask.interval_s)
    else:
        stream.check_log()


async def sweep(streams: Registry) -> None:
    """Once a minute, forgets what retention does not keep."""
    while True:
        await streams.sweep()
        with contextlib.suppress(StoreStalled):
            totals = await streams.store.sweep(Retention(), time.time())
            streams.figures.swept("durable", totals.num_bytes)
        await asyncio.sleep(_SWEEP_INTERVAL_S)
