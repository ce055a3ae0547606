"""Harmony, as gpt-oss writes: messages with headers, which say who speaks, where, and to whom.

Before the answer there may be messages in the channel of analysis. A call is a message to a
function; what the user reads stands in the channel named final.
"""

import json
import re
from collections.abc import Sequence

from headrace.text.tool_formats.format import TokenId, marker
from headrace_common.pieces import CONTENT, REASONING, TOOL, ChannelPiece

CHANNEL, _MESSAGE, _START = "<|channel|>", "<|message|>", "<|start|>"
_END, _CONSTRAIN = "<|end|>", "<|constrain|>"
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")


class HarmonySplitter:
    """Analysis is reasoning, a recipient makes a tool call."""

    MARKERS = (CHANNEL, _MESSAGE, _START, _END, "<|call|>", "<|return|>", _CONSTRAIN)

    def __init__(self) -> None:
        self._header: str | None = None  # while in one
        self._channel = CONTENT
        self._call = -1

    @property
    def num_held(self) -> int:
        return len(self._header or "")

    @property
    def num_calls(self) -> int:
        return self._call + 1

    @property
    def is_reasoning(self) -> bool:
        return self._header is None and self._channel == REASONING

    def feed(self, text: str) -> list[ChannelPiece]:
        if self._header is not None:
            self._header += text
            return []
        if not text:
            return []
        return [ChannelPiece(text, self._channel, self._call if self._channel == TOOL else -1)]

    def mark(self, marker: str) -> list[ChannelPiece]:
        if marker in (_START, CHANNEL):
            self._header = self._header or ""
        elif marker == _MESSAGE:
            header, self._header = self._header or "", None
            return self._open(header)
        elif marker != _CONSTRAIN:
            self._channel = CONTENT
        return []

    def flush(self) -> list[ChannelPiece]:
        header, self._header = self._header or "", None
        return [ChannelPiece(header)] if header.strip() else []

    def _open(self, header: str) -> list[ChannelPiece]:
        recipient = _RECIPIENT.search(header)
        if recipient:
            self._channel = TOOL
            self._call += 1
            return [ChannelPiece("", TOOL, self._call, recipient[1])]
        self._channel = REASONING if "analysis" in header else CONTENT
        return []


def answer_rules(
    names: Sequence[str], final: str | None, may_reason: bool, token_id: TokenId
) -> list[str] | None:
    """Rules for an answer from behind `<|start|>assistant` on; None if a marker is no token.

    It calls one of the functions with these names, @arguments0 being those of the first, or has a
    last message by the rule `final`, if there is one.
    """
    needed = CHANNEL, _MESSAGE, _START, _END, *((_CONSTRAIN,) if names else ())
    if any(token_id(text) is None for text in needed):
        return None
    channel, message, start, end, constrain = (
        marker(text, token_id) for text in (CHANNEL, _MESSAGE, _START, _END, _CONSTRAIN)
    )
    ways = (["calls"] if names else []) + (["final"] if final else [])
    lines = [f"start: {'before* ' if may_reason else ''}({' | '.join(ways)})"]
    if may_reason:
        # words about what will be called stand in the channel of calls, to nobody
        channels = '("analysis" | "commentary")' if names and final else '"analysis"'
        lines.append(f'before: {channel} {channels} {message} TEXT? {end} {start} "assistant"')
    if names:
        calls = " | ".join(
            f'{json.dumps(f"to=functions.{name} ")} {constrain} "json" {message} @arguments{i}'
            for i, name in enumerate(names)
        )
        lines.append(f'calls: {channel} "commentary " ({calls})')
    if final:
        lines.append(f'final: {channel} "final" {message} {final}')
    return [*lines, "TEXT: /(?s:.+)/"]
