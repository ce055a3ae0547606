"""One generation request while it lives: the only writer of its log."""

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from headrace.core.errors import RequestError
from headrace.core.ids import SequenceId
from headrace.core.messages import (
    Cancel,
    Finish,
    Finished,
    NewToken,
    Progress,
    PromptLogprobs,
    Started,
    Submit,
)
from headrace.engine.client import EngineDown, EngineUp
from headrace.generation.audience import Audience, Reader
from headrace.generation.crash_suspicion import CrashSuspicion
from headrace.generation.event_builder import EventBuilder, Heartbeat
from headrace.generation.forecast import Asked
from headrace.generation.progress import InQueue
from headrace.generation.reader_pause import ReaderPause
from headrace.generation.sequences import Sequences
from headrace.streams import events
from headrace.streams.log import Log
from headrace.streams.record import Record
from headrace.streams.store import StoreStalled

logger = logging.getLogger(__name__)

Item = Started | Progress | PromptLogprobs | NewToken | Finished
"""What an engine says of one sequence."""

News = list[Item] | EngineUp | EngineDown | InQueue | Heartbeat
"""What a stream acts on, in order."""


class Stream:
    """Made on admission, or from its log after a restart. `run` writes the log to its end."""

    def __init__(
        self,
        record: Record,
        draft: EventBuilder,
        sequences: Sequences["Stream"],
        log: Log,
        linger_s: float,
    ) -> None:
        self.record = record
        self.log = log
        self.smaller_context: int | None = None  # than at admission: its end is told as such
        self.ended = asyncio.Event()
        self.interruption = ReaderPause()
        self.audience = Audience(
            None if record.names.is_opted_in else linger_s, on_abandoned=self._is_abandoned
        )
        self._draft = draft
        self._sequences = sequences
        self._inbox: asyncio.Queue[News | None] = asyncio.Queue()  # None: end without the engine
        self._engine_knows: dict[SequenceId, int] = {}  # and the choice that each is
        self._blame = CrashSuspicion()
        self._is_recovering = draft.has_begun  # until the engine is where a dead one was
        self._beat_at: dict[str, float] = {}  # when the last of each form was taken up
        self._admitted_at = time.monotonic() - draft.last_ms / 1000
        self._cut: RequestError | None = None

    # what others call

    @property
    def cut(self) -> RequestError | None:
        """Why it was cut, if it was."""
        return self._cut

    @property
    def num_live(self) -> int:
        """Choices that have not ended."""
        return self._draft.num_live

    @property
    def num_waiting(self) -> int:
        """Choices that the engine has not begun."""
        return 0 if self.ended.is_set() else self._draft.num_waiting

    @property
    def num_tokens(self) -> int:
        """Prompt and answer so far of the longest choice that has not ended."""
        return self._draft.num_tokens

    @property
    def state(self) -> str:
        """queued, prompt, decode or recovering, until the log has ended."""
        if self._is_recovering:
            return "recovering"
        if not self._draft.has_begun:
            return "queued"
        return "decode" if self._draft.has_tokens else "prompt"

    def asked(self, sequence_id: SequenceId) -> Asked:
        """What one of its sequences asks of the engine; siblings share their prompt."""
        choice = self._engine_knows.get(sequence_id)
        if choice is None:
            return Asked(0, 0)
        request = self.record.request
        prompt, number = divmod(choice, request.n)
        limit = request.sampling.max_tokens
        num_prompt = 0 if number else len(self.record.prompts[prompt]) // 4
        return Asked(num_prompt, math.inf if limit is None else limit)

    def tell(self, news: News) -> None:
        """Hands over what the engine said, or what became of it."""
        self._inbox.put_nowait(news)

    def stop(self, error: RequestError) -> None:
        """Cuts the stream: it ends with this error once the engine has let go. Idempotent."""
        if self.ended.is_set() or self._cut:
            return
        self._cut = error
        if self._engine_knows:
            self._sequences.engine.cancel(Cancel(tuple(self._engine_knows)))
        else:
            self._inbox.put_nowait(None)

    def end_now(self, error: RequestError) -> None:
        """Cuts the stream without waiting for an engine that will not answer."""
        self._cut = self._cut or error
        self._inbox.put_nowait(None)

    def beat(self, form: str, interval_s: float) -> None:
        """Writes a heartbeat into the log, for wires on which every byte counts.

        One for all readers: those who ask within half an interval of it mean the same one.
        """
        if time.monotonic() - self._beat_at.get(form, -math.inf) >= interval_s / 2:
            self._beat_at[form] = math.inf  # so that one pends at most
            self.tell(Heartbeat(self.state, form))

    def reader(self, after: int = -1) -> AbstractAsyncContextManager[Reader]:
        """All events after the cursor. Leaving the context is leaving the stream."""
        return self.audience.reader(self.log, after)

    def _is_abandoned(self) -> None:
        self.stop(RequestError("client_gone", "The client left before the answer ended."))

    # the writer

    async def accept(self) -> None:
        """Writes the first event."""
        await self._append([self._draft.accepted()])

    async def run(self) -> None:
        """Writes all other events, the terminal one last."""
        try:
            await self._append_new()  # after a restart: an end that the logged tokens had reached
            while self.num_live and (news := await self._inbox.get()) is not None:
                self._take(news)
                await self._append_new()
        except StoreStalled:
            self._leave_engine()
            raise
        except Exception:
            logger.exception("A stream failed")
            self._cut = RequestError("internal_error", "The server failed on this request.")
            self._leave_engine()
        self._sequences.close(self._engine_knows)
        await self._append([self._draft.terminal(self._at_ms(), self._cut)])
        self.ended.set()

    def _leave_engine(self) -> None:
        self._sequences.engine.cancel(Cancel(tuple(self._engine_knows)))
        self._sequences.close(self._engine_knows)

    def _take(self, news: News) -> None:
        match news:
            case EngineUp():
                self._is_recovering = self._draft.has_begun
                self._submit()
            case EngineDown():
                self._forget_engine(news)
            case list():
                for item in news:
                    self._take_item(item)
            case InQueue():
                self._draft.move_in_queue(None if self._draft.has_begun else news)
            case Heartbeat():
                self._draft.beat(news)
                self._beat_at[news.form] = time.monotonic()

    def _take_item(self, item: Item) -> None:
        choice = self._engine_knows.get(item.sequence_id)
        if choice is None:
            return
        if isinstance(item, NewToken) or not self._draft.has_tokens:
            self._is_recovering = False
        if isinstance(item, NewToken):
            self._blame.clear()
        elif isinstance(item, Finished) and item.finish is Finish.ERROR:
            self.stop(RequestError(item.code or "internal_error", item.message))
        elif isinstance(item, Finished) and item.finish is Finish.LENGTH:
            self._check_context(choice)
        if self._draft.take(choice, item, self._at_ms()):
            self._sequences.engine.cancel(Cancel((item.sequence_id,), Finish.STOP))

    def _check_context(self, choice: int) -> None:
        """An end that only a context smaller than at admission brings is no end of the answer."""
        context = self.smaller_context
        if context is not None and self._draft.is_cut_short(choice, context):
            message = f"The context is now {context} tokens, too few for the rest of this answer."
            self.stop(RequestError("model_changed", message))

    def _submit(self) -> None:
        """What is left of the request, to a fresh engine."""
        if self._cut:
            return
        live = self._draft.live()
        self._engine_knows = {self._sequences.open(self): choice.index for choice in live}
        request = self.record.request
        self._sequences.engine.submit(
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
                suspect=self._blame.is_suspect,
            )
        )

    def _forget_engine(self, down: EngineDown) -> None:
        """It is dead, and what it had not said is lost; what it had said counts."""
        mine = self._engine_knows.keys() & set(down.suspects)
        poison = self._blame.judge(bool(mine), len(mine) == len(down.suspects), down.from_outside)
        self._sequences.close(self._engine_knows)
        self._engine_knows = {}
        self._draft.end_stopped()
        if poison:
            self._cut = self._cut or poison
        if self._cut:
            self._inbox.put_nowait(None)
        elif self.num_live:
            self._is_recovering = True
            self._draft.recover()
            self._beat_at["data"] = time.monotonic()

    async def _append_new(self) -> None:
        await self._append(self._draft.new_events(self._at_ms(), is_cut=bool(self._cut)))

    async def _append(self, new: Sequence[events.AnyEvent]) -> None:
        if new:
            await self.log.append(new[0].seq, new)

    def _at_ms(self) -> int:
        return int((time.monotonic() - self._admitted_at) * 1000)
