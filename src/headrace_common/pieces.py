"""Defines pieces of an answer's text, as the log of a stream stores them."""

import msgspec

CONTENT, REASONING, TOOL = "content", "reasoning", "tool"


class ChannelPiece(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of an answer: text of one channel, or a part of a tool call's arguments.

    Only the first piece of a tool call has a `name`.
    """

    text: str
    channel: str = CONTENT
    # Index of the tool call within its choice, or -1 for other text.
    call: int = -1
    name: str = ""
