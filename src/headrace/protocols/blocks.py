"""Groups an answer's pieces into blocks.

A block has the consecutive pieces of one channel or of one tool call. The reasoning, for
example, is a channel.
"""

from typing import Generic, NamedTuple, Protocol, TypeVar

from headrace_common.answer import ChannelText

Rendered = TypeVar("Rendered")


class Block(NamedTuple):
    """A block, with its number in the answer; `call` and `name` are set for a tool call."""

    number: int
    channel: str
    call: int
    name: str


class BlockRenderer(Protocol[Rendered]):
    """Renders the start, growth and end of blocks for one dialect."""

    def opened(self, block: Block) -> list[Rendered]: ...

    def grown(self, block: Block, text: str) -> list[Rendered]: ...

    def closed(self, block: Block) -> list[Rendered]: ...


class Blocks(Generic[Rendered]):
    """Tracks the open block: starts, feeds and closes one block after another.

    Each method returns what the dialect's renderer produces for the change.
    """

    def __init__(self, renderer: BlockRenderer[Rendered]) -> None:
        self.open: Block | None = None
        self.num_opened = 0
        self._renderer = renderer

    def feed(self, piece: ChannelText) -> list[Rendered]:
        rendered: list[Rendered] = []
        if self.open is None or (piece.channel, piece.call) != self.open[1:3]:
            rendered = self.close() + self.begin(piece)
        assert self.open is not None
        return rendered + self._renderer.grown(self.open, piece.text) if piece.text else rendered

    def begin(self, piece: ChannelText) -> list[Rendered]:
        self.open = Block(self.num_opened, piece.channel, piece.call, piece.name)
        self.num_opened += 1
        return self._renderer.opened(self.open)

    def close(self) -> list[Rendered]:
        closing, self.open = self.open, None
        return self._renderer.closed(closing) if closing else []
