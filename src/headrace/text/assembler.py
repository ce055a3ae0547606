"""The text of one choice as its tokens arrive: detokenized, stopped, with entries in step.

Owns what is held back; never writes an event.
"""

from collections import deque
from typing import Generic, NamedTuple, TypeVar

from headrace.core.sampling import Sampling
from headrace.text.detokenizer import Detokenizer
from headrace.text.stops import StopMatcher

Entry = TypeVar("Entry")


class Fed(NamedTuple, Generic[Entry]):
    """Text to deliver now, and the entries of the tokens whose last byte it holds.

    `ended`: this token ended the choice and nothing may follow; `stop` is the stop string or the
    stop token that did, None for the model's own end token.
    """

    text: str
    entries: tuple[Entry, ...] = ()
    ended: bool = False
    stop: str | int | None = None


class _Waiting(NamedTuple, Generic[Entry]):
    """The entry of a token whose bytes are in characters [start, end) of the whole text."""

    start: int
    end: int
    entry: Entry


class TextAssembler(Generic[Entry]):
    """Feed it every token of a choice in order, `flush` it if the choice ends in another way.

    An entry is whatever the caller keeps per token, such as its log probabilities. One is
    returned for each token that adds a byte to the delivered text; which ones, and in which
    order, does not depend on how the text was held back.
    """

    def __init__(self, detokenizer: Detokenizer, stops: StopMatcher, sampling: Sampling) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._sampling = sampling
        self._waiting: deque[_Waiting[Entry]] = deque()
        self._num_delivered = 0  # characters
        self.num_tokens = 0

    def feed(self, token_id: int, entry: Entry | None = None) -> Fed[Entry]:
        self.num_tokens += 1
        if self._sampling.ends_with(token_id, self.num_tokens):
            return self._ended_by(token_id)
        text = self._detokenizer.feed(token_id)
        start, end = self._detokenizer.span
        if entry is not None and start < end:
            self._waiting.append(_Waiting(start, end, entry))
        return self._stopped(text)

    def flush(self) -> Fed[Entry]:
        """Everything held back. What an unfinished code point adds can complete a stop string."""
        fed = self._stopped(self._detokenizer.flush())
        if fed.ended:
            return fed
        rest = self._deliver(self._stops.flush())
        return Fed(fed.text + rest.text, fed.entries + rest.entries)

    def _ended_by(self, token_id: int) -> Fed[Entry]:
        rest = self.flush()
        if rest.ended:
            return rest
        stop = token_id if token_id in self._sampling.stop_token_ids else None
        return rest._replace(ended=True, stop=stop)

    def _stopped(self, text: str) -> Fed[Entry]:
        if self.num_tokens <= self._sampling.min_tokens:
            return self._deliver(text)
        shown, stop = self._stops.feed(text)
        fed = self._deliver(shown)
        if stop is None:
            return fed
        cut = tuple(entry for start, _, entry in self._waiting if start < self._num_delivered)
        self._waiting.clear()
        return Fed(fed.text, fed.entries + cut, ended=True, stop=stop)

    def _deliver(self, text: str) -> Fed[Entry]:
        self._num_delivered += len(text)
        ready = []
        while self._waiting and self._waiting[0].end <= self._num_delivered:
            ready.append(self._waiting.popleft().entry)
        return Fed(text, tuple(ready))
