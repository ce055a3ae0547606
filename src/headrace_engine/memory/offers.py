"""Passes full blocks and saved states to the code that saves them to disk. Handles only ids.

An offered block may be overwritten at any time. Therefore, an offer says how often the block had
been taken. The thread that saves the block compares this number after copying the block.
"""

from array import array
from dataclasses import dataclass

from headrace_common.ids import SlotId
from headrace_engine.memory.prefix import NameChain


@dataclass(slots=True, frozen=True)
class FullBlocks:
    """Describes consecutive full blocks of a prefix, from block number `first` on.

    All tokens of these blocks are processed and known.
    """

    # The names of these blocks are already computed.
    chain: NameChain
    # The sequence's own array, which may have grown since the offer.
    token_ids: "array[int]"
    first: int
    block_ids: "array[int]"
    # For each block, how often the block had been taken at the time of the offer.
    take_counts: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.first + len(self.block_ids)


@dataclass(slots=True, frozen=True)
class SavedState:
    """Describes a slot with the recurrent state after the first `end` blocks of a prefix."""

    # The name of the prefix's last block.
    name: bytes
    end: int
    slot_id: SlotId
    taking: int


Offer = FullBlocks | SavedState


class Offers:
    """Collects offers of blocks and states to the disk cache until the next step takes them."""

    def __init__(self) -> None:
        self._offers: list[Offer] = []

    def add(self, offer: Offer) -> None:
        self._offers.append(offer)

    def take(self) -> list[Offer]:
        taken, self._offers = self._offers, []
        return taken
