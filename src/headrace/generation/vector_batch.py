"""Computes the vectors of one request's inputs, without a stream.

The inputs are submitted in windows of limited size. So a batch of thousands of inputs does not
fill the queue, and later requests wait for at most one window. If an engine dies, the unfinished
inputs are submitted again.
"""

import asyncio
import itertools
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from headrace.engines.client import EngineDown, EngineUp
from headrace.fleet.engine_users import EngineUsers, InQueue, Item, UserNews
from headrace.fleet.queue_eta import TokenDemand
from headrace.fleet.served_model import ServedModel
from headrace.generation.admission import QueueTicket
from headrace.generation.crash_blame import CrashBlame
from headrace.generation.submission import Submission
from headrace_common.errors import RequestError
from headrace_common.ids import SequenceId, StreamId
from headrace_common.messages import Finished, FinishReason, NewSequence, Started, Submit
from headrace_common.sampling import Pooling, Sampling

# The number of inputs in a window, per sequence that the engine can run at the same time. While
# the engine processes half of the window, the other half waits.
_WINDOWS_PER_PLACE = 2


class VectorWork(NamedTuple):
    """The inputs as packed token ids, how to compute their vectors, and the queue ticket."""

    inputs: Sequence[bytes]
    pooling: Pooling
    salt: str
    place: QueueTicket
    priority: int = 0
    # Called after each computed vector.
    on_vector: Callable[[], None] = lambda: None
    # For each pair of texts, the number of tokens of its first text.
    nums_first: Sequence[int] = ()
    # The id of the client. The scheduler lets clients take turns.
    client: str = ""


class VectorBatch:
    """Computes the vectors of one request.

    Like a stream, a batch owns sequences; unlike a stream, a batch keeps no log.
    """

    def __init__(self, work: VectorWork) -> None:
        inputs, pooling, salt, self._ticket, self._priority, self._on_vector, firsts, client = work
        self.id = StreamId("embd-" + secrets.token_hex(16))
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._inputs = inputs
        self._pooling = pooling
        self._nums_first = firsts or (0,) * len(inputs)
        self._use_prefix = not pooling.needs_whole
        self._salt, self._client = salt, client
        self._inbox: asyncio.Queue[UserNews | RequestError] = asyncio.Queue()
        self._vectors: dict[int, bytes] = {}
        # Indexes of the inputs that must still be submitted to an engine.
        self._remaining = deque(range(len(inputs)))
        self._submission = Submission(self)
        self._started: set[SequenceId] = set()
        self._suspects: dict[int, CrashBlame] = {}

    def asked(self, sequence_id: SequenceId) -> TokenDemand:
        """Return how many tokens one of this batch's sequences needs."""
        number = self._submission.parts.get(sequence_id)
        return TokenDemand(0 if number is None else len(self._inputs[number]) // 4, 0)

    def tell(self, news: UserNews) -> None:
        """Queue a message for `run`."""
        self._inbox.put_nowait(news)

    def set_queue_position(self, place: InQueue) -> None:
        """Do nothing: nobody receives the queue position of a batch."""

    def begin(self, model: ServedModel, engine: EngineUsers, up: EngineUp) -> None:
        """Submit a window of the remaining inputs to an engine that is ready."""
        self._submission.move_to(engine)
        self.tell(up)

    def lose(self, error: RequestError) -> None:
        """End the request, because its engine could not be restarted."""
        self.stop(error)

    def stop(self, error: RequestError) -> None:
        """End the request with this error."""
        self._inbox.put_nowait(error)

    async def run(self) -> tuple[bytes, ...]:
        """Return the vectors in the order of the inputs.

        Raises RequestError if a vector cannot be computed.
        """
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
                self._fill_window(window)
                self._update_ticket()
        finally:
            self._submission.leave()
            self._ticket.close()
            self.ended.cancel()
        return tuple(self._vectors[number] for number in range(len(self._inputs)))

    def _update_ticket(self) -> None:
        """Update the queue ticket: only the submitted inputs count, not the whole batch."""
        parts = self._submission.parts
        waiting = [len(self._inputs[n]) // 4 for id, n in parts.items() if id not in self._started]
        self._ticket.update(len(parts), len(waiting), sum(waiting))

    def _fill_window(self, window: int) -> None:
        """Submit inputs until the window is full.

        An input that may have killed an engine runs alone.
        """
        room = min(len(self._remaining), window - len(self._submission.parts))
        numbers = [self._remaining.popleft() for _ in range(room)]
        # A message has one `num_first` for all of its inputs.
        for num_first, same in itertools.groupby(numbers, self._nums_first.__getitem__):
            group = list(same)
            self._submit([n for n in group if n in self._suspects], True, num_first)
            self._submit([n for n in group if n not in self._suspects], False, num_first)

    def _submit(self, numbers: Sequence[int], are_suspects: bool, num_first: int) -> None:
        if not numbers:
            return
        pooling = msgspec.structs.replace(self._pooling, num_first=num_first)
        new = self._submission.open(numbers)
        self._submission.submit(
            Submit(
                stream_id=self.id,
                prompts=tuple(self._inputs[number] for number in numbers),
                sequences=tuple(NewSequence(id, place, 0) for place, id in enumerate(new)),
                sampling=Sampling(max_tokens=0, pooling=pooling),
                arrival=time.monotonic(),
                priority=self._priority,
                salt=self._salt,
                use_prefix=self._use_prefix,
                suspect=are_suspects,
                client=self._client,
            )
        )

    def _take(self, items: Iterable[Item]) -> None:
        for item in items:
            if item.sequence_id not in self._submission.parts:
                continue
            if isinstance(item, Started):
                self._started.add(item.sequence_id)
            elif isinstance(item, Finished):
                self._finish(item)

    def _finish(self, end: Finished) -> None:
        number = self._submission.close(end.sequence_id)
        self._started.discard(end.sequence_id)
        self._suspects.pop(number, None)
        if end.finish is not FinishReason.LENGTH or not end.vector:
            message = end.message or "The server failed on this request."
            raise RequestError(end.code or "internal_error", message)
        self._vectors[number] = end.vector
        self._on_vector()

    def _forget_engine(self, down: EngineDown) -> None:
        """Handle the death of an engine: keep finished vectors, and submit all other inputs
        again.
        """
        lost = self._submission.forget()
        self._started.clear()
        for sequence_id in down.suspects:
            if (number := lost.get(sequence_id)) is not None:
                blame = self._suspects.setdefault(number, CrashBlame())
                if poison := blame.judge(down, (sequence_id,)):
                    raise poison
        self._remaining.extendleft(sorted(lost.values(), reverse=True))
