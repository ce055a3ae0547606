"""Fake answers, and fake blobs on a disk that a test can fill."""

import asyncio

from headrace.batches.answers import LineAnswer, LineAnswers, LineRequest
from headrace.batches.store import NOBODY, Blobs
from headrace.protocols.batch_lines import custom_id_of
from headrace.streams.store import StoreStalled
from headrace_common.errors import RequestError


class FakeAnswers(LineAnswers):
    """A fake that answers a line unless `gate` is closed or `refusals` for its id are left."""

    num_at_once = 4

    def __init__(self) -> None:
        self.asked: list[LineRequest] = []
        self.forgotten: list[str] = []
        self.refusals: dict[str, list[RequestError]] = {}
        self.num_in_work = self.most_in_work = 0
        self.gate = asyncio.Event()
        self.gate.set()

    def check_model(self, name: str) -> None:
        """Do nothing: every model is served."""

    async def read_models(self, lines: bytes) -> None:
        """Do nothing: every model was read."""

    async def answer(self, asked: LineRequest) -> LineAnswer:
        self.asked.append(asked)
        self.num_in_work += 1
        self.most_in_work = max(self.most_in_work, self.num_in_work)
        try:
            await self.gate.wait()
            await asyncio.sleep(0)
            custom_id = custom_id_of(asked.line)
            if left := self.refusals.get(custom_id):
                raise left.pop()
            return LineAnswer(custom_id, 200, b'{"of":"' + custom_id.encode() + b'"}')
        finally:
            self.num_in_work -= 1

    async def forget(self, asked: LineRequest) -> None:
        self.forgotten.append(asked.key)


class FullBlobs:
    """Blobs of another shelf, on a disk that is full for the next `num_full` appends.

    The next `num_lost` appends are confirmed but lost, as in a failover of Redis.
    """

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self.num_full = self.num_lost = 0
        self.sizes: list[int] = []  # of what was appended

    async def append(self, id: str, data: bytes, holder: str = NOBODY) -> None:
        if self.num_full > 0:
            self.num_full -= 1
            raise StoreStalled("no space")
        if self.num_lost > 0:
            self.num_lost -= 1
            return
        self.sizes.append(len(data))
        await self._blobs.append(id, data, holder)

    async def read(self, id: str, start: int, most: int) -> bytes:
        return await self._blobs.read(id, start, most)

    async def remove(self, id: str) -> None:
        await self._blobs.remove(id)
