"""Builds the next events of one stream from the results of the stream's choices, without I/O."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from msgspec import UNSET

from headrace.fleet.engine_users import Item
from headrace.fleet.served_model import ServedModel
from headrace.generation.choice import ChoiceWriter, Echo
from headrace.generation.prompt_report import describe
from headrace.generation.wait_news import HeartbeatNews, Heartbeats, PromptProgress, QueueProgress
from headrace.streams import events
from headrace.streams.events import AnyEvent
from headrace.streams.record import Record, ServedSetup
from headrace.streams.usage import UsageCounter, UsageObserver
from headrace_common.errors import RequestError
from headrace_common.ingestion import Ingestion
from headrace_common.messages import (
    Finished,
    FinishReason,
    Guessed,
    NewToken,
    PromptAdvance,
    PromptLogprobs,
    Started,
)

_MISMATCH = "The stored tokens no longer decode to the stored text; send the request again."


class ChoiceProgress(msgspec.Struct, frozen=True):
    """Progress of a started choice, in tokens. `num_left` is None if the answer has no token
    limit.
    """

    choice: int
    num_prompt: int
    num_processed: int
    num_cached: int
    num_decoded: int
    num_left: int | None


class OriginalModel(NamedTuple):
    """The fingerprint and the serving setup of the model that a stream started on."""

    fingerprint: str
    setup: ServedSetup


class CurrentModel:
    """The model that generates the answer: the admitting model or a later replacement.

    `known` is None until the model is loaded for the first time. `is_unreported` is true if no
    event in the log reports the latest change of `known`.
    """

    def __init__(self, record: Record, model: ServedModel) -> None:
        self.model = model
        as_admitted = OriginalModel(record.system_fingerprint, record.served)
        self.known = as_admitted if record.system_fingerprint else None
        self.is_unreported = False

    def begin(self, model: ServedModel) -> None:
        """Continue with this newly loaded model."""
        before, self.model = self.known, model
        self.known = OriginalModel(model.system_fingerprint, model.setup)
        self.is_unreported = self.known != before

    def take(self, seq: int, at_ms: int) -> events.Served:
        """Return the event that announces the model."""
        assert self.known is not None
        self.is_unreported = False
        fingerprint, served = self.known
        return events.Served(seq=seq, at_ms=at_ms, system_fingerprint=fingerprint, served=served)


class EventBuilder:
    """Turns the engine's results into events, in the same order and numbered without gaps.

    `watch` observes only new events, because replayed events were counted when they were new.
    """

    def __init__(
        self, record: Record, model: ServedModel, watch: UsageObserver | None = None
    ) -> None:
        # `next_seq` is the number of the next event, `last_ms` the time of the last event.
        self.next_seq = self.last_ms = 0
        # The time of the last event that is not a heartbeat.
        self.news_ms = 0
        self.tally = UsageCounter()
        self._watch = watch
        # The number of prompt tokens in prompts that the engine has not started.
        self.num_unread = record.num_prompt_tokens
        self._started_prompts: set[int] = set()
        self.serving = CurrentModel(record, model)
        self._record = record
        request = record.request
        self._choices = [ChoiceWriter(i, record, model) for i in range(request.num_choices)]
        # The number of choices that the engine has not started.
        self.num_waiting = len(self._choices)
        self._echo = Echo(record, model.tokenizer) if request.echo else None
        self._progress = [
            PromptProgress(n * request.n, request.response_options.return_ingestion)
            for n in range(len(request.prompts))
        ]
        self.queue = QueueProgress()
        self.beats = Heartbeats()
        self.num_recoveries = 0
        # The number of choices that have not ended.
        self.num_live = len(self._choices)
        self.has_tokens = False
        # Indexes of the choices with results since the last call of `new_events`. The next call
        # looks only at these choices.
        self._changed: set[int] = set()
        # Indexes of the prompts with progress that no event reports yet.
        self._advanced: set[int] = set()

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of the longest unfinished choice, prompt included."""
        return max((choice.num_tokens for choice in self.live()), default=0)

    @property
    def has_begun(self) -> bool:
        """Return whether the engine has started any choice, even if the choice has ended since."""
        return self.num_waiting < len(self._choices)

    def live(self) -> list[ChoiceWriter]:
        return [choice for choice in self._choices if choice.end is None]

    def choice_progress(self) -> list[ChoiceProgress]:
        """Return the progress of each choice that has started and not ended."""
        limit = self._record.request.sampling.max_tokens
        shown = []
        for choice in self.live() if self.has_begun else ():
            if choice.has_begun:
                progress = self._progress[choice.prompt]
                num_decoded = choice.num_tokens - choice.num_prompt
                num_left = None if limit is None else limit - num_decoded
                processed, cached = progress.num_processed, progress.num_cached
                figures = (choice.num_prompt, processed, cached, num_decoded, num_left)
                shown.append(ChoiceProgress(choice.index, *figures))
        return shown

    def is_cut_short(self, index: int, context: int) -> bool:
        """Return whether a full context of this size is the only reason why this choice must
        end.
        """
        return self._choices[index].is_cut_short(context)

    def end_stopped(self) -> None:
        """End the choices that a stop string or an end token has stopped; do not wait for the
        engine.
        """
        for choice in self.live():
            if choice.is_stopped:
                self._finish(choice, FinishReason.STOP)

    def recover(self, at_ms: int) -> None:
        """Report the loss of the engine in a heartbeat, and restart the reports of the queue
        position.
        """
        self.num_recoveries += 1
        self.beats.add(HeartbeatNews("recovering", "data", self.num_recoveries), at_ms)
        self.queue = QueueProgress()

    def take(self, index: int, item: Item, at_ms: int) -> bool:
        """Add a result of the engine to its choice; return whether the result stopped the choice.

        The engine does not know stop strings, so the caller must end the sequence of a stopped
        choice.
        """
        choice = self._choices[index]
        if choice.end is not None:
            return False
        self._changed.add(index)
        if isinstance(item, NewToken):
            if not choice.has_text:
                self.has_tokens = True
                self._begin_text(choice)
            if choice.is_stopped:
                return False
            choice.feed(item.token_id, item.logprobs, item.state)
            return choice.is_stopped
        self._begin(choice)
        match item:
            case Started(_, total, cached):
                self.queue.move_to(None)
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
        """Return the first event."""
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
        """Return the events since the last call; leave out Tokens events if the stream was cut."""
        made: list[AnyEvent] = []
        for beat in self.beats.new:
            fields = msgspec.structs.asdict(beat)
            self._append(made, events.Heartbeat(seq=self.next_seq, at_ms=at_ms, **fields))
        self.beats.new.clear()
        if self.serving.is_unreported:
            self._append(made, self.serving.take(self.next_seq, at_ms))
        if self.queue.place is not None:
            self._append(made, self.queue.take(self.next_seq, at_ms))
        for prompt in sorted(self._advanced):
            progress = self._progress[prompt]
            self._append(made, progress.take(self.next_seq, at_ms))
            if not progress.has_news:
                self._advanced.discard(prompt)
        for index in sorted(self._changed) if not is_cut else ():
            event = self._choices[index].take(self.next_seq, at_ms)
            # Most events are Tokens events, so Tokens events are counted here without a call of
            # `_append`.
            if event is not None:
                self.tally.feed(event, self._watch)
                self.next_seq += 1
                self.last_ms = self.news_ms = at_ms
                made.append(event)
        self._changed.clear()
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
        """Describe how the prompts have been processed so far."""
        chunks, usage = [p.chunks for p in self._progress], self.tally.usage
        return describe(self._record, self.serving.model.ready, usage, chunks)

    def replay(self, logged: Sequence[AnyEvent]) -> RequestError | None:
        """Restore the state that the stream had after these events.

        Returns an error if the tokens no longer decode to the delivered text.
        """
        is_same = True
        for event in logged:
            # Count every event, even after a mismatch, because the terminal event needs the next
            # number.
            self._count(event)
            if isinstance(event, events.Heartbeat):
                self.num_recoveries = event.attempt or self.num_recoveries
            elif isinstance(event, events.Served):
                self.serving.known = OriginalModel(event.system_fingerprint, event.served)
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
        self._changed.add(choice.index)
        self._begin(choice)
        self.num_live -= 1
        choice.finish(finish)

    def _begin(self, choice: ChoiceWriter) -> None:
        """Count a choice as started.

        The first started choice of a prompt also counts the prompt as started.
        """
        if choice.has_begun:
            return
        choice.begin()
        self.num_waiting -= 1
        if choice.prompt not in self._started_prompts:
            self._started_prompts.add(choice.prompt)
            self.num_unread -= choice.num_prompt

    def _begin_text(self, choice: ChoiceWriter) -> None:
        """Start the text of a choice, with the prompt's text first if the request asks for an
        echo.
        """
        self._begin(choice)
        if self._echo and not choice.has_text:
            self._echo.begin(choice)
        choice.begin_text()

    def _append(self, made: list[AnyEvent], event: AnyEvent | None) -> None:
        if event is not None:
            self._count(event, self._watch)
            made.append(event)

    def _count(self, event: AnyEvent, watch: UsageObserver | None = None) -> None:
        self.tally.feed(event, watch)
        self.next_seq, self.last_ms = event.seq + 1, event.at_ms
        if not isinstance(event, events.Heartbeat):
            self.news_ms = event.at_ms


def to_event(error: RequestError, seq: int, at_ms: int) -> events.Error:
    """Return the terminal event of a stream that this error cuts."""
    return events.Error(
        seq=seq,
        at_ms=at_ms,
        code=error.code,
        type=error.kind.type,
        message=error.message,
        status=error.kind.status,
        retryable=error.kind.retry,
    )
