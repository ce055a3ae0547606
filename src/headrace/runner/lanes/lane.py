"""The seam between a step and a kind of model."""

from array import array
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from headrace.core.layout import MemoryLayout
from headrace.core.plan import BlockCopy, Chunk, SlotCopy


class Lane(Protocol):
    """One loaded model and the memory its sequences live in."""

    id: str
    device: torch.device
    dtype: torch.dtype
    num_parameters: int
    weight_bytes: int

    def layout(
        self, free_bytes: int, max_num_seqs: int, max_positions: int, block_size: int
    ) -> MemoryLayout:
        """Memory for at most that many sequences of at most that length, within `free_bytes`."""
        ...

    def open(self, layout: MemoryLayout) -> None:
        """Takes the memory that the layout states."""
        ...

    def forward(self, chunks: Sequence[Chunk], token_ids: Sequence["array[int]"]) -> Tensor:
        """Computes the chunks; the rows asked for, in order, in a form that `logits` takes."""
        ...

    def logits(self, rows: Tensor) -> Tensor:
        """float32 [rows, vocab] of any selection of `forward`'s rows."""
        ...

    def copy(self, blocks: Sequence[BlockCopy], slots: Sequence[SlotCopy]) -> None: ...
