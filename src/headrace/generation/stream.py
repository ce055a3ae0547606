"""One generation request while it lives: the only writer of its log, and who reads it."""

import asyncio
import enum
import logging
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
from headrace.generation.audience import Audience, Reader
from headrace.generation.choice import Choice
from headrace.generation.echo import Echo
from headrace.generation.progress import PromptProgress
from headrace.generation.sequences import Sequences
from headrace.generation.served import ServedModel
from headrace.streams import events
from headrace.streams.events import AnyEvent
from headrace.streams.log import Log
from headrace.streams.record import Record
from headrace.streams.tally import Tally

logger = logging.getLogger(__name__)

Item = Started | Progress | PromptLogprobs | NewToken | Finished
"""What an engine says of one sequence."""


class Link(enum.Enum):
    """What became of the engine, in order with what it said."""

    UP = "up"  # a fresh one that knows nothing
    DOWN = "down"
    GONE = "gone"  # for good: end without it


class Stream:
    """Made on admission. `run` writes the log to its end; readers come and go."""

    def __init__(
        self,
        record: Record,
        model: ServedModel,
        sequences: Sequences["Stream"],
        log: Log,
        linger_s: float,
    ) -> None:
        self.record = record
        self.log = log
        self.has_started = False
        self.has_ended = False
        self._sequences = sequences
        self._inbox: asyncio.Queue[Sequence[Item] | Link] = asyncio.Queue()
        request = record.request
        self._choices = [Choice(i, record, model) for i in range(request.num_choices)]
        self._by_sequence: dict[SequenceId, Choice] = {}  # those the engine knows of
        self._echo = Echo(record, model.tokenizer) if request.echo else None
        self._progress = [PromptProgress(n * request.n) for n in range(len(request.prompts))]
        self._tally = Tally()
        self._admitted_at = time.monotonic()
        self._next_seq = 0
        self._cut: RequestError | None = None
        self.audience = Audience(
            None if record.names.is_opted_in else linger_s, on_abandoned=self._is_abandoned
        )

    # what others call

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def num_live(self) -> int:
        """Choices that have not ended."""
        return sum(choice.end is None for choice in self._choices)

    def tell(self, news: Sequence[Item] | Link) -> None:
        """Hands over what the engine said of this stream's sequences, or what became of it."""
        self._inbox.put_nowait(news)

    def stop(self, error: RequestError) -> None:
        """Cuts the stream: it ends with this error once the engine has let go. Idempotent."""
        if self.has_ended or self._cut:
            return
        self._cut = error
        if self._by_sequence:
            self._sequences.engine.cancel(Cancel(tuple(self._by_sequence)))
        else:
            self.tell(Link.GONE)

    def reader(self, after: int = -1) -> AbstractAsyncContextManager[Reader]:
        """All events after the cursor. Leaving the context is leaving the stream."""
        return self.audience.reader(self.log, after)

    def _is_abandoned(self) -> None:
        self.stop(RequestError("client_gone", "The client left before the answer ended."))

    # the writer

    async def accept(self) -> None:
        """Writes the first event."""
        record = self.record
        continues = any(getattr(p, "continue_final_message", False) for p in record.request.prompts)
        await self._append(
            [
                events.Accepted(
                    seq=0,
                    at_ms=0,
                    id=record.id,
                    route=record.request.route,
                    model=record.request.model,
                    created=record.created,
                    mode="continue" if continues else "fresh",
                    prompt_tokens=record.num_prompt_tokens,
                    n=record.request.n,
                    seed=record.request.sampling.seed,
                    durable=record.is_durable,
                )
            ]
        )

    async def run(self) -> None:
        """Writes all other events, the terminal one last."""
        try:
            while self.num_live and (news := await self._inbox.get()) is not Link.GONE:
                if isinstance(news, Link):
                    self._relink(news)
                else:
                    for item in news:
                        self._take(item)
                await self._append(self._new_events())
        except Exception:
            logger.exception("A stream failed")
            self._cut = RequestError("internal_error", "The server failed on this request.")
            self._sequences.engine.cancel(Cancel(tuple(self._by_sequence)))
        self._sequences.close(self._by_sequence)
        await self._append([self._terminal()])
        self.has_ended = True

    def _relink(self, link: Link) -> None:
        """Forgets a dead engine; submits what is left of the request to a fresh one."""
        self._sequences.close(self._by_sequence)
        self._by_sequence = {}
        for choice in self._choices:
            if choice.is_stopped and choice.end is None:
                choice.finish(Finished(choice.sequence_id, Finish.STOP))
        if self._cut:
            self.tell(Link.GONE)
        elif link is Link.UP and self.num_live:
            self._submit()

    def _submit(self) -> None:
        live = [choice for choice in self._choices if choice.end is None]
        sequences = tuple(choice.resume_as(self._sequences.open(self)) for choice in live)
        self._by_sequence = {choice.sequence_id: choice for choice in live}
        request = self.record.request
        self._sequences.engine.submit(
            Submit(
                stream_id=self.record.id,
                prompts=self.record.prompts,
                sequences=sequences,
                sampling=request.sampling,
                arrival=self._admitted_at,
                priority=request.priority,
                salt=request.cache_salt,
                use_prefix=request.cache_prompt and not request.echo,
            )
        )

    def _take(self, item: Item) -> None:
        choice = self._by_sequence.get(item.sequence_id)
        if choice is None:
            return
        match item:
            case Started(_, total, cached):
                self.has_started = True
                self._progress[choice.prompt].start(choice, total, cached, self._at_ms())
            case Progress(_, processed):
                self._progress[choice.prompt].advance(choice, processed)
            case PromptLogprobs() if self._echo:
                self._echo.add(choice.prompt, item)
            case NewToken():
                self._begin_text(choice)
                choice.feed(item)
                if choice.is_stopped:
                    self._sequences.engine.cancel(Cancel((choice.sequence_id,), Finish.STOP))
            case Finished():
                self._end(choice, item)

    def _begin_text(self, choice: Choice) -> None:
        if self._echo:
            self._echo.begin(choice)

    def _end(self, choice: Choice, finished: Finished) -> None:
        if finished.finish is Finish.ERROR and not choice.is_stopped and not self._cut:
            self.stop(RequestError(finished.code, finished.message))
        if finished.finish is not Finish.CANCELLED:
            self._begin_text(choice)
        choice.finish(finished)

    def _new_events(self) -> list[AnyEvent]:
        at_ms = self._at_ms()
        made: list[AnyEvent] = []
        for progress in self._progress:
            if (event := progress.take(self._next_seq + len(made), at_ms)) is not None:
                made.append(event)
        if self._cut:
            return made  # no new token follows a cut
        for choice in self._choices:
            if (tokens := choice.take(self._next_seq + len(made), at_ms)) is not None:
                made.append(tokens)
        return made

    def _terminal(self) -> AnyEvent:
        seq, at_ms = self._next_seq, self._at_ms()
        if self._cut:
            kind = self._cut.kind
            return events.Error(
                seq=seq,
                at_ms=at_ms,
                code=self._cut.code,
                type=kind.type,
                message=self._cut.message,
                status=kind.status,
                retryable=kind.retry,
            )
        ends = tuple(choice.end for choice in self._choices if choice.end)
        return events.Finish(
            seq=seq, at_ms=at_ms, ends=ends, usage=self._tally.usage, timings=self._tally.timings
        )

    async def _append(self, new: Sequence[AnyEvent]) -> None:
        if new:
            await self.log.append(self._next_seq, new)
            self._next_seq += len(new)
            for event in new:
                self._tally.feed(event)

    def _at_ms(self) -> int:
        return int((time.monotonic() - self._admitted_at) * 1000)
