"""A program that appends events until it is killed and prints the durable sequence number."""

import asyncio
import itertools
import sys
from pathlib import Path

from headrace.streams.stores.sqlite import SqliteStore
from tools.harness.stream_events import make_record, some


async def main(directory: Path) -> None:
    log = (await SqliteStore.open(directory).create(make_record())).log
    for seq in itertools.count(step=3):
        await log.append(seq, some(3, seq))
        print(seq + 3, flush=True)


asyncio.run(main(Path(sys.argv[1])))
