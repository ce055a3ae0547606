"""A program whose files may not grow for a while, as on a full disk."""

import asyncio
import resource
import sys
from pathlib import Path

from headrace.streams.stores.sqlite import SqliteStore
from tools.harness.stream_events import finish, make_record, some


async def main(directory: Path) -> None:
    store = SqliteStore.open(directory)
    log = (await store.create(make_record())).log
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, hard))
    appends = [asyncio.create_task(log.append(n * 100, some(100, n * 100))) for n in range(20)]
    await store.stalled.wait()
    print("stalled", flush=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    await asyncio.gather(*appends)
    await log.append(2000, [finish(2000)])
    await store.close()
    print("written", flush=True)


asyncio.run(main(Path(sys.argv[1])))
