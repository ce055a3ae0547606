"""Owns which block of an answer is open: a run of pieces of one channel, or of one tool call."""

from typing import Generic, NamedTuple, Protocol, TypeVar

from headrace_common.answer import Said

Told = TypeVar("Told")


class Block(NamedTuple):
    """A block by its number in the answer; `call` and `name` are a tool call's."""

    number: int
    channel: str
    call: int
    name: str


class Teller(Protocol[Told]):
    """A dialect's way of telling how blocks come, grow and go."""

    def opened(self, block: Block) -> list[Told]: ...

    def grown(self, block: Block, text: str) -> list[Told]: ...

    def closed(self, block: Block) -> list[Told]: ...


class Blocks(Generic[Told]):
    """Opens, feeds and closes one block after another, and returns what its dialect tells."""

    def __init__(self, teller: Teller[Told]) -> None:
        self.open: Block | None = None
        self.num_opened = 0
        self._teller = teller

    def feed(self, piece: Said) -> list[Told]:
        told: list[Told] = []
        if self.open is None or (piece.channel, piece.call) != self.open[1:3]:
            told = self.close() + self.begin(piece)
        assert self.open is not None
        return told + self._teller.grown(self.open, piece.text) if piece.text else told

    def begin(self, piece: Said) -> list[Told]:
        self.open = Block(self.num_opened, piece.channel, piece.call, piece.name)
        self.num_opened += 1
        return self._teller.opened(self.open)

    def close(self) -> list[Told]:
        closing, self.open = self.open, None
        return self._teller.closed(closing) if closing else []
