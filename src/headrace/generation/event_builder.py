"""The next events of one stream: what its choices said, numbered and tallied; does no I/O."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from msgspec import UNSET

from headrace.fleet.served_model import ServedModel
from headrace.fleet.tenants import Item
from headrace.generation.choice import ChoiceWriter, Echo
from headrace.generation.prompt_report import describe
from headrace.generation.waits import Beat, Heartbeats, PromptProgress, QueueProgress
from headrace.streams import events
from headrace.streams.events import AnyEvent, Ingestion
from headrace.streams.record import Record, ServedSetup
from headrace.streams.tally import Tally, TallyWatch
from headrace_common.errors import RequestError
from headrace_common.messages import (
    Finished,
    FinishReason,
    Guessed,
    NewToken,
    PromptAdvance,
    PromptLogprobs,
    Started,
)

_MISMATCH = "The logged tokens no longer give the logged text."


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


class Serving:
    """The model that answers: the one on which the stream was admitted, or a later one.

    `known` is None until the model is in memory, where that was not so on admission. `is_untold`:
    it is another one than readers know of.
    """

    def __init__(self, record: Record, model: ServedModel) -> None:
        self.model = model
        as_admitted = ServedAs(record.system_fingerprint, record.served)
        self.known = as_admitted if record.system_fingerprint else None
        self.is_untold = False

    def begin(self, model: ServedModel) -> None:
        """Goes on with this model, now that it is in memory."""
        before, self.model = self.known, model
        self.known = ServedAs(model.system_fingerprint, model.setup)
        self.is_untold = self.known != before

    def take(self, seq: int, at_ms: int) -> events.Served:
        """The event that tells of it."""
        assert self.known is not None
        self.is_untold = False
        fingerprint, served = self.known
        return events.Served(seq=seq, at_ms=at_ms, system_fingerprint=fingerprint, served=served)


class EventBuilder:
    """Takes what the engine says, in order; gives events with gapless numbers.

    `watch` receives the figures of new events; replayed events were counted when they were new.
    """

    def __init__(self, record: Record, model: ServedModel, watch: TallyWatch | None = None) -> None:
        self.next_seq = self.last_ms = 0  # number of the next event, time of the last one
        self.news_ms = 0  # time of the last event that is not a heartbeat
        self.tally = Tally()
        self._watch = watch
        self.num_waiting = record.request.num_choices  # that the engine has not begun
        self.num_unread = record.num_prompt_tokens  # of prompts that it has not begun
        self._begun_prompts: set[int] = set()
        self.serving = Serving(record, model)
        self._record = record
        request = record.request
        self._choices = [ChoiceWriter(i, record, model) for i in range(request.num_choices)]
        self._echo = Echo(record, model.tokenizer) if request.echo else None
        self._progress = [
            PromptProgress(n * request.n, request.response_options.return_ingestion)
            for n in range(len(request.prompts))
        ]
        self.queue = QueueProgress()
        self.beats = Heartbeats()
        self.num_recoveries = 0
        # one step speaks of few choices: only those it spoke of are looked at
        self.num_live = len(self._choices)
        self.has_tokens = False
        self._heard: set[int] = set()  # choices that may have something to tell
        self._advanced: set[int] = set()  # prompts whose progress is not told yet

    @property
    def num_tokens(self) -> int:
        """Prompt and answer so far of the longest choice that has not ended."""
        return max((choice.num_tokens for choice in self.live()), default=0)

    @property
    def has_begun(self) -> bool:
        """Whether the engine has begun any of it, ended choices included."""
        return self.num_waiting < len(self._choices)

    def live(self) -> list[ChoiceWriter]:
        return [choice for choice in self._choices if choice.end is None]

    def standings(self) -> list[Standing]:
        """The standings of the choices that have begun and not ended."""
        limit = self._record.request.sampling.max_tokens
        shown = []
        for choice in self.live() if self.has_begun else ():
            if choice.has_begun:
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

    def recover(self, at_ms: int) -> None:
        """Says that there is no engine now; the next one's queue is reported from the start."""
        self.num_recoveries += 1
        self.beats.add(Beat("recovering", "data", self.num_recoveries), at_ms)
        self.queue = QueueProgress()

    def take(self, index: int, item: Item, at_ms: int) -> bool:
        """Whether the choice has just been ended by a stop string, which the engine cannot see."""
        choice = self._choices[index]
        if choice.end is not None:
            return False
        self._heard.add(index)
        if isinstance(item, NewToken):
            if not choice.has_text:
                self.has_tokens = True
                self._begin_text(choice)
            if choice.is_stopped:
                return False
            choice.feed(item.token_id, item.logprobs)
            return choice.is_stopped
        self._begin(choice)
        match item:
            case Started(_, total, cached):
                self.queue.place = None
                self._progress[choice.prompt].start(choice, total, cached, at_ms)
                self._advanced.add(choice.prompt)
            case PromptAdvance(_, processed):
                self._progress[choice.prompt].advance(choice, processed)
                self._advanced.add(choice.prompt)
            case Guessed():
                choice.count_guessed(item)
            case PromptLogprobs() if self._echo:
                self._echo.add(choice.prompt, item)
            case Finished():
                if item.finish is not FinishReason.CANCELLED:
                    self._begin_text(choice)
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
            model=request.shown_model,
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
            self._add(made, events.Heartbeat(seq=self.next_seq, at_ms=at_ms, **fields))
        self.beats.new.clear()
        if self.serving.is_untold:
            self._add(made, self.serving.take(self.next_seq, at_ms))
        if self.queue.place is not None:
            self._add(made, self.queue.take(self.next_seq, at_ms))
        for prompt in sorted(self._advanced):
            progress = self._progress[prompt]
            self._add(made, progress.take(self.next_seq, at_ms))
            if not progress.has_news:
                self._advanced.discard(prompt)
        for index in sorted(self._heard) if not is_cut else ():
            event = self._choices[index].take(self.next_seq, at_ms)
            if event is not None:  # counted here, without a call: most events are tokens
                self.tally.feed(event, self._watch)
                self.next_seq += 1
                self.last_ms = self.news_ms = at_ms
                made.append(event)
        self._heard.clear()
        return made

    def terminal(self, at_ms: int, cut: RequestError | None) -> AnyEvent:
        seq = self.next_seq
        if cut is not None:
            return to_event(cut, seq, at_ms)
        return events.Finish(
            seq=seq,
            at_ms=at_ms,
            ends=tuple(choice.end for choice in self._choices if choice.end),
            usage=self.tally.usage,
            timings=self.tally.timings,
            ingestion=self.ingestion()
            if self._record.request.response_options.return_ingestion
            else UNSET,
        )

    def ingestion(self) -> Ingestion:
        """How the prompts were computed, as far as they were."""
        chunks, usage = [p.chunks for p in self._progress], self.tally.usage
        return describe(self._record, self.serving.model.ready, usage, chunks)

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
                self.serving.known = ServedAs(event.system_fingerprint, event.served)
            elif isinstance(event, events.Progress):
                self._begin(self._choices[event.choice])
                self._progress[event.choice // self._record.request.n].resume(event)
            elif isinstance(event, events.Tokens):
                is_same &= self._replay_tokens(event)
        self.end_stopped()
        return None if is_same else RequestError("resume_mismatch", _MISMATCH)

    def _replay_tokens(self, event: events.Tokens) -> bool:
        choice = self._choices[event.choice]
        self._begin(choice)
        if event.pieces or event.ids:
            self._begin_text(choice)
            self.has_tokens = True
        self.num_live -= event.end is not None
        return choice.replay(event)

    def _finish(self, choice: ChoiceWriter, finish: FinishReason) -> None:
        self._heard.add(choice.index)
        self._begin(choice)
        self.num_live -= 1
        choice.finish(finish)

    def _begin(self, choice: ChoiceWriter) -> None:
        """Count a choice that the engine has begun; the first choice of a prompt counts both."""
        if choice.has_begun:
            return
        choice.has_begun = True
        self.num_waiting -= 1
        if choice.prompt not in self._begun_prompts:
            self._begun_prompts.add(choice.prompt)
            self.num_unread -= choice.num_prompt

    def _begin_text(self, choice: ChoiceWriter) -> None:
        """Begin the text of a choice, with the prompt if the request asks for its echo."""
        self._begin(choice)
        if self._echo and not choice.has_text:
            self._echo.begin(choice)
        choice.has_text = True

    def _add(self, made: list[AnyEvent], event: AnyEvent | None) -> None:
        if event is not None:
            self._count(event, self._watch)
            made.append(event)

    def _count(self, event: AnyEvent, watch: TallyWatch | None = None) -> None:
        self.tally.feed(event, watch)
        self.next_seq, self.last_ms = event.seq + 1, event.at_ms
        if not isinstance(event, events.Heartbeat):
            self.news_ms = event.at_ms


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
