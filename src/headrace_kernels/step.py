"""Defines a step as kernels see it: the tokens, the chunks of tokens, and the cache."""

from collections.abc import Sequence
from dataclasses import Field
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Int32s = NDArray[np.int32]


class PackedStep(Protocol):
    """A dataclass of a step's tokens. A chunk is a series of successive tokens of one sequence."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def token_ids(self) -> Tensor: ...  # int64 [tokens]
    @property
    def positions(self) -> Tensor: ...  # int64 [tokens], or [3, tokens] with time, row and column
    @property
    def starts(self) -> Int32s: ...  # [chunks], position of each chunk's first token
    @property
    def lengths(self) -> Int32s: ...  # [chunks]
    @property
    def first_rows(self) -> Int32s: ...  # [chunks], row of each chunk's first token in the step
    @property
    def slots(self) -> Int32s: ...  # [chunks], slot of each sequence's recurrent state, if any
    @property
    def block_table(self) -> Int32s: ...  # [chunks, blocks] for start + length positions


class CacheMemory(Protocol):
    """The cache tensors of each layer; a tensor is empty if its layer does not store such data.

    Kernels choose the order of the numbers inside a head. `inputs` are the last inputs of
    convolutions. In an int8 cache, the last dimension of keys and values has 4 more bytes, for the
    float32 scale of a position.
    """

    @property
    def dtype(self) -> torch.dtype: ...  # of the rows that are written and read
    @property
    def keys(self) -> Sequence[Tensor]: ...  # [blocks, kv_heads, block_size, dim]
    @property
    def values(self) -> Sequence[Tensor]: ...  # the same shape as keys
    @property
    def states(self) -> Sequence[Tensor]: ...  # float32 [slots, heads, key_dim, value_dim]
    @property
    def inputs(self) -> Sequence[Tensor]: ...  # [slots, width - 1, channels]
