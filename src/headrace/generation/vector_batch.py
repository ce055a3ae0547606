"""One request's inputs on their way to vectors: results, not streams.

The engine is given a window of them at a time, so that a batch of thousands fills no queue, and
requests that come while it is at work wait for a window at most. The death of an engine costs time.
"""

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from headrace.core.errors import RequestError
from headrace.core.ids import SequenceId, StreamId
from headrace.core.messages import Cancel, Finished, FinishReason, NewSequence, Started, Submit
from headrace.core.sampling import Pooling, Sampling
from headrace.engine.client import EngineDown, EngineUp
from headrace.fleet.queue_eta import TokensAsked
from headrace.fleet.served_model import ServedModel
from headrace.fleet.tenants import InQueue, Item, TenantNews, Tenants
from headrace.generation.admission import Place
from headrace.generation.suspicion import CrashSuspicion

_WINDOWS_PER_PLACE = 2  # while one half of a window is computed, the other half waits


class VectorWork(NamedTuple):
    """Packed inputs, and the place in the queue that was taken for them."""

    inputs: Sequence[bytes]
    pooling: Pooling
    salt: str
    place: Place


class VectorBatch:
    """The inputs of one request. It owns sequences as a stream does, and keeps no log."""

    def __init__(
        self,
        work: VectorWork,
        engine: Tenants,
    ) -> None:
        inputs, pooling, salt, self._place = work
        self.id = StreamId("embd-" + secrets.token_hex(16))
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._inputs = inputs
        self._sampling = Sampling(max_tokens=0, pooling=pooling)
        self._use_prefix = not pooling.needs_whole
        self._engine = engine
        self._salt = salt
        self._inbox: asyncio.Queue[TenantNews | RequestError] = asyncio.Queue()
        self._vectors: dict[int, bytes] = {}
        self._left = deque(range(len(inputs)))  # that no engine has
        self._engine_knows: dict[SequenceId, int] = {}  # and the input that each is
        self._begun: set[SequenceId] = set()
        self._suspicions: dict[int, CrashSuspicion] = {}

    @property
    def num_live(self) -> int:
        """Inputs that take a place in the engine or its queue."""
        return len(self._engine_knows)

    def asked(self, sequence_id: SequenceId) -> TokensAsked:
        """The tokens that one of its sequences asks of the engine."""
        number = self._engine_knows.get(sequence_id)
        return TokensAsked(0 if number is None else len(self._inputs[number]) // 4, 0)

    def tell(self, news: TenantNews) -> None:
        """Hands over what the engine said, or what became of it."""
        self._inbox.put_nowait(news)

    def tell_place(self, place: InQueue) -> None:
        """Does nothing: nobody hears where a batch stands."""

    def begin(self, model: ServedModel, seat: Tenants, up: EngineUp) -> None:
        """An engine is there, which is given a window of what is left."""
        self.tell(up)

    def lose(self, error: RequestError) -> None:
        """The engine was given up."""
        self.stop(error)

    def stop(self, error: RequestError) -> None:
        """Ends the request with this error."""
        self._inbox.put_nowait(error)

    async def run(self) -> tuple[bytes, ...]:
        """The vectors, in order; RequestError if one cannot be had."""
        window = 0
        try:
            while len(self._vectors) < len(self._inputs):
                match await self._inbox.get():
                    case RequestError() as error:
                        raise error
                    case EngineUp() as up:
                        window = _WINDOWS_PER_PLACE * up.ready.max_num_seqs
                    case EngineDown() as down:
                        window = 0
                        self._forget_engine(down)
                    case list() as items:
                        self._take(items)
                self._top_up(window)
                self._count()
        finally:
            self._leave_engine()
            self._place.close()
            self.ended.cancel()
        return tuple(self._vectors[number] for number in range(len(self._inputs)))

    def _count(self) -> None:
        """Updates the queue place: of a batch of thousands, only the engine's part counts."""
        waiting = [n for id, n in self._engine_knows.items() if id not in self._begun]
        self._place.update(self.num_live, len(waiting), self.num_tokens(waiting))

    def num_tokens(self, numbers: Iterable[int]) -> int:
        return sum(len(self._inputs[number]) // 4 for number in numbers)

    def _top_up(self, window: int) -> None:
        """Gives the engine inputs until it has as many as it may; suspects run alone there."""
        room = min(len(self._left), window - self.num_live)
        numbers = [self._left.popleft() for _ in range(room)]
        suspects = [n for n in numbers if n in self._suspicions]
        self._submit(suspects, True)
        self._submit([n for n in numbers if n not in self._suspicions], False)

    def _submit(self, numbers: Sequence[int], are_suspects: bool) -> None:
        if not numbers:
            return
        new = {self._engine.open(self): number for number in numbers}
        self._engine_knows |= new
        self._engine.submit(
            Submit(
                stream_id=self.id,
                prompts=tuple(self._inputs[number] for number in numbers),
                sequences=tuple(NewSequence(id, place, 0) for place, id in enumerate(new)),
                sampling=self._sampling,
                arrival=time.monotonic(),
                salt=self._salt,
                use_prefix=self._use_prefix,
                suspect=are_suspects,
            )
        )

    def _take(self, items: Iterable[Item]) -> None:
        for item in items:
            if item.sequence_id not in self._engine_knows:
                continue
            if isinstance(item, Started):
                self._begun.add(item.sequence_id)
            elif isinstance(item, Finished):
                self._finish(item)

    def _finish(self, end: Finished) -> None:
        number = self._engine_knows.pop(end.sequence_id)
        self._begun.discard(end.sequence_id)
        self._engine.forget((end.sequence_id,))
        self._suspicions.pop(number, None)
        if end.finish is not FinishReason.LENGTH or not end.vector:
            message = end.message or "The server failed on this request."
            raise RequestError(end.code or "internal_error", message)
        self._vectors[number] = end.vector

    def _forget_engine(self, down: EngineDown) -> None:
        """Forgets a dead engine: its vectors so far count, the others are asked for again."""
        lost, self._engine_knows = self._engine_knows, {}
        self._begun.clear()
        self._engine.forget(lost)
        for sequence_id in down.suspects:
            if (number := lost.get(sequence_id)) is not None:
                suspicion = self._suspicions.setdefault(number, CrashSuspicion())
                alone = len(down.suspects) == 1
                if poison := suspicion.judge(True, alone, down.from_outside):
                    raise poison
        self._left.extendleft(sorted(lost.values(), reverse=True))

    def _leave_engine(self) -> None:
        if self._engine_knows:
            self._engine.cancel(Cancel(tuple(self._engine_knows)))
            self._engine.forget(self._engine_knows)
            self._engine_knows = {}
