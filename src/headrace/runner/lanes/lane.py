"""The seam between a step and a kind of model."""

from array import array
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from headrace.core.ids import SequenceId
from headrace.core.layout import MemoryLayout
from headrace.core.messages import LaneFacts
from headrace.core.plan import (
    BlockCopy,
    Chunk,
    EncodeChunk,
    EncodeWork,
    PromptInputs,
    SlotCopy,
    SourceSpec,
)


class Lane(Protocol):
    """One loaded model and the memory its sequences live in."""

    id: str
    device: torch.device
    dtype: torch.dtype
    num_parameters: int
    weight_bytes: int
    tasks: tuple[str, ...]  # of generate, embed and score
    is_whole: bool  # it cannot go on from a cache: prompts are never cut
    vector_size: int  # of an embedding; 0: it gives none
    facts: LaneFacts  # from its opening on
    source: SourceSpec | None  # if its prompts are sources to encode

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
        """float32 [rows, vocab] of any selection of `forward`'s rows; of a classifier its labels.

        Where vectors are embedded, the rows themselves are hidden states.
        """
        ...

    def copy(self, blocks: Sequence[BlockCopy], slots: Sequence[SlotCopy]) -> None: ...


class EncodingLane(Lane, Protocol):
    """A lane whose sequences may have works."""

    def begin(self, sequence_id: SequenceId, inputs: PromptInputs) -> None:
        """Tells that a sequence with works is about to run, perhaps from a cached prefix on."""
        ...

    def end(self, sequence_id: SequenceId) -> None:
        """Tells that the lane may forget the sequence."""
        ...

    def encode(self, chunk: EncodeChunk, work: EncodeWork) -> bool:
        """Computes some units of a work; False if what comes of them was at hand."""
        ...
