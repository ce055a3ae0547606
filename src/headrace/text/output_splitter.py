"""Splits the text of an answer into the channels content, reasoning and tool calls.

A marker is a text such as <think> between two channels. If the model has a token for a marker,
only this token counts, so that plain text with the same characters remains text. Otherwise the
marker is found by its characters. White space next to a marker belongs to the marker.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

from headrace.text.harmony import CHANNEL, HarmonySplitter
from headrace.text.tool_formats.format import CallBody, CallDelta, StringTypes, ToolFormat
from headrace.text.tool_formats.table import format_of
from headrace_common.pieces import CONTENT, REASONING, TOOL, ChannelPiece
from headrace_common.request import Channels

# After this many texts that began like a call but were not calls, the rest of the answer is text.
# Each of these texts is read again, so the number limits the time if an answer repeats a marker.
_MAX_FAILED = 32


class Splitter(Protocol):
    """Splits an answer; receives the answer's text in pieces of any size, but whole marker
    tokens.
    """

    def feed(self, text: str) -> list[ChannelPiece]: ...

    def mark(self, marker: str) -> list[ChannelPiece]:
        """Handle a marker that the model generated as a token."""

    def flush(self) -> list[ChannelPiece]:
        """At the end of the answer, return the text that was held back."""

    @property
    def num_held(self) -> int:
        """The number of characters that were fed but not returned yet."""

    @property
    def num_calls(self) -> int:
        """The number of tool calls so far."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the next text is reasoning."""


class Splitting(NamedTuple):
    """How the text of a choice is split. `markers` maps token ids to the markers that are
    tokens.
    """

    splitter: Splitter | None = None
    markers: Mapping[int, str] = {}


PLAIN = Splitting()


class TagSplitter:
    """Splits answers with reasoning and tool calls between tags."""

    def __init__(
        self,
        tags: tuple[str, str] | None,
        tools: ToolFormat | None,
        tokens: Iterable[str] = (),
        types: StringTypes = lambda name, parameter: (),
        starts_in: str = CONTENT,
        label: str = "",
    ) -> None:
        """`tags` enclose reasoning; `tokens` are the markers for which the model has tokens.

        `label` is a word that may follow the first tag; it is not part of the reasoning.
        """
        self._reasoning = tags
        # The label, until the start of the reasoning has been compared with it; then "".
        self._label = label
        self._tools = tools
        self._tokens = frozenset(tokens)
        self._types = types
        self.is_reasoning = starts_in == REASONING
        self._held = ""
        self._is_after_marker = starts_in == REASONING
        self._has_content = False
        self._body: CallBody | None = None
        # The text of the current body, the part with tool calls. The text becomes content if the
        # body has no call.
        self._raw = ""
        # The index of the last call; -1 before the first call.
        self._call = -1
        # The value of `_call` when the body began.
        self._num_calls_before = -1
        self._num_failed = 0
        # In content or in reasoning, text without these characters cannot begin a marker.
        self._content_openers = self._first_characters(tools.starts if tools else ())
        self._reasoning_openers = self._first_characters(tags[1:] if tags else ())

    def _first_characters(self, markers: Iterable[str]) -> frozenset[str]:
        """Return the first characters of the markers that are not tokens."""
        return frozenset(marker[0] for marker in markers if marker not in self._tokens)

    @property
    def num_held(self) -> int:
        is_open = self._body is not None and self._call == self._num_calls_before
        return len(self._held) + (len(self._raw) if is_open else 0)

    @property
    def num_calls(self) -> int:
        return self._call + 1

    def feed(self, text: str) -> list[ChannelPiece]:
        # Most text of an answer contains no marker and passes unchanged. White space at the end
        # of a text may belong to the next marker, so a text that ends with white space takes the
        # slow path.
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
            self._emit(marker, pieces)
        return pieces

    def flush(self) -> list[ChannelPiece]:
        pieces: list[ChannelPiece] = []
        while self._body is not None:
            self._emit_calls(self._body.flush(), pieces)
            pieces += self.feed(self._close_body(pieces))
        held, self._held = self._held, ""
        if not (self._is_after_marker and held.isspace()):
            self._emit(held, pieces)
        return pieces

    def _advance(self, text: str, pieces: list[ChannelPiece]) -> str:
        """Process the start of the text; return the rest, which must still be processed.

        There are four cases. Inside a body of tool calls, all text goes to the body's parser
        until the parser reports the end. At the start of an answer, some characters (such as a
        brace) open a body without a marker. The first marker in the text ends the channel before
        the marker. Text without a marker is content or reasoning, but a tail that may begin a
        marker is held back.
        """
        if self._body is not None:
            self._raw += text
            self._emit_calls(self._body.feed(text), pieces)
            if self._body.rest is None:
                return ""
            return self._close_body(pieces)
        text, self._held = self._held + text, ""
        if self._opens_body(text):
            self._open_body(text[: len(text) - len(text.lstrip())])
            return text.lstrip()
        all_markers = self._markers(text)
        markers = [marker for marker in all_markers if marker not in self._tokens]
        index, marker = _first_of(markers, text)
        if marker:
            self._held = text[:index]
            own = self._take_marker(marker, pieces)
            return own + text[index + len(marker) :]
        num_kept = _num_held_back(markers, text) if all_markers else 0
        if self._is_after_marker and (not text.strip() or self._begins_label(text)):
            num_kept = len(text)
        self._emit(text[: len(text) - num_kept], pieces)
        self._held = text[len(text) - num_kept :]
        return ""

    def _markers(self, text: str) -> tuple[str, ...]:
        """Return the markers that count for this text in the current channel."""
        if self.is_reasoning:
            return self._reasoning[1:] if self._reasoning else ()
        found: tuple[str, ...] = ()
        # Reasoning can only be at the start of an answer.
        if self._reasoning and not self._has_content:
            start, ahead = self._reasoning[0], text.lstrip()
            found = (start,) if ahead.startswith(start) or start.startswith(ahead) else ()
        if self._tools and self._num_failed < _MAX_FAILED:
            found += self._tools.starts
        return found

    def _opens_body(self, text: str) -> bool:
        leads = self._tools.leads if self._tools else ""
        first = text.lstrip()[:1]
        is_start = not (self.is_reasoning or self._has_content)
        return bool(first) and first in leads and is_start

    def _take_marker(self, marker: str, pieces: list[ChannelPiece]) -> str:
        """Emit the text before a marker, then begin a tool call or switch reasoning on or off.

        Returns the marker if the parser of the tool call must read it, too, otherwise "".
        """
        text, space = self._held.rstrip(), self._held[len(self._held.rstrip()) :]
        self._emit(text, pieces)
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
        self._body, self._raw = self._tools.make(self._types), raw
        self._num_calls_before = self._call

    def _close_body(self, pieces: list[ChannelPiece]) -> str:
        """End the body, and return the text that must still be processed.

        After a body with calls, this is the text after the body. After a body without calls, the
        start of the body's text is content, and the rest of the body's text is processed again.
        """
        assert self._body
        rest, self._body = self._body.rest or "", None
        raw, self._raw = self._raw, ""
        if self._call > self._num_calls_before:
            self._is_after_marker = True
            return rest
        self._num_failed += 1
        start = max(len(raw) - len(rest), len(raw) - len(raw.lstrip()) + 1)
        self._emit(raw[:start], pieces)
        return raw[start:]

    def _emit_calls(self, found: list[CallDelta], pieces: list[ChannelPiece]) -> None:
        for name, arguments in found:
            self._call += bool(name)
            pieces.append(ChannelPiece(arguments, TOOL, self._call, name))

    def _release(self) -> list[ChannelPiece]:
        pieces: list[ChannelPiece] = []
        held, self._held = self._held, ""
        self._emit(held, pieces)
        return pieces

    def _begins_label(self, text: str) -> bool:
        return self.is_reasoning and self._label.startswith(text.strip())

    def _emit(self, text: str, pieces: list[ChannelPiece]) -> None:
        if self._is_after_marker:
            text = text.lstrip()
            if text and self.is_reasoning:
                rest, self._label = text.removeprefix(self._label), ""
                # The word "thoughtful" is not the label "thought".
                text = text if rest and not rest[0].isspace() else rest.lstrip()
        if text:
            self._is_after_marker = False
            self._has_content = self._has_content or not self.is_reasoning
            pieces.append(ChannelPiece(text, REASONING if self.is_reasoning else CONTENT))


def _first_of(markers: list[str], text: str) -> tuple[int, str]:
    """Return the position of the first marker and the marker, or (-1, "") if there is no marker."""
    found = [(index, marker) for marker in markers if (index := text.find(marker)) >= 0]
    return min(found, default=(-1, ""))


def _num_held_back(markers: list[str], text: str) -> int:
    """Return the length of the tail to hold back: white space and the start of a marker."""
    longest = max((_overlap(marker, text) for marker in markers), default=0)
    before = text[: len(text) - longest]
    return longest + len(before) - len(before.rstrip())


def _overlap(marker: str, text: str) -> int:
    """Return the length of the longest prefix of `marker` that is a suffix of the text."""
    return next(
        (n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0
    )


REASONING_TAGS: Mapping[str, tuple[str, str]] = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "gemma4": ("<|channel>", "<channel|>"),
}
_LABELS = {"gemma4": "thought"}
HARMONY = "harmony"


def reasoning_format(template: str) -> str:
    """Return the reasoning format that a chat template uses; "" if no format is recognized."""
    if CHANNEL in template:
        return HARMONY
    # The template of OLMo 3 only opens the reasoning, at the end of the prompt.
    found = (name for name, tags in REASONING_TAGS.items() if any(tag in template for tag in tags))
    return next(found, "")


def make_splitting(
    channels: Channels, tail: str, token_id: Callable[[str], int | None]
) -> Splitting:
    """Return the splitting for answers to a prompt.

    `tail` is the end of the prompt, which can open reasoning or a header.
    """
    if channels.reasoning == HARMONY:
        return Splitting(HarmonySplitter(tail), _ids_of(HarmonySplitter.MARKERS, token_id))
    tags = REASONING_TAGS.get(channels.reasoning)
    tools = format_of(channels.tools) if channels.tools else None
    if tags is None and tools is None:
        return PLAIN
    markers = _ids_of([*(tags or ()), *(tools.starts + tools.ends if tools else ())], token_id)
    label = _LABELS.get(channels.reasoning, "")
    is_open = tags is not None and tail.rstrip().removesuffix(label).endswith(tags[0])
    types = channels.parameter_types
    splitter = TagSplitter(
        tags,
        tools,
        markers.values(),
        lambda name, parameter: types.get(name, {}).get(parameter, ()),
        REASONING if is_open else CONTENT,
        label,
    )
    return Splitting(splitter, markers)


def _ids_of(markers: Iterable[str], token_id: Callable[[str], int | None]) -> dict[int, str]:
    found = ((token_id(marker), marker) for marker in markers)
    return {id: marker for id, marker in found if id is not None}
