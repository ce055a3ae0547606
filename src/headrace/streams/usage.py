"""Computes a stream's usage and timings from its events."""

from dataclasses import dataclass
from typing import Protocol

from headrace.streams.events import Accepted, AnyEvent, Progress, Timings, Tokens, Usage


@dataclass(slots=True)
class TokenCounts:
    """Token counts of an answer, by kind."""

    predicted: int = 0
    reasoning: int = 0
    guessed: int = 0
    accepted: int = 0
    # Steps that produced tokens, counted once for each choice.
    steps: int = 0


class UsageObserver(Protocol):
    """Receives a stream's token counts and times when events arrive; `seconds` count from
    admission.
    """

    def planned(self, num_prompt: int, num_cached: int, queue_s: float) -> None:
        """Record that the engine has started on a prompt."""

    def answered(self, seconds: float) -> None:
        """Record that the stream has produced its first token."""

    def tokens(self, number: int, gap_s: float | None) -> None:
        """Record that a choice has produced `number` tokens.

        `gap_s` is the time since the choice's previous tokens, or None for the choice's first
        tokens.
        """


class UsageCounter:
    """Computes the token counts and timings of a stream.

    `feed` must get every event in order, starting with event 0.
    """

    def __init__(self) -> None:
        # The finish reason of the choice that ended last.
        self.last_end = ""
        self._num_prompt = 0
        self._num_cached = 0
        # Choices that have a Progress event; each is the first choice of its prompt.
        self._planned: set[int] = set()
        self._tokens = TokenCounts()
        # Milliseconds from admission to the first and the last Progress event.
        self._planned_at: int | None = None
        self._progress_at = 0
        # Milliseconds from admission to the first and the last token.
        self.first_token_ms: int | None = None
        self._token_at = 0
        # Milliseconds from admission to the last token of each choice.
        self._token_at_of: dict[int, int] = {}
        self._max_gap_ms = 0

    def feed(self, event: AnyEvent, watch: UsageObserver | None = None) -> None:
        """Count an event, and report its tokens and times to `watch`."""
        # Most events are Tokens events, so check for Tokens events first.
        if isinstance(event, Tokens):
            if event.ids:
                at_ms, gap_s = event.at_ms, None
                if self.first_token_ms is None:
                    self.first_token_ms = at_ms
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
    def num_steps(self) -> int:
        """Return the number of steps that produced tokens, counted once for each choice."""
        return self._tokens.steps

    @property
    def usage(self) -> Usage:
        tokens = self._tokens
        return Usage(self._num_prompt, tokens.predicted, self._num_cached, tokens.reasoning)

    @property
    def timings(self) -> Timings:
        planned_at, answered_at = self._planned_at, self.first_token_ms
        was_planned, was_answered = planned_at is not None, answered_at is not None
        return Timings(
            cache_n=self._num_cached,
            prompt_n=self._num_prompt - self._num_cached if was_planned else 0,
            prompt_ms=float(self._progress_at - (planned_at or 0)) if was_planned else 0.0,
            predicted_n=self._tokens.predicted,
            predicted_ms=float(self._token_at - (answered_at or 0)) if was_answered else 0.0,
            queue_ms=float(planned_at or 0),
            max_gap_ms=float(self._max_gap_ms),
            draft_n=self._tokens.guessed,
            draft_n_accepted=self._tokens.accepted,
        )
