"""Usage and timings of a stream as a fold over its events: what was counted, and when."""

from dataclasses import dataclass
from typing import Protocol

from headrace.streams.events import Accepted, AnyEvent, Progress, Timings, Tokens, Usage


@dataclass(slots=True)
class TokenCounts:
    """Tokens of an answer, and of which kind."""

    predicted: int = 0
    reasoning: int = 0
    guessed: int = 0
    accepted: int = 0
    steps: int = 0  # that brought some, counted for each choice


class TallyWatch(Protocol):
    """Hears of a stream's figures as they come; seconds are counted from admission."""

    def planned(self, num_prompt: int, num_cached: int, queue_s: float) -> None:
        """A prompt was begun."""

    def answered(self, seconds: float) -> None:
        """The first token of all came."""

    def tokens(self, number: int, gap_s: float | None) -> None:
        """Tokens of a choice, so long after those before; None: its first."""


class Tally:
    """The figures so far. Feed it every event from seq 0, in order."""

    def __init__(self) -> None:
        self.last_end = ""  # of the choice that ended last
        self._num_prompt = 0
        self._num_cached = 0
        self._planned: set[int] = set()  # the first choice of each prompt that has begun
        self._tokens = TokenCounts()
        # milliseconds of the first and the last progress, and of the first and the last token
        self._planned_at: int | None = None
        self._progress_at = 0
        self._answered_at: int | None = None
        self._token_at = 0
        self._token_at_of: dict[int, int] = {}  # by choice
        self._max_gap_ms = 0

    def feed(self, event: AnyEvent, watch: TallyWatch | None = None) -> None:
        """Count an event, and report its figures to `watch`."""
        if isinstance(event, Tokens):  # most events are
            if event.ids:
                at_ms, gap_s = event.at_ms, None
                if self._answered_at is None:
                    self._answered_at = at_ms
                    if watch is not None:
                        watch.answered(at_ms / 1000)
                if (before := self._token_at_of.get(event.choice)) is not None:
                    gap_ms = at_ms - before
                    gap_s = gap_ms / 1000
                    self._max_gap_ms = max(self._max_gap_ms, gap_ms)
                if watch is not None:
                    watch.tokens(len(event.ids), gap_s)
                self._token_at = self._token_at_of[event.choice] = at_ms
                tokens = self._tokens
                tokens.steps += 1
                tokens.predicted += len(event.ids)
                tokens.reasoning += event.num_reasoning
                tokens.guessed += event.num_guessed
                tokens.accepted += event.num_accepted
            if event.end is not None:
                self.last_end = event.end.finish_reason
        elif isinstance(event, Progress):
            if event.choice not in self._planned:
                self._planned.add(event.choice)
                self._num_cached += event.cache
                if watch is not None:
                    watch.planned(event.total, event.cache, event.at_ms / 1000)
            if self._planned_at is None:
                self._planned_at = event.at_ms
            self._progress_at = event.at_ms
        elif isinstance(event, Accepted):
            self._num_prompt = event.prompt_tokens

    @property
    def first_token_ms(self) -> int | None:
        """Milliseconds from admission to the first token; None while there is none."""
        return self._answered_at

    @property
    def num_steps(self) -> int:
        """Steps that brought tokens, counted for each choice."""
        return self._tokens.steps

    @property
    def usage(self) -> Usage:
        tokens = self._tokens
        return Usage(self._num_prompt, tokens.predicted, self._num_cached, tokens.reasoning)

    @property
    def timings(self) -> Timings:
        planned_at, answered_at = self._planned_at, self._answered_at
        was_planned = planned_at is not None
        return Timings(
            cache_n=self._num_cached,
            prompt_n=self._num_prompt - self._num_cached if was_planned else 0,
            prompt_ms=_length(planned_at, self._progress_at),
            predicted_n=self._tokens.predicted,
            predicted_ms=_length(answered_at, self._token_at),
            queue_ms=float(planned_at or 0),
            max_gap_ms=float(self._max_gap_ms),
            draft_n=self._tokens.guessed,
            draft_n_accepted=self._tokens.accepted,
        )


def _length(first_ms: int | None, last_ms: int) -> float:
    return 0.0 if first_ms is None else float(last_ms - first_ms)
