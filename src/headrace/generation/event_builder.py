"""The next events of one stream: what its choices said, numbered and tallied; does no I/O."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from headrace.core.errors import RequestError
from headrace.core.messages import (
    Finished,
    FinishReason,
    NewToken,
    PromptAdvance,
    PromptLogprobs,
    Started,
)
from headrace.fleet.served_model import ServedModel
from headrace.fleet.tenants import InQueue
from headrace.generation.choice import ChoiceWriter, Echo
from headrace.generation.prompt_report import NO_CHUNKS, ChunkCount, describe
from headrace.streams import events
from headrace.streams.events import AnyEvent, Ingestion
from headrace.streams.record import Record, ServedSetup
from headrace.streams.tally import Tally

_NUM_UNTHROTTLED = 16
_INTERVAL_MS = 100
_QUEUE_INTERVAL_MS = 1000
_MISMATCH = "The logged tokens no longer give the logged text."


class Beat(msgspec.Struct, frozen=True):
    """Asks for a heartbeat event."""

    state: str
    form: str
    attempt: int | None = None
    progress: float | None = None  # of the model's load


class Standing(msgspec.Struct, frozen=True):
    """How far a choice is that the engine has begun, in tokens; `num_left` None: no limit."""

    choice: int
    num_prompt: int
    num_processed: int
    num_cached: int
    num_decoded: int
    num_left: int | None


class ServedAs(NamedTuple):
    """The model that a stream began on: weights and settings, and how they are run."""

    fingerprint: str
    setup: ServedSetup


class EventBuilder:
    """Takes what the engine says, in order; gives events with gapless numbers."""

    def __init__(self, record: Record, model: ServedModel) -> None:
        self.last_ms = 0
        self._record, self._model = record, model
        request = record.request
        self._choices = [ChoiceWriter(i, record, model) for i in range(request.num_choices)]
        self._echo = Echo(record, model.tokenizer) if request.echo else None
        self._progress = [
            PromptProgress(n * request.n, request.response_options.return_ingestion)
            for n in range(len(request.prompts))
        ]
        self.queue = QueueProgress()
        self.beats = Heartbeats()
        # None until the model is in memory, where that was not so when the record was made
        known = ServedAs(record.system_fingerprint, record.served)
        self.served = known if record.system_fingerprint else None
        self._is_served_untold = False
        self.num_recoveries = 0
        self.tally = Tally()
        self._next_seq = 0
        # one step speaks of few choices: only those it spoke of are looked at
        self.num_live = len(self._choices)
        self.has_tokens = False
        self._begun: set[int] = set()  # choices that the engine has begun, ended ones included
        self.num_unread = record.num_prompt_tokens  # of prompts that it has not begun
        self._heard: set[int] = set()  # choices that may have something to tell
        self._advanced: set[int] = set()  # prompts whose progress is not told yet

    @property
    def num_waiting(self) -> int:
        """Choices that the engine has not begun."""
        return len(self._choices) - len(self._begun)

    @property
    def num_tokens(self) -> int:
        """Prompt and answer so far of the longest choice that has not ended."""
        return max((choice.num_tokens for choice in self.live()), default=0)

    @property
    def has_begun(self) -> bool:
        """Whether the engine has begun any of it, ended choices included."""
        return bool(self._begun)

    def _note_begun(self, index: int) -> None:
        if index in self._begun:
            return
        n = self._record.request.n
        prompt = index // n
        if self._begun.isdisjoint(range(prompt * n, prompt * n + n)):
            self.num_unread -= len(self._record.prompts[prompt]) // 4
        self._begun.add(index)

    def live(self) -> list[ChoiceWriter]:
        return [choice for choice in self._choices if choice.end is None]

    def standings(self) -> list[Standing]:
        """The standings of the choices that have begun and not ended."""
        limit = self._record.request.sampling.max_tokens
        shown = []
        for choice in self.live() if self._begun else ():
            if choice.index in self._begun:
                progress = self._progress[choice.prompt]
                num_decoded = choice.num_tokens - choice.num_prompt
                num_left = None if limit is None else limit - num_decoded
                processed, cached = progress.num_processed, progress.num_cached
                figures = (choice.num_prompt, processed, cached, num_decoded, num_left)
                shown.append(Standing(choice.index, *figures))
        return shown

    def is_cut_short(self, index: int, context: int) -> bool:
        """Whether nothing but a context of this size ends this choice."""
        return self._choices[index].is_cut_short(context)

    def end_stopped(self) -> None:
        """Ends the choices whose own tokens say so, without the engine's word."""
        for choice in self.live():
            if choice.is_stopped:
                self._finish(choice, FinishReason.STOP)

    def serve(self, model: ServedModel) -> None:
        """Begins on this model, now that it is in memory; told if it is not that of the record."""
        self._model = model
        before = self.served
        self.served = ServedAs(model.system_fingerprint, model.setup)
        self._is_served_untold = self.served != before

    def recover(self, at_ms: int) -> None:
        """Says that there is no engine now; the next one's queue is reported from the start."""
        self.num_recoveries += 1
        self.beats.add(Beat("recovering", "data", self.num_recoveries), at_ms)
        self.queue = QueueProgress()

    def take(
        self,
        index: int,
        item: Started | PromptAdvance | PromptLogprobs | NewToken | Finished,
        at_ms: int,
    ) -> bool:
        """Whether the choice has just been ended by a stop string, which the engine cannot see."""
        choice = self._choices[index]
        if choice.end is not None:
            return False
        self._heard.add(index)
        self._note_begun(index)
        if isinstance(item, NewToken):
            return not choice.is_stopped and self._feed(choice, item)
        match item:
            case Started(_, total, cached):
                self.queue.move(None)
                self._progress[choice.prompt].start(choice, total, cached, at_ms)
                self._advanced.add(choice.prompt)
            case PromptAdvance(_, processed):
                self._progress[choice.prompt].advance(choice, processed)
                self._advanced.add(choice.prompt)
            case PromptLogprobs() if self._echo:
                self._echo.add(choice.prompt, item)
            case Finished():
                if item.finish is not FinishReason.CANCELLED:
                    self._begin(choice)
                self._finish(choice, item.finish)
        return False

    def accepted(self) -> events.Accepted:
        """The first event."""
        record = self._record
        request = record.request
        accepted = events.Accepted(
            seq=0,
            at_ms=0,
            id=record.id,
            route=request.route,
            model=request.model,
            created=record.created,
            mode=record.mode,
            prompt_tokens=record.num_prompt_tokens,
            n=request.n,
            seed=request.sampling.seed,
            durable=record.is_durable,
        )
        self._count(accepted)
        return accepted

    def new_events(self, at_ms: int, is_cut: bool) -> Sequence[AnyEvent]:
        """The events since the last call; after a cut no token follows."""
        made: list[AnyEvent] = []
        for beat in self.beats.new:
            fields = msgspec.structs.asdict(beat)
            self._add(made, events.Heartbeat(seq=self._next_seq, at_ms=at_ms, **fields))
        self.beats.new.clear()
        if self.served and self._is_served_untold:
            self._is_served_untold = False
            now = events.Served(
                seq=self._next_seq,
                at_ms=at_ms,
                system_fingerprint=self.served.fingerprint,
                served=self.served.setup,
            )
            self._add(made, now)
        self._add(made, self.queue.take(self._next_seq, at_ms))
        for prompt in sorted(self._advanced):
            progress = self._progress[prompt]
            self._add(made, progress.take(self._next_seq, at_ms))
            if not progress.has_news:
                self._advanced.discard(prompt)
        for index in sorted(self._heard) if not is_cut else ():
            self._add(made, self._choices[index].take(self._next_seq, at_ms))
        self._heard.clear()
        return made

    def terminal(self, at_ms: int, cut: RequestError | None) -> AnyEvent:
        seq = self._next_seq
        if cut is not None:
            return to_event(cut, seq, at_ms)
        return events.Finish(
            seq=seq,
            at_ms=at_ms,
            ends=tuple(choice.end for choice in self._choices if choice.end),
            usage=self.tally.usage,
            timings=self.tally.timings,
            ingestion=self._ingestion()
            if self._record.request.response_options.return_ingestion
            else UNSET,
        )

    def _ingestion(self) -> Ingestion:
        return describe(
            self._record, self._model.ready, self.tally.usage, [p.chunks for p in self._progress]
        )

    def replay(self, logged: Sequence[AnyEvent]) -> RequestError | None:
        """Returns to the state in which these events had been written.

        The error, if the tokens no longer make the text that was delivered.
        """
        is_same = True
        for event in logged:
            self._count(event)  # to the last one, for a terminal event has to follow them
            if isinstance(event, events.Heartbeat):
                self.num_recoveries = event.attempt or self.num_recoveries
            elif isinstance(event, events.Served):
                self.served = ServedAs(event.system_fingerprint, event.served)
            elif isinstance(event, events.Progress):
                self._note_begun(event.choice)
                self._progress[event.choice // self._record.request.n].resume(event)
            elif isinstance(event, events.Tokens):
                is_same &= self._replay_tokens(event)
        self.end_stopped()
        return None if is_same else RequestError("resume_mismatch", _MISMATCH)

    def _replay_tokens(self, event: events.Tokens) -> bool:
        choice = self._choices[event.choice]
        self._note_begun(event.choice)
        if event.pieces or event.ids:
            self._begin(choice)
            self.has_tokens = True
        self.num_live -= event.end is not None
        return choice.replay(event)

    def _feed(self, choice: ChoiceWriter, token: NewToken) -> bool:
        self._begin(choice)
        choice.feed(token)
        self.has_tokens = True
        return choice.is_stopped

    def _finish(self, choice: ChoiceWriter, finish: FinishReason) -> None:
        self._heard.add(choice.index)
        self._note_begun(choice.index)
        self.num_live -= 1
        choice.finish(finish)

    def _begin(self, choice: ChoiceWriter) -> None:
        if self._echo:
            self._echo.begin(choice)

    def _add(self, made: list[AnyEvent], event: AnyEvent | None) -> None:
        if event is not None:
            self._count(event)
            made.append(event)

    def _count(self, event: AnyEvent) -> None:
        self.tally.feed(event)
        self._next_seq, self.last_ms = event.seq + 1, event.at_ms


class Heartbeats:
    """The heartbeats of a log, one for all readers: who asks within half an interval means it.

    `new` ones are those that no event has told yet.
    """

    def __init__(self) -> None:
        self.new: list[Beat] = []
        self._at_ms: dict[str, float] = {}  # when the last of each form was taken up

    def wants(self, form: str, interval_s: float, at_ms: int) -> bool:
        """Whether another one is to be added, which is then on its way."""
        if at_ms - self._at_ms.get(form, -math.inf) < 500 * interval_s:
            return False
        self._at_ms[form] = math.inf
        return True

    def add(self, beat: Beat, at_ms: int) -> None:
        self.new.append(beat)
        self._at_ms[beat.form] = at_ms


class QueueProgress:
    """The queued events: at once, then when the place has changed, at most once a second."""

    def __init__(self) -> None:
        self._place: InQueue | None = None
        self._told: InQueue | None = None
        self._due_ms = 0

    def move(self, place: InQueue | None) -> None:
        """A new place; None once the sequence has left the queue."""
        self._place = place

    def wants(self, place: InQueue, at_ms: int) -> bool:
        """Whether this place would be told now."""
        is_told = self._told is not None and self._told.position == place.position
        return not is_told and at_ms >= self._due_ms

    def take(self, seq: int, at_ms: int) -> events.Queued | None:
        """The event that is due, if any."""
        place = self._place
        if place is None or not self.wants(place, at_ms):
            return None
        self._told, self._due_ms = place, at_ms + _QUEUE_INTERVAL_MS
        return events.Queued(seq=seq, at_ms=at_ms, **msgspec.structs.asdict(place))


class PromptProgress:
    """The progress events of one prompt: those of its first choice, never going back."""

    def __init__(self, choice: int, tells_chunks: bool = False) -> None:
        self.chunks = NO_CHUNKS
        self._choice, self._tells_chunks = choice, tells_chunks
        self._total = self.num_cached = 0
        self._processed = self._told = -1
        self._began_ms = 0
        self._num_told = self._due_ms = 0

    @property
    def num_processed(self) -> int:
        return max(self._processed, 0)

    @property
    def has_news(self) -> bool:
        """Whether something is untold, due or not."""
        return self._processed != self._told

    def start(self, choice: ChoiceWriter, total: int, cached: int, at_ms: int) -> None:
        if choice.index == self._choice and self._processed < 0:
            self._total, self.num_cached, self._processed = total, cached, cached
            self._began_ms = at_ms

    def advance(self, choice: ChoiceWriter, processed: int) -> None:
        processed = min(processed, self._total)
        if choice.index == self._choice and processed > self._processed:
            self.chunks = self.chunks.with_one(processed - max(self._processed, 0))
            self._processed = processed

    def resume(self, told: events.Progress) -> None:
        """Goes on behind an event that was told in an earlier life."""
        self._total, self.num_cached = told.total, told.cache
        self._processed = self._told = told.processed
        self._began_ms = told.at_ms - told.time_ms
        if not isinstance(told.chunks, UnsetType):
            self.chunks = ChunkCount(*told.chunks)

    def take(self, seq: int, at_ms: int) -> events.Progress | None:
        """The event that is due, if any."""
        is_last = self._processed == self._total
        if self._processed == self._told or (at_ms < self._due_ms and not is_last):
            return None
        self._told = self._processed
        self._num_told += 1
        if self._num_told >= _NUM_UNTHROTTLED:
            self._due_ms = at_ms + _INTERVAL_MS
        return events.Progress(
            seq=seq,
            at_ms=at_ms,
            choice=self._choice,
            total=self._total,
            cache=self.num_cached,
            processed=self._processed,
            time_ms=at_ms - self._began_ms,
            chunks=self.chunks if self._tells_chunks else UNSET,
        )


def to_event(error: RequestError, seq: int, at_ms: int) -> events.Error:
    """The terminal event of a stream that this error cuts."""
    return events.Error(
        seq=seq,
        at_ms=at_ms,
        code=error.code,
        type=error.kind.type,
        message=error.message,
        status=error.kind.status,
        retryable=error.kind.retry,
    )
