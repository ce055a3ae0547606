"""One generation request while it lives: the only writer of its log."""

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager

from headrace.core.errors import RequestError
from headrace.core.ids import SequenceId
from headrace.core.messages import (
    Cancel,
    Finished,
    FinishReason,
    NewToken,
    PromptAdvance,
    PromptLogprobs,
    Started,
    Submit,
)
from headrace.engine.client import EngineClient, EngineDown, EngineUp
from headrace.generation.event_builder import Beat, EventBuilder, InQueue
from headrace.generation.forecast import TokensAsked
from headrace.generation.readers import Audience, Reader, ReaderPause
from headrace.streams.events import AnyEvent
from headrace.streams.log import Log
from headrace.streams.record import Record
from headrace.streams.store import StoreStalled
from headrace.streams.tally import Tally

logger = logging.getLogger(__name__)

_MAX_OUTSIDE_DEATHS = 3

Item = Started | PromptAdvance | PromptLogprobs | NewToken | Finished
"""What an engine says of one sequence."""

StreamNews = list[Item] | EngineUp | EngineDown | InQueue | Beat
"""What a stream acts on, in order."""


class CrashSuspicion:
    """One stream's part in the deaths of engines.

    A stream that was in the step an engine died in is suspect, and runs alone until its next
    token. A suspect alone in the next fatal step is guilty at once if the engine died by its own
    doing; kills from outside prove nothing until the third in a row.
    """

    def __init__(self) -> None:
        self.is_suspect = False
        self._num_lone_deaths = 0

    def clear(self) -> None:
        """It got a token."""
        self.is_suspect = False
        self._num_lone_deaths = 0

    def judge(self, was_there: bool, alone: bool, from_outside: bool) -> RequestError | None:
        """An engine died; the error that ends the stream, if it is to blame."""
        if not was_there:
            return None
        was_suspect, self.is_suspect = self.is_suspect, True
        if not (was_suspect and alone):
            return None
        self._num_lone_deaths += 1
        if from_outside and self._num_lone_deaths < _MAX_OUTSIDE_DEATHS:
            return None
        return RequestError(
            "poison_request",
            "The engine died on this request, and again when it ran alone; change the request.",
        )


class Sequences:
    """Which stream an engine's sequence belongs to.

    Ids are never used twice, so what a dead engine said cannot reach a later submission.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._owners: dict[SequenceId, LiveStream] = {}

    def open(self, owner: "LiveStream") -> SequenceId:
        sequence_id = SequenceId(next(self._numbers))
        self._owners[sequence_id] = owner
        return sequence_id

    def close(self, sequence_ids: Iterable[SequenceId]) -> None:
        for sequence_id in sequence_ids:
            self._owners.pop(sequence_id, None)

    def owner(self, sequence_id: SequenceId) -> "LiveStream | None":
        return self._owners.get(sequence_id)


class LiveStream:
    """Made on admission, or from its log after a restart. `run` writes the log to its end."""

    def __init__(
        self,
        record: Record,
        builder: EventBuilder,
        log: Log,
        engine: EngineClient,
        sequences: Sequences,
        linger_s: float,
    ) -> None:
        self.record = record
        self.log = log
        self.smaller_context: int | None = None  # if it has shrunk since admission
        self.cut: RequestError | None = None  # why it was cut, if it was
        self.ended = asyncio.Event()
        self.interruption = ReaderPause()
        self._audience = Audience(
            None if record.names.is_opted_in else linger_s, on_abandoned=self._abandon
        )
        self._builder = builder
        self._engine = engine
        self._sequences = sequences
        self._inbox: asyncio.Queue[StreamNews | None] = asyncio.Queue()  # None: end without engine
        self._engine_knows: dict[SequenceId, int] = {}  # and the choice that each is
        self._suspicion = CrashSuspicion()
        self._is_recovering = builder.has_begun  # until the engine is where a dead one was
        self._beat_at: dict[str, float] = {}  # when the last of each form was taken up
        self._admitted_at = time.monotonic() - builder.last_ms / 1000

    # what others call

    @property
    def num_live(self) -> int:
        """Choices that have not ended."""
        return self._builder.num_live

    @property
    def num_waiting(self) -> int:
        """Choices that the engine has not begun."""
        return 0 if self.ended.is_set() else self._builder.num_waiting

    @property
    def num_tokens(self) -> int:
        """Prompt and answer so far of the longest choice that has not ended."""
        return self._builder.num_tokens

    @property
    def tally(self) -> Tally:
        """Its figures so far."""
        return self._builder.tally

    @property
    def age_s(self) -> float:
        """Since its admission."""
        return self._at_ms() / 1000

    @property
    def state(self) -> str:
        """queued, prompt, decode or recovering, until the log has ended."""
        if self._is_recovering:
            return "recovering"
        if not self._builder.has_begun:
            return "queued"
        return "decode" if self._builder.has_tokens else "prompt"

    def asked(self, sequence_id: SequenceId) -> TokensAsked:
        """What one of its sequences asks of the engine; siblings share their prompt."""
        choice = self._engine_knows.get(sequence_id)
        if choice is None:
            return TokensAsked(0, 0)
        request = self.record.request
        prompt, number = divmod(choice, request.n)
        limit = request.sampling.max_tokens
        num_prompt = 0 if number else len(self.record.prompts[prompt]) // 4
        return TokensAsked(num_prompt, math.inf if limit is None else limit)

    def tell(self, news: StreamNews) -> None:
        """Hands over what the engine said, or what became of it."""
        self._inbox.put_nowait(news)

    def stop(self, error: RequestError) -> None:
        """Cuts the stream: it ends with this error once the engine has let go. Idempotent."""
        if self.ended.is_set() or self.cut:
            return
        self.cut = error
        if self._engine_knows:
            self._engine.cancel(Cancel(tuple(self._engine_knows)))
        else:
            self._inbox.put_nowait(None)

    def end_now(self, error: RequestError) -> None:
        """Cuts the stream without waiting for an engine that will not answer."""
        self.cut = self.cut or error
        self._inbox.put_nowait(None)

    def beat(self, form: str, interval_s: float) -> None:
        """Writes a heartbeat into the log, for wires on which every byte counts.

        One for all readers: those who ask within half an interval of it mean the same one.
        """
        if time.monotonic() - self._beat_at.get(form, -math.inf) >= interval_s / 2:
            self._beat_at[form] = math.inf  # at most one is on its way
            self.tell(Beat(self.state, form))

    # its readers

    def reader(self, after: int = -1) -> AbstractAsyncContextManager[Reader]:
        """All events after the cursor. Leaving the context is leaving the stream."""
        return self._audience.reader(self.log, after)

    @property
    def is_lingering(self) -> bool:
        """Nobody reads, and a client that asks the same may still take over."""
        return self._audience.is_lingering

    async def wait_until_abandoned(self) -> None:
        await self._audience.abandoned.wait()

    def close_to_readers(self) -> None:
        """Stops waiting for readers."""
        self._audience.close()

    def _abandon(self) -> None:
        self.stop(RequestError("client_gone", "The client left before the answer ended."))

    # the writer

    async def accept(self) -> None:
        """Writes the first event."""
        await self._append([self._builder.accepted()])

    async def run(self) -> None:
        """Writes all other events, the terminal one last."""
        try:
            await self._append_new(self._at_ms())  # an end that tokens of an earlier run reached
            while self.num_live and (news := await self._inbox.get()) is not None:
                at_ms = self._at_ms()
                self._take(news, at_ms)
                await self._append_new(at_ms)
        except StoreStalled:
            self._leave_engine()
            raise
        except Exception:
            logger.exception("A stream failed")
            self.cut = RequestError("internal_error", "The server failed on this request.")
            self._leave_engine()
        self._sequences.close(self._engine_knows)
        await self._append([self._builder.terminal(self._at_ms(), self.cut)])
        self.ended.set()

    def _leave_engine(self) -> None:
        self._engine.cancel(Cancel(tuple(self._engine_knows)))
        self._sequences.close(self._engine_knows)

    def _take(self, news: StreamNews, at_ms: int) -> None:
        if isinstance(news, list):
            for item in news:
                self._take_item(item, at_ms)
            return
        match news:
            case EngineUp():
                self._is_recovering = self._builder.has_begun
                self._submit()
            case EngineDown():
                self._forget_engine(news)
            case InQueue():
                self._builder.move_in_queue(None if self._builder.has_begun else news)
            case Beat():
                self._builder.beat(news)
                self._beat_at[news.form] = time.monotonic()

    def _take_item(self, item: Item, at_ms: int) -> None:
        choice = self._engine_knows.get(item.sequence_id)
        if choice is None:
            return
        if isinstance(item, NewToken) or not self._builder.has_tokens:
            self._is_recovering = False
        if isinstance(item, NewToken):
            self._suspicion.clear()
        elif isinstance(item, Finished) and item.finish is FinishReason.ERROR:
            self.stop(RequestError(item.code or "internal_error", item.message))
        elif isinstance(item, Finished) and item.finish is FinishReason.LENGTH:
            self._check_context(choice)
        if self._builder.take(choice, item, at_ms):
            self._engine.cancel(Cancel((item.sequence_id,), FinishReason.STOP))

    def _check_context(self, choice: int) -> None:
        """Where the context has shrunk since admission, running into it is no end of the answer."""
        context = self.smaller_context
        if context is not None and self._builder.is_cut_short(choice, context):
            message = f"The context is now {context} tokens, too few for the rest of this answer."
            self.stop(RequestError("model_changed", message))

    def _submit(self) -> None:
        """Submits what is left of the request to a new engine."""
        if self.cut:
            return
        live = self._builder.live()
        self._engine_knows = {self._sequences.open(self): choice.index for choice in live}
        request = self.record.request
        self._engine.submit(
            Submit(
                stream_id=self.record.id,
                prompts=self.record.prompts,
                sequences=tuple(
                    choice.as_sequence(sequence_id)
                    for sequence_id, choice in zip(self._engine_knows, live, strict=True)
                ),
                sampling=request.sampling,
                arrival=self._admitted_at,
                priority=request.priority,
                # an owner has no line break, so that no salt can pass for another owner's
                salt=f"{self.record.names.owner}\n{request.cache_salt}",
                use_prefix=request.cache_prompt and not request.echo,
                suspect=self._suspicion.is_suspect,
            )
        )

    def _forget_engine(self, down: EngineDown) -> None:
        """It is dead: what it has said counts, the rest is lost."""
        mine = self._engine_knows.keys() & set(down.suspects)
        is_alone = len(mine) == len(down.suspects)
        poison = self._suspicion.judge(bool(mine), is_alone, down.from_outside)
        self._sequences.close(self._engine_knows)
        self._engine_knows = {}
        self._builder.end_stopped()
        if poison:
            self.cut = self.cut or poison
        if self.cut:
            self._inbox.put_nowait(None)
        elif self.num_live:
            self._is_recovering = True
            self._builder.recover()
            self._beat_at["data"] = time.monotonic()

    async def _append_new(self, at_ms: int) -> None:
        await self._append(self._builder.new_events(at_ms, is_cut=bool(self.cut)))

    async def _append(self, new: Sequence[AnyEvent]) -> None:
        if new:
            await self.log.append(new[0].seq, new)

    def _at_ms(self) -> int:
        return int((time.monotonic() - self._admitted_at) * 1000)
