"""Defines the interface between a step and the lanes. Each lane runs one kind of model."""

from array import array
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from headrace_common.cache import KvCacheDtype
from headrace_common.ids import SequenceId
from headrace_common.layout import MemoryLayout
from headrace_common.messages import InstructionSet, LaneFacts, Quantize
from headrace_common.plan import (
    BlockCopy,
    Chunk,
    EncodeChunk,
    EncoderInput,
    PromptInputs,
    SlotCopy,
    SourceSpec,
)
from headrace_engine.runner.storage import CacheStorage


class LaneTraits(msgspec.Struct, frozen=True):
    """Describes a lane; some values are known only after a model has been loaded."""

    id: str
    # Whether Headrace's kernels compute this lane's matrix products on a CPU.
    has_kernels: bool = False
    # Whether the lane accepts adapters. If so, the lane has the methods of AdaptableLane.
    takes_adapters: bool = False
    # Set if the lane brings its own kernels: a possessive for messages, such as "llama.cpp's".
    # With its own kernels, a lane keeps weights in the format of the file.
    own_kernels: str = ""
    # The tasks that the lane supports: some of "generate", "embed" and "score".
    tasks: tuple[str, ...] = ("generate",)
    # Whether prompts are never cut into chunks, because the lane cannot continue from a cache.
    is_whole: bool = False
    # The size of an embedding; 0 if the lane computes no embeddings.
    vector_size: int = 0
    # Set if prompts are sources for the encoder of an encoder-decoder model.
    source: SourceSpec | None = None
    # How the lane runs the model; the value is complete after `open`.
    facts: LaneFacts = LaneFacts()

    def with_changes(self, **changed: Any) -> "LaneTraits":
        return msgspec.structs.replace(self, **changed)


class LaneOptions(msgspec.Struct, frozen=True):
    """How a lane should compute; a lane ignores the options that do not apply."""

    quantize: Quantize = "none"
    # The instruction set of the lane's kernels on this device; "plain" if no kernels are used.
    instructions: InstructionSet = "plain"
    # The value of --kernels. Some lanes use kernels for only one part of the model.
    kernels: str = "auto"
    # Whether layers may be offloaded to other devices.
    may_offload: bool = False
    # The bytes of experts in a mapped file; 0 without a mapped file.
    mapped_bytes: int = 0
    kv_cache_dtype: KvCacheDtype = "auto"


class Lane(Protocol):
    """One loaded model and the memory of its sequences.

    A lane is constructed with a model's spec, a dtype, a device and LaneOptions.
    """

    traits: LaneTraits
    device: torch.device
    dtype: torch.dtype
    num_parameters: int
    weight_bytes: int

    @property
    def storage(self) -> CacheStorage | None:
        """Return the tensors of an open cache; None if the cache cannot be saved as bytes."""

    def layout(
        self, free_bytes: int, max_num_seqs: int, max_positions: int, block_size: int
    ) -> MemoryLayout:
        """Return a layout for up to `max_num_seqs` sequences of up to `max_positions` positions.

        The layout must fit into `free_bytes`, so both numbers may be lower in the layout.
        """

    def open(self, layout: MemoryLayout) -> None:
        """Allocate the memory that the layout describes."""

    def forward(self, chunks: Sequence[Chunk], token_ids: Sequence["array[int]"]) -> Tensor:
        """Process the chunks; return each chunk's last `num_rows` rows, in order, for `logits`."""

    def logits(self, rows: Tensor) -> Tensor:
        """Return float32 logits [rows, vocab], or a classifier's scores, for rows from `forward`.

        For embeddings, the rows of `forward` are hidden states, and this method is not used.
        """

    def copy(self, blocks: Sequence[BlockCopy], slots: Sequence[SlotCopy]) -> None: ...


class EncodingLane(Lane, Protocol):
    """A lane for sequences with encoder inputs, such as images."""

    def begin(self, sequence_id: SequenceId, inputs: PromptInputs) -> None:
        """Announce a sequence with encoder inputs.

        The first chunk of the sequence may start after a cached prefix.
        """

    def end(self, sequence_id: SequenceId) -> None:
        """Release the lane's data about a sequence."""

    def encode(self, chunk: EncodeChunk, work: EncoderInput) -> bool:
        """Run some units of an encoder input; return False if the result was already cached."""
