"""Parses Harmony, the format of gpt-oss: each message has a header with its role and channel.

Messages in the channel "analysis" are reasoning, and can precede the answer. A message whose
recipient is a function is a tool call. Messages in the channel "final" are for the user.
"""

import json
import re
from collections.abc import Sequence

from headrace.text.tool_formats.format import TokenId, marker
from headrace_common.pieces import CONTENT, REASONING, TOOL, ChannelPiece

CHANNEL, _MESSAGE, _START = "<|channel|>", "<|message|>", "<|start|>"
_END, _CONSTRAIN = "<|end|>", "<|constrain|>"
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")
_RECIPIENT_SO_FAR = re.compile(r"\s{0,8}+(?:t|to|to=[\w.-]{0,128}+\s{0,8}+)?")


class HarmonySplitter:
    """Splits Harmony: the analysis channel is reasoning, and a recipient starts a tool call."""

    MARKERS = (CHANNEL, _MESSAGE, _START, _END, "<|call|>", "<|return|>", _CONSTRAIN)

    def __init__(self, tail: str = "") -> None:
        """`tail` is the end of the prompt, which usually opens the header of the first message."""
        # Whether the header still has no marker. Until then, its text can only be a recipient.
        self._is_opened_by_prompt = tail.endswith(f"{_START}assistant")
        # The text of the current header so far; None outside of headers.
        self._header: str | None = "" if self._is_opened_by_prompt else None
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
            if not self._is_opened_by_prompt or _RECIPIENT_SO_FAR.fullmatch(self._header):
                return []
            # The model writes text without a header.
            text, self._header = self._header, None
        if not text:
            return []
        return [ChannelPiece(text, self._channel, self._call if self._channel == TOOL else -1)]

    def mark(self, marker: str) -> list[ChannelPiece]:
        self._is_opened_by_prompt = False
        if marker in (_START, CHANNEL) or (marker == _CONSTRAIN and self._header is not None):
            # Words on both sides of a marker are separate words.
            self._header = f"{self._header or ''} "
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
    """Return the grammar rules of an answer after `<|start|>assistant`.

    The answer calls one of the named functions; @arguments0 stands for the first function's
    arguments. If `final` is given, the answer can instead be a final message that matches the rule
    `final`. Returns None if a marker is not a token of the model.
    """
    needed = CHANNEL, _MESSAGE, _START, _END, *((_CONSTRAIN,) if names else ())
    if any(token_id(text) is None for text in needed):
        return None
    channel, message, start, end, constrain = (
        marker(text, token_id) for text in (CHANNEL, _MESSAGE, _START, _END, _CONSTRAIN)
    )
    options = (["calls"] if names else []) + (["final"] if final else [])
    lines = [f"start: {'before* ' if may_reason else ''}({' | '.join(options)})"]
    if may_reason:
        # Text that announces a call is a commentary message without a recipient.
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
