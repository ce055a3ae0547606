"""An answer taken apart into channels: content, reasoning, tool calls; pure, text in, pieces out.

A marker counts by its token where the model has one for it, so that text which merely reads like
a marker stays text; where it has none, by its text. White space beside a marker belongs to it.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

from headrace.text.harmony import CHANNEL, HarmonySplitter
from headrace.text.tool_formats.format import CallBody, CallDelta, IsText, ToolFormat
from headrace.text.tool_formats.table import format_of
from headrace_common.pieces import CONTENT, REASONING, TOOL, ChannelPiece
from headrace_common.request import Channels


class Splitter(Protocol):
    """Takes the text of an answer in any pieces, and its markers one by one."""

    def feed(self, text: str) -> list[ChannelPiece]: ...

    def mark(self, marker: str) -> list[ChannelPiece]:
        """A marker that came as a token."""

    def flush(self) -> list[ChannelPiece]:
        """Returns the text that was held back, once the answer has ended."""

    @property
    def num_held(self) -> int:
        """Characters that were fed and not yet placed."""

    @property
    def num_calls(self) -> int:
        """Tool calls so far."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the next text is reasoning."""


class Splitting(NamedTuple):
    """How the text of one choice is split; `markers` are those that are tokens, by id."""

    splitter: Splitter | None = None
    markers: Mapping[int, str] = {}


PLAIN = Splitting()


class TagSplitter:
    """Reasoning and tool calls between tags."""

    def __init__(
        self,
        tags: tuple[str, str] | None,
        tools: ToolFormat | None,
        tokens: Iterable[str] = (),
        is_text: IsText = lambda name, parameter: False,
        starts_in: str = CONTENT,
    ) -> None:
        """`tags` enclose reasoning; `tokens` are the markers that the model has tokens for."""
        self._reasoning = tags
        self._tools = tools
        self._tokens = frozenset(tokens)
        self._is_text = is_text
        self.is_reasoning = starts_in == REASONING
        self._held = ""
        self._is_after_marker = starts_in == REASONING
        self._has_content = False
        self._body: CallBody | None = None
        self._raw = ""  # all that the body was given: what it owes if it finds no call
        self._call = -1  # the last call
        self._num_calls_before = -1  # when the body began
        # Text without these characters cannot begin a marker in this channel.
        self._content_openers = self._first_characters(tools.starts if tools else ())
        self._reasoning_openers = self._first_characters(tags[1:] if tags else ())

    def _first_characters(self, markers: Iterable[str]) -> frozenset[str]:
        """Return the first characters of those markers that count by their text."""
        return frozenset(marker[0] for marker in markers if marker not in self._tokens)

    @property
    def num_held(self) -> int:
        is_open = self._body is not None and self._call == self._num_calls_before
        return len(self._held) + (len(self._raw) if is_open else 0)

    @property
    def num_calls(self) -> int:
        return self._call + 1

    def feed(self, text: str) -> list[ChannelPiece]:
        # Most text of an answer is far from any marker, and is placed as it comes. White space at
        # its end could belong to a marker that follows.
        if (
            (self._has_content or self.is_reasoning)
            and not (self._held or self._is_after_marker or self._body is not None)
            and text
            and not text[-1].isspace()
        ):
            openers = self._reasoning_openers if self.is_reasoning else self._content_openers
            if openers.isdisjoint(text):
                return [ChannelPiece(text, REASONING if self.is_reasoning else CONTENT)]
        pieces: list[ChannelPiece] = []
        while text:
            text = self._advance(text, pieces)
        return pieces

    def mark(self, marker: str) -> list[ChannelPiece]:
        pieces: list[ChannelPiece] = []
        if self._body is not None:
            return self.feed(marker)
        if marker in self._markers(self._held + marker):
            own = self._take_marker(marker, pieces)
            pieces += self.feed(own)
        else:
            pieces += self._release()
            self._put(marker, pieces)
        return pieces

    def flush(self) -> list[ChannelPiece]:
        pieces: list[ChannelPiece] = []
        while self._body is not None:
            self._give(self._body.flush(), pieces)
            pieces += self.feed(self._close_body(pieces))
        held, self._held = self._held, ""
        if not (self._is_after_marker and held.isspace()):
            self._put(held, pieces)
        return pieces

    def _advance(self, text: str, pieces: list[ChannelPiece]) -> str:
        """Places the beginning of the text, and returns the rest."""
        if self._body is not None:
            self._raw += text
            self._give(self._body.feed(text), pieces)
            if self._body.rest is None:
                return ""
            return self._close_body(pieces)
        text, self._held = self._held + text, ""
        if self._leads(text):
            self._open_body(text[: len(text) - len(text.lstrip())])
            return text.lstrip()
        all_markers = self._markers(text)
        markers = [marker for marker in all_markers if marker not in self._tokens]
        place, marker = _first_of(markers, text)
        if marker:
            self._held = text[:place]
            own = self._take_marker(marker, pieces)
            return own + text[place + len(marker) :]
        kept = _kept(markers, text) if all_markers else 0
        if self._is_after_marker and not text.strip():
            kept = len(text)
        self._put(text[: len(text) - kept], pieces)
        self._held = text[len(text) - kept :]
        return ""

    def _markers(self, text: str) -> tuple[str, ...]:
        """The markers that count in this text, which is not placed yet."""
        if self.is_reasoning:
            return self._reasoning[1:] if self._reasoning else ()
        found: tuple[str, ...] = ()
        if self._reasoning and not self._has_content:  # only an answer's beginning is reasoning
            start, ahead = self._reasoning[0], text.lstrip()
            found = (start,) if ahead.startswith(start) or start.startswith(ahead) else ()
        return found + (self._tools.starts if self._tools else ())

    def _leads(self, text: str) -> bool:
        leads = self._tools.leads if self._tools else ""
        first = text.lstrip()[:1]
        is_start = not (self.is_reasoning or self._has_content)
        return bool(first) and first in leads and is_start

    def _take_marker(self, marker: str, pieces: list[ChannelPiece]) -> str:
        """Returns the marker if it belongs to the body that it opens."""
        text, space = self._held.rstrip(), self._held[len(self._held.rstrip()) :]
        self._put(text, pieces)
        self._held = ""
        if self._tools and marker in self._tools.starts and not self.is_reasoning:
            own = marker if marker in self._tools.kept else ""
            self._open_body(space + marker.removesuffix(own))
            return own
        self._is_after_marker = True
        self.is_reasoning = not self.is_reasoning
        return ""

    def _open_body(self, raw: str) -> None:
        assert self._tools
        self._body, self._raw = self._tools.make(self._is_text), raw
        self._num_calls_before = self._call

    def _close_body(self, pieces: list[ChannelPiece]) -> str:
        """Returns the text that the body did not take; without a call, its beginning is content."""
        assert self._body
        rest, self._body = self._body.rest or "", None
        raw, self._raw = self._raw, ""
        if self._call > self._num_calls_before:
            self._is_after_marker = True
            return rest
        start = max(len(raw) - len(rest), len(raw) - len(raw.lstrip()) + 1)
        self._put(raw[:start], pieces)
        return raw[start:]

    def _give(self, found: list[CallDelta], pieces: list[ChannelPiece]) -> None:
        for name, arguments in found:
            self._call += bool(name)
            pieces.append(ChannelPiece(arguments, TOOL, self._call, name))

    def _release(self) -> list[ChannelPiece]:
        pieces: list[ChannelPiece] = []
        held, self._held = self._held, ""
        self._put(held, pieces)
        return pieces

    def _put(self, text: str, pieces: list[ChannelPiece]) -> None:
        if self._is_after_marker:
            text = text.lstrip()
        if text:
            self._is_after_marker = False
            self._has_content = self._has_content or not self.is_reasoning
            pieces.append(ChannelPiece(text, REASONING if self.is_reasoning else CONTENT))


def _first_of(markers: list[str], text: str) -> tuple[int, str]:
    """Where the first marker begins, and which it is."""
    found = [(place, marker) for marker in markers if (place := text.find(marker)) >= 0]
    return min(found, default=(-1, ""))


def _kept(markers: list[str], text: str) -> int:
    """Characters at the end that may belong to a marker: its beginning, white space before it."""
    longest = max((_overlap(marker, text) for marker in markers), default=0)
    before = text[: len(text) - longest]
    return longest + len(before) - len(before.rstrip())


def _overlap(marker: str, text: str) -> int:
    """How much of the beginning of `marker` the text ends with."""
    return next(
        (n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0
    )


REASONING_TAGS: Mapping[str, tuple[str, str]] = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
}
HARMONY = "harmony"


def reasoning_format(template: str) -> str:
    """The format that a chat template speaks of; "" if none."""
    if CHANNEL in template:
        return HARMONY
    return next((name for name, tags in REASONING_TAGS.items() if tags[1] in template), "")


def make_splitting(
    channels: Channels, tail: str, token_id: Callable[[str], int | None]
) -> Splitting:
    """The splitting of an answer to a prompt that ends in `tail`, which may open reasoning."""
    if channels.reasoning == HARMONY:
        return Splitting(HarmonySplitter(), _ids_of(HarmonySplitter.MARKERS, token_id))
    tags = REASONING_TAGS.get(channels.reasoning)
    tools = format_of(channels.tools) if channels.tools else None
    if tags is None and tools is None:
        return PLAIN
    markers = _ids_of([*(tags or ()), *(tools.starts + tools.ends if tools else ())], token_id)
    is_open = tags is not None and tail.rstrip().endswith(tags[0])
    texts = channels.text_parameters
    splitter = TagSplitter(
        tags,
        tools,
        markers.values(),
        lambda name, parameter: parameter in texts.get(name, ()),
        REASONING if is_open else CONTENT,
    )
    return Splitting(splitter, markers)


def _ids_of(markers: Iterable[str], token_id: Callable[[str], int | None]) -> dict[int, str]:
    found = ((token_id(marker), marker) for marker in markers)
    return {id: marker for id, marker in found if id is not None}
