"""The next events of one stream: what its choices said, numbered and tallied; does no I/O."""

from collections.abc import Iterable, Sequence

import msgspec

from headrace.core.errors import RequestError
from headrace.core.messages import (
    Finish,
    Finished,
    NewToken,
    Progress,
    PromptLogprobs,
    Started,
)
from headrace.generation.choice import Choice
from headrace.generation.echo import Echo
from headrace.generation.progress import InQueue, PromptProgress, QueueProgress
from headrace.generation.served import ServedModel
from headrace.streams import events
from headrace.streams.events import AnyEvent
from headrace.streams.record import Record
from headrace.streams.tally import Tally


class Heartbeat(msgspec.Struct, frozen=True):
    """Asks for a heartbeat event."""

    state: str
    form: str


class Draft:
    """Fed in order with what the engine says; gives events with gapless numbers."""

    def __init__(self, record: Record, model: ServedModel) -> None:
        self.last_ms = 0
        self._record = record
        request = record.request
        self._choices = [Choice(i, record, model) for i in range(request.num_choices)]
        self._echo = Echo(record, model.tokenizer) if request.echo else None
        self._progress = [PromptProgress(n * request.n) for n in range(len(request.prompts))]
        self._queue = QueueProgress()
        self._heartbeats: list[Heartbeat] = []
        self._tally = Tally()
        self._next_seq = 0

    @property
    def num_live(self) -> int:
        return sum(choice.end is None for choice in self._choices)

    @property
    def has_tokens(self) -> bool:
        return any(choice.has_tokens for choice in self._choices)

    def live(self) -> list[Choice]:
        return [choice for choice in self._choices if choice.end is None]

    def end_stopped(self) -> None:
        """Ends the choices whose own tokens say so, without the engine's word."""
        for choice in self.live():
            if choice.is_stopped:
                choice.finish(Finish.STOP)

    def beat(self, heartbeat: Heartbeat) -> None:
        self._heartbeats.append(heartbeat)

    def move_in_queue(self, place: InQueue | None) -> None:
        self._queue.move(place)

    def take(
        self,
        index: int,
        item: Started | Progress | PromptLogprobs | NewToken | Finished,
        at_ms: int,
    ) -> bool:
        """Whether the choice has just been ended by a stop string, which the engine cannot see."""
        choice = self._choices[index]
        match item:
            case Started(_, total, cached):
                self._queue.move(None)
                self._progress[choice.prompt].start(choice, total, cached, at_ms)
            case Progress(_, processed):
                self._progress[choice.prompt].advance(choice, processed)
            case PromptLogprobs() if self._echo:
                self._echo.add(choice.prompt, item)
            case NewToken() if not choice.is_stopped:
                self._begin(choice)
                choice.feed(item)
                return choice.is_stopped
            case Finished():
                if item.finish is not Finish.CANCELLED:
                    self._begin(choice)
                choice.finish(item.finish)
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
        self._count([accepted])
        return accepted

    def new_events(self, at_ms: int, is_cut: bool) -> Sequence[AnyEvent]:
        """What came since the last call; after a cut no token follows."""
        made: list[AnyEvent] = []
        for beat in self._heartbeats:
            seq = self._next_seq + len(made)
            made.append(events.Heartbeat(seq=seq, at_ms=at_ms, state=beat.state, form=beat.form))
        self._heartbeats.clear()
        series: list[QueueProgress | PromptProgress] = [self._queue, *self._progress]
        for progress in series:
            if (event := progress.take(self._next_seq + len(made), at_ms)) is not None:
                made.append(event)
        for choice in self._choices if not is_cut else ():
            if (tokens := choice.take(self._next_seq + len(made), at_ms)) is not None:
                made.append(tokens)
        self._count(made)
        return made

    def terminal(self, at_ms: int, cut: RequestError | None) -> AnyEvent:
        seq = self._next_seq
        if cut is not None:
            return events.Error(
                seq=seq,
                at_ms=at_ms,
                code=cut.code,
                type=cut.kind.type,
                message=cut.message,
                status=cut.kind.status,
                retryable=cut.kind.retry,
            )
        ends = tuple(choice.end for choice in self._choices if choice.end)
        return events.Finish(
            seq=seq, at_ms=at_ms, ends=ends, usage=self._tally.usage, timings=self._tally.timings
        )

    def replay(self, logged: Sequence[AnyEvent]) -> RequestError | None:
        """Comes to the state in which these events had been written.

        The error, if the tokens no longer make the text that was delivered.
        """
        for event in logged:
            if isinstance(event, events.Progress):
                self._progress_of(event).resume(event)
            elif isinstance(event, events.Tokens):
                choice = self._choices[event.choice]
                if event.pieces or event.ids:
                    self._begin(choice)
                if not choice.replay(event):
                    return RequestError(
                        "resume_mismatch", "The logged tokens no longer give the logged text."
                    )
        self._count(logged)
        self.end_stopped()
        return None

    def _progress_of(self, event: events.Progress) -> PromptProgress:
        return self._progress[event.choice // self._record.request.n]

    def _begin(self, choice: Choice) -> None:
        if self._echo:
            self._echo.begin(choice)

    def _count(self, new: Iterable[AnyEvent]) -> None:
        for event in new:
            self._tally.feed(event)
            self._next_seq, self.last_ms = event.seq + 1, event.at_ms
