"""Full blocks and saved states for whoever keeps them longer than memory does; ids only.

What is offered may be overwritten at any time. How often a block or slot was taken tells: who
copies it looks before and after.
"""

from array import array
from dataclasses import dataclass

from headrace_common.ids import SlotId
from headrace_engine.memory.prefix import NameChain


@dataclass(slots=True, frozen=True)
class FullBlocks:
    """Blocks of a prefix, from number `first` on, that are full of computed, known tokens."""

    chain: NameChain  # has the names of all these blocks already
    token_ids: "array[int]"  # the sequence's own: it may have grown since
    first: int
    block_ids: "array[int]"
    takings: tuple[int, ...]  # of each block, how often it had been taken

    @property
    def end(self) -> int:
        return self.first + len(self.block_ids)


@dataclass(slots=True, frozen=True)
class SavedState:
    """A slot with the recurrent state after the first `end` blocks of a prefix."""

    name: bytes  # of the last of them
    end: int
    slot_id: SlotId
    taking: int


Offer = FullBlocks | SavedState


class Offers:
    """News of full blocks and saved states since they were last taken."""

    def __init__(self) -> None:
        self._offers: list[Offer] = []

    def add(self, offer: Offer) -> None:
        self._offers.append(offer)

    def take(self) -> list[Offer]:
        taken, self._offers = self._offers, []
        return taken
