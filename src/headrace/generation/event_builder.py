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
    attempt: int | None = None


class EventBuilder:
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
        self._num_recoveries = 0
        self._tally = Tally()
        self._next_seq = 0
        # one step speaks of few choices: only those it spoke of are looked at
        self.num_live = len(self._choices)
        self.has_tokens = False
        self._begun: set[int] = set()  # choices that the engine has begun, ended ones included
        self._heard: set[int] = set()  # choices with something to tell, perhaps
        self._advanced: set[int] = set()  # prompts whose progress is not told yet

    @property
    def num_waiting(self) -> int:
        """Choices that the engine has not begun."""
        return len(self._choices) - len(self._begun)

    @property
    def num_tokens(self) -> int:
        """Prompt and answer so far of the longest choice that has not ended."""
        prompts = self._record.prompts
        return max(
            (len(prompts[one.prompt]) // 4 + one.num_tokens for one in self.live()), default=0
        )

    def is_cut_short(self, index: int, context: int) -> bool:
        """Whether nothing but a context of so many tokens ends this choice."""
        choice, limit = self._choices[index], self._record.request.sampling.max_tokens
        num_prompt = len(self._record.prompts[choice.prompt]) // 4
        is_full = num_prompt + choice.num_tokens >= context
        return is_full and not choice.is_stopped and choice.num_tokens != limit

    def live(self) -> list[Choice]:
        return [choice for choice in self._choices if choice.end is None]

    def end_stopped(self) -> None:
        """Ends the choices whose own tokens say so, without the engine's word."""
        for choice in self.live():
            if choice.is_stopped:
                self._finish(choice, Finish.STOP)

    @property
    def has_begun(self) -> bool:
        """Whether the engine has begun any of it, ended choices included."""
        return bool(self._begun)

    def beat(self, heartbeat: Heartbeat) -> None:
        self._heartbeats.append(heartbeat)

    def recover(self) -> None:
        """Says that there is no engine now; a place in the queue of the next is told anew."""
        self._num_recoveries += 1
        self.beat(Heartbeat("recovering", "data", self._num_recoveries))
        self._queue = QueueProgress()

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
        self._heard.add(index)
        self._begun.add(index)
        match item:
            case Started(_, total, cached):
                self._queue.move(None)
                self._progress[choice.prompt].start(choice, total, cached, at_ms)
                self._advanced.add(choice.prompt)
            case Progress(_, processed):
                self._progress[choice.prompt].advance(choice, processed)
                self._advanced.add(choice.prompt)
            case PromptLogprobs() if self._echo:
                self._echo.add(choice.prompt, item)
            case NewToken() if not choice.is_stopped:
                self._begin(choice)
                choice.feed(item)
                self.has_tokens = True
                return choice.is_stopped
            case Finished():
                if item.finish is not Finish.CANCELLED:
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
        self._count([accepted])
        return accepted

    def new_events(self, at_ms: int, is_cut: bool) -> Sequence[AnyEvent]:
        """What came since the last call; after a cut no token follows."""
        made: list[AnyEvent] = []
        for beat in self._heartbeats:
            seq = self._next_seq + len(made)
            fields = msgspec.structs.asdict(beat)
            made.append(events.Heartbeat(seq=seq, at_ms=at_ms, **fields))
        self._heartbeats.clear()
        if (queued := self._queue.take(self._next_seq + len(made), at_ms)) is not None:
            made.append(queued)
        for prompt in sorted(self._advanced):
            progress = self._progress[prompt]
            if (told := progress.take(self._next_seq + len(made), at_ms)) is not None:
                made.append(told)
            if not progress.has_news:
                self._advanced.discard(prompt)
        for index in sorted(self._heard) if not is_cut else ():
            tokens = self._choices[index].take(self._next_seq + len(made), at_ms)
            if tokens is not None:
                made.append(tokens)
        self._heard.clear()
        self._count(made)
        return made

    def terminal(self, at_ms: int, cut: RequestError | None) -> AnyEvent:
        seq = self._next_seq
        if cut is not None:
            return to_event(cut, seq, at_ms)
        ends = tuple(choice.end for choice in self._choices if choice.end)
        return events.Finish(
            seq=seq, at_ms=at_ms, ends=ends, usage=self._tally.usage, timings=self._tally.timings
        )

    def replay(self, logged: Sequence[AnyEvent]) -> RequestError | None:
        """Comes to the state in which these events had been written.

        The error, if the tokens no longer make the text that was delivered.
        """
        for event in logged:
            if isinstance(event, events.Heartbeat):
                self._num_recoveries = event.attempt or self._num_recoveries
            elif isinstance(event, events.Progress):
                self._begun.add(event.choice)
                self._progress_of(event).resume(event)
            elif isinstance(event, events.Tokens):
                choice = self._choices[event.choice]
                self._begun.add(event.choice)
                if event.pieces or event.ids:
                    self._begin(choice)
                    self.has_tokens = True
                self.num_live -= event.end is not None
                if not choice.replay(event):
                    return RequestError(
                        "resume_mismatch", "The logged tokens no longer give the logged text."
                    )
        self._count(logged)
        self.end_stopped()
        return None

    def _progress_of(self, event: events.Progress) -> PromptProgress:
        return self._progress[event.choice // self._record.request.n]

    def _finish(self, choice: Choice, finish: Finish) -> None:
        self._heard.add(choice.index)
        self._begun.add(choice.index)
        self.num_live -= choice.end is None
        choice.finish(finish)

    def _begin(self, choice: Choice) -> None:
        if self._echo:
            self._echo.begin(choice)

    def _count(self, new: Iterable[AnyEvent]) -> None:
        for event in new:
            self._tally.feed(event)
            self._next_seq, self.last_ms = event.seq + 1, event.at_ms


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
