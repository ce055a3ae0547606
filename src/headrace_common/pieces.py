"""Text of an answer by channel, as it is logged; the one object that carries it there."""

import msgspec

CONTENT, REASONING, TOOL = "content", "reasoning", "tool"


class ChannelPiece(msgspec.Struct, frozen=True, omit_defaults=True):
    """More text of one channel; of a tool call, its arguments. `name` stands on its first piece."""

    text: str
    channel: str = CONTENT
    call: int = -1  # tool calls are counted from 0 within their choice
    name: str = ""
