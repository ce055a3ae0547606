"""Assembles the text of one choice: detokenizes, splits channels, and finds stop strings.

Text is held back while it may belong to a stop string or a marker.
"""

from collections import deque
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from headrace.text.detokenizer import Detokenizer
from headrace.text.output_splitter import PLAIN, Splitting
from headrace.text.stops import StopMatcher
from headrace_common.pieces import CONTENT, ChannelPiece
from headrace_common.sampling import Sampling

Entry = TypeVar("Entry")


class _Waiting(NamedTuple, Generic[Entry]):
    """The caller's data for a token whose bytes are in characters [start, end) of the whole
    text.
    """

    start: int
    end: int
    entry: Entry


class TextAssembler(Generic[Entry]):
    """Assembles the text of one choice: `feed` every token in order, and `flush` at the end.

    `feed` and `flush` return the pieces to deliver now. Stop strings are searched in content
    only. If a token ends the choice (`has_ended`), no `flush` is needed.

    An entry is the caller's data for a token, such as the token's log probabilities.
    `take_entries` returns each entry once. The entry of a token that adds no byte to the
    delivered text is dropped. Held-back text delays entries, but changes neither the number nor
    the order of the entries.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: StopMatcher,
        sampling: Sampling,
        splitting: Splitting = PLAIN,
    ) -> None:
        # None if all text is content.
        self.splitter = splitting.splitter
        self._markers = splitting.markers
        # True once a token has ended the choice; no further token may be fed.
        self.has_ended = False
        # The stop string or stop token that ended the choice. None if the model's own end token
        # ended the choice.
        self.stop: str | int | None = None
        self._detokenizer = detokenizer
        self._stops = stops
        self._sampling = sampling
        self._waiting: deque[_Waiting[Entry]] = deque()
        # The entries that the next `take_entries` returns.
        self.entries: tuple[Entry, ...] = ()
        self._num_delivered = 0  # characters
        self._num_tokens = 0
        self._ends = frozenset((*sampling.end_token_ids, *sampling.stop_token_ids))
        self._is_plain = not stops.has_stops and sampling.num_logprobs is None

    def feed(self, token_id: int, entry: Entry | None = None) -> Sequence[ChannelPiece]:
        self._num_tokens += 1
        if token_id in self._ends and self._sampling.ends_with(token_id, self._num_tokens):
            return self._end_by(token_id)
        marker = self._markers.get(token_id)
        text = self._detokenizer.feed(token_id)
        if entry is not None:
            start, end = self._detokenizer.span
            if start < end:
                self._waiting.append(_Waiting(start, end, entry))
        # The amount of delivered text matters only to stop strings and entries.
        is_plain = self._is_plain and entry is None
        if self.splitter is None:
            if is_plain:
                return (ChannelPiece(text),) if text else ()
            return self._stopped(text)
        if marker is None:
            pieces = self.splitter.feed(text)
        else:
            pieces = self.splitter.feed(text.removesuffix(marker)) + self.splitter.mark(marker)
        return pieces if is_plain else self._all_stopped(pieces)

    def flush(self) -> tuple[ChannelPiece, ...]:
        """At the end of the choice, return all text that was held back.

        The replacement of an unfinished code point can complete a stop string.
        """
        text = self._detokenizer.flush()
        split = [ChannelPiece(text)] if text else []
        if self.splitter is not None:
            split = self.splitter.feed(text) + self.splitter.flush()
        if self._is_plain and not self._waiting:
            return tuple(split)
        pieces = self._stopped(text) if self.splitter is None else self._all_stopped(split)
        return pieces if self.has_ended else pieces + self._released()

    def take_entries(self) -> tuple[Entry, ...]:
        """Return the entries of tokens whose last byte was delivered since the last call."""
        entries, self.entries = self.entries, ()
        return entries

    def _end_by(self, token_id: int) -> tuple[ChannelPiece, ...]:
        rest = self.flush()
        if not self.has_ended:
            self.has_ended = True
            self.stop = token_id if token_id in self._sampling.stop_token_ids else None
        return rest

    def _all_stopped(self, split: list[ChannelPiece]) -> tuple[ChannelPiece, ...]:
        pieces: tuple[ChannelPiece, ...] = ()
        for piece in split:
            if piece.channel != CONTENT:
                pieces += (*self._released(), piece)
            elif not self.has_ended:
                pieces += self._stopped(piece.text)
        self._settle()
        return pieces

    def _released(self) -> tuple[ChannelPiece, ...]:
        """Deliver text that was held back for a stop string, because the stop string stayed
        incomplete.
        """
        return self._deliver(self._stops.flush())

    def _stopped(self, text: str) -> tuple[ChannelPiece, ...]:
        if self._num_tokens <= self._sampling.min_tokens:
            return self._deliver(text)
        shown, stop = self._stops.feed(text)
        pieces = self._deliver(shown)
        if stop is not None:
            self.has_ended, self.stop = True, stop
            cut = (entry for start, _, entry in self._waiting if start < self._num_delivered)
            self.entries += tuple(cut)
            self._waiting.clear()
        return pieces

    def _deliver(self, text: str) -> tuple[ChannelPiece, ...]:
        if not text:
            return ()
        self._num_delivered += len(text)
        self._take_ready()
        return (ChannelPiece(text),)

    def _settle(self) -> None:
        """Count all text that is not held back as delivered, including markers and other
        channels.
        """
        assert self.splitter
        if not self.has_ended:
            held = self.splitter.num_held + self._stops.num_held
            placed = self._detokenizer.num_chars - held
            self._num_delivered = max(self._num_delivered, placed)
            self._take_ready()

    def _take_ready(self) -> None:
        while self._waiting and self._waiting[0].end <= self._num_delivered:
            self.entries += (self._waiting.popleft().entry,)
