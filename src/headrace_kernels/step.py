"""The step as kernels see it: its tokens, the chunks that they make, and the memory behind them."""

from collections.abc import Sequence
from dataclasses import Field
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Int32s = NDArray[np.int32]


class PackedStep(Protocol):
    """A dataclass: tokens in a row, chunk by chunk. A chunk is a run of one sequence's tokens."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def token_ids(self) -> Tensor: ...  # int64 [tokens]
    @property
    def positions(self) -> Tensor: ...  # int64 [tokens]; [3, tokens] is passed on as it is
    @property
    def starts(self) -> Int32s: ...  # [chunks]: position of each chunk's first token
    @property
    def lengths(self) -> Int32s: ...  # [chunks]
    @property
    def first_rows(self) -> Int32s: ...  # [chunks]: where its first token lies in the step
    @property
    def slots(self) -> Int32s: ...  # [chunks]: where its sequence's state lies, if it has one
    @property
    def block_table(self) -> Int32s: ...  # [chunks, blocks]: covers start + length positions


class CacheMemory(Protocol):
    """Per layer; empty where it keeps no such thing. Kernels order the numbers of a head."""

    @property
    def keys(self) -> Sequence[Tensor]: ...  # [blocks, kv_heads, block_size, dim]
    @property
    def values(self) -> Sequence[Tensor]: ...  # as keys
    @property
    def states(self) -> Sequence[Tensor]: ...  # float32 [slots, heads, key_dim, value_dim]
    @property
    def inputs(self) -> Sequence[Tensor]: ...  # [slots, width - 1, channels], of convolutions
