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

from headrace.engines.client import EngineDown, EngineUp
from headrace.fleet.queue_eta import TokensAsked
from headrace.fleet.served_model import ServedModel
from headrace.fleet.tenants import InQueue, Item, TenantNews, Tenants
from headrace.generation.admission import Place
from headrace.generation.crash_blame import CrashBlame
from headrace.generation.submission import Submission
from headrace_common.errors import RequestError
from headrace_common.ids import SequenceId, StreamId
from headrace_common.messages import Finished, FinishReason, NewSequence, Started, Submit
from headrace_common.sampling import Pooling, Sampling

_WINDOWS_PER_PLACE = 2  # while one half of a window is computed, the other half waits


class VectorWork(NamedTuple):
    """Packed inputs, and the place in the queue that was taken for them."""

    inputs: Sequence[bytes]
    pooling: Pooling
    salt: str
    place: Place
    priority: int = 0


class VectorBatch:
    """The inputs of one request. It owns sequences as a stream does, and keeps no log."""

    def __init__(self, work: VectorWork) -> None:
        inputs, pooling, salt, self._place, self._priority = work
        self.id = StreamId("embd-" + secrets.token_hex(16))
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._inputs = inputs
        self._sampling = Sampling(max_tokens=0, pooling=pooling)
        self._use_prefix = not pooling.needs_whole
        self._salt = salt
        self._inbox: asyncio.Queue[TenantNews | RequestError] = asyncio.Queue()
        self._vectors: dict[int, bytes] = {}
        self._left = deque(range(len(inputs)))  # that no engine has
        self._submission = Submission(self)
        self._begun: set[SequenceId] = set()
        self._suspects: dict[int, CrashBlame] = {}

    def asked(self, sequence_id: SequenceId) -> TokensAsked:
        """The tokens that one of its sequences asks of the engine."""
        number = self._submission.parts.get(sequence_id)
        return TokensAsked(0 if number is None else len(self._inputs[number]) // 4, 0)

    def tell(self, news: TenantNews) -> None:
        """Hands over what the engine said, or what became of it."""
        self._inbox.put_nowait(news)

    def tell_place(self, place: InQueue) -> None:
        """Does nothing: nobody hears where a batch stands."""

    def begin(self, model: ServedModel, engine: Tenants, up: EngineUp) -> None:
        """An engine is there, which is given a window of what is left."""
        self._submission.engine = engine
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
            self._submission.leave()
            self._place.close()
            self.ended.cancel()
        return tuple(self._vectors[number] for number in range(len(self._inputs)))

    def _count(self) -> None:
        """Updates the queue place: of a batch of thousands, only the engine's part counts."""
        parts = self._submission.parts
        waiting = [len(self._inputs[n]) // 4 for id, n in parts.items() if id not in self._begun]
        self._place.update(len(parts), len(waiting), sum(waiting))

    def _top_up(self, window: int) -> None:
        """Gives the engine inputs until it has as many as it may; suspects run alone there."""
        room = min(len(self._left), window - len(self._submission.parts))
        numbers = [self._left.popleft() for _ in range(room)]
        self._submit([n for n in numbers if n in self._suspects], True)
        self._submit([n for n in numbers if n not in self._suspects], False)

    def _submit(self, numbers: Sequence[int], are_suspects: bool) -> None:
        if not numbers:
            return
        new = self._submission.open(numbers)
        self._submission.submit(
            Submit(
                stream_id=self.id,
                prompts=tuple(self._inputs[number] for number in numbers),
                sequences=tuple(NewSequence(id, place, 0) for place, id in enumerate(new)),
                sampling=self._sampling,
                arrival=time.monotonic(),
                priority=self._priority,
                salt=self._salt,
                use_prefix=self._use_prefix,
                suspect=are_suspects,
            )
        )

    def _take(self, items: Iterable[Item]) -> None:
        for item in items:
            if item.sequence_id not in self._submission.parts:
                continue
            if isinstance(item, Started):
                self._begun.add(item.sequence_id)
            elif isinstance(item, Finished):
                self._finish(item)

    def _finish(self, end: Finished) -> None:
        number = self._submission.close(end.sequence_id)
        self._begun.discard(end.sequence_id)
        self._suspects.pop(number, None)
        if end.finish is not FinishReason.LENGTH or not end.vector:
            message = end.message or "The server failed on this request."
            raise RequestError(end.code or "internal_error", message)
        self._vectors[number] = end.vector

    def _forget_engine(self, down: EngineDown) -> None:
        """Forgets a dead engine: its vectors so far count, the others are asked for again."""
        lost = self._submission.forget()
        self._begun.clear()
        for sequence_id in down.suspects:
            if (number := lost.get(sequence_id)) is not None:
                blame = self._suspects.setdefault(number, CrashBlame())
                if poison := blame.judge(down, (sequence_id,)):
                    raise poison
        self._left.extendleft(sorted(lost.values(), reverse=True))
