"""The seam between a step and a kind of model."""

from array import array
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from headrace_common.ids import SequenceId
from headrace_common.layout import MemoryLayout
from headrace_common.messages import InstructionSet, LaneFacts, Quantize
from headrace_common.plan import (
    BlockCopy,
    Chunk,
    EncodeChunk,
    EncodeWork,
    PromptInputs,
    SlotCopy,
    SourceSpec,
)
from headrace_engine.runner.storage import CacheStorage


class LaneTraits(msgspec.Struct, frozen=True):
    """A lane's description of itself: its class knows some of it, a loaded model more."""

    id: str
    has_kernels: bool = False  # on a CPU its products are by kernels of ours
    takes_adapters: bool = False  # and has the methods of AdaptableLane
    own_products: str = ""  # whose they are, if it brings its own: files then stay as they are
    tasks: tuple[str, ...] = ("generate",)  # of generate, embed and score
    is_whole: bool = False  # it cannot go on from a cache: prompts are never cut
    vector_size: int = 0  # of an embedding; 0: it gives none
    source: SourceSpec | None = None  # if its prompts are sources to encode
    facts: LaneFacts = LaneFacts()  # from its opening on

    def but(self, **changed: Any) -> "LaneTraits":
        return msgspec.structs.replace(self, **changed)


class LaneOptions(msgspec.Struct, frozen=True):
    """How a lane is asked to compute; each heeds what concerns it."""

    quantize: Quantize = "none"
    instructions: InstructionSet = "plain"  # of its kernels, if it has any, on this device
    kernels: str = "auto"  # as the user asked; some lanes need any for a part only
    may_offload: bool = False  # to whatever devices there are
    mapped_bytes: int = 0  # of experts, which then lie in a mapped file


class Lane(Protocol):
    """One loaded model and the memory its sequences live in.

    Made of the model's spec, its number format, a device, and LaneOptions.
    """

    traits: LaneTraits
    device: torch.device
    dtype: torch.dtype
    num_parameters: int
    weight_bytes: int

    @property
    def storage(self) -> CacheStorage | None:
        """The memory, once open, if its numbers may be kept elsewhere and come back."""
        ...

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
