"""Usage and timings of a stream as a fold over its events: what was counted, and when."""

from headrace.streams.events import Accepted, AnyEvent, Progress, Timings, Tokens, Usage


class Tally:
    """The figures so far. Feed it every event from seq 0, in order."""

    def __init__(self) -> None:
        self._num_prompt = 0
        self._num_cached = 0
        self._planned: set[int] = set()  # the first choice of each prompt that has begun
        self._prompt_ms: tuple[int, int] | None = None  # first and last progress
        self._num_predicted = 0
        self._predicted_ms: tuple[int, int] | None = None  # first and last token
        self._last_token_ms: dict[int, int] = {}  # by choice
        self._max_gap_ms = 0

    def feed(self, event: AnyEvent) -> None:
        match event:
            case Accepted():
                self._num_prompt = event.prompt_tokens
            case Progress():
                if event.choice not in self._planned:
                    self._planned.add(event.choice)
                    self._num_cached += event.cache
                self._prompt_ms = _widen(self._prompt_ms, event.at_ms)
            case Tokens(ids=ids) if ids:
                self._num_predicted += len(ids)
                self._predicted_ms = _widen(self._predicted_ms, event.at_ms)
                before = self._last_token_ms.get(event.choice, event.at_ms)
                self._max_gap_ms = max(self._max_gap_ms, event.at_ms - before)
                self._last_token_ms[event.choice] = event.at_ms

    @property
    def usage(self) -> Usage:
        return Usage(self._num_prompt, self._num_predicted, self._num_cached)

    @property
    def timings(self) -> Timings:
        was_planned = self._prompt_ms is not None
        return Timings(
            cache_n=self._num_cached,
            prompt_n=self._num_prompt - self._num_cached if was_planned else 0,
            prompt_ms=_length(self._prompt_ms),
            predicted_n=self._num_predicted,
            predicted_ms=_length(self._predicted_ms),
            queue_ms=float(self._prompt_ms[0]) if self._prompt_ms else 0.0,
            max_gap_ms=float(self._max_gap_ms),
        )


def _widen(span: tuple[int, int] | None, at_ms: int) -> tuple[int, int]:
    return (span[0] if span else at_ms, at_ms)


def _length(span: tuple[int, int] | None) -> float:
    return float(span[1] - span[0]) if span else 0.0
