"""Replays small steps. One step is captured; later steps replay the first rows of this step."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from headrace_kernels import launch
from headrace_kernels.capture import Call, CannotCapture, Graph, capture
from headrace_kernels.fuse import fuse
from headrace_kernels.pointwise import add
from headrace_kernels.step import PackedStep

logger = logging.getLogger(__name__)

Batch = TypeVar("Batch", bound=PackedStep)
_OWN = {torch.ops.aten.add.Tensor: add}
# Above this number of tokens, the calls take little time compared with the computation.
_MAX_TOKENS = 256
_ARRAYS = ("starts", "lengths", "first_rows", "slots")


class CapturedForward(Generic[Batch]):
    """A forward pass over a batch that is captured at the first small batch and then replayed.

    forward: may pass the batch's tensors and arrays to kernels, but must not branch on the numbers
    in them.
    block_table_width: the number of blocks of the longest sequence.
    """

    def __init__(self, forward: Callable[[Batch], Tensor], block_table_width: int) -> None:
        self._forward = forward
        self._width = block_table_width
        self._captured: tuple[Batch, Graph, Tensor] | None = None
        # The calls by number of tokens.
        self._calls: dict[int, list[Call]] = {}
        self._is_off = False
        # Searching for OpenMP runs torch operations, which must not be captured.
        launch.barrier_address()

    def __call__(self, batch: Batch) -> Tensor:
        """Return at least as many rows as the batch has tokens.

        The next step overwrites the returned rows.
        """
        num_tokens = len(batch.token_ids)
        if self._is_off or num_tokens > _MAX_TOKENS:
            return self._forward(batch)
        try:
            steady, graph, result = self._captured or self._capture(batch)
        except CannotCapture as error:
            logger.info(
                "Small steps run more slowly, because one of their calls cannot be recorded: %s",
                error,
            )
            self._is_off = True
            return self._forward(batch)
        fill(steady, batch)
        if num_tokens not in self._calls:
            self._calls[num_tokens] = fuse(graph.first_rows(num_tokens))
        for call in self._calls[num_tokens]:
            call()
        return result

    def _capture(self, batch: Batch) -> tuple[Batch, Graph, Tensor]:
        """Capture a step of the largest size.

        Returns the batch whose memory all steps share, the captured graph, and the tensor with the
        result.
        """
        steady = _steady(batch, self._width)
        inputs = steady.token_ids, steady.positions
        graph, result = capture(lambda: self._forward(steady), inputs, _OWN)
        self._captured = steady, graph, result
        return self._captured


def _steady(batch: Batch, table_width: int) -> Batch:
    """Return a batch with room for the largest step. All chunks of the batch are empty."""
    arrays: dict[str, Any] = {name: np.zeros(_MAX_TOKENS, dtype=np.int32) for name in _ARRAYS}
    return replace(
        batch,
        token_ids=batch.token_ids.new_zeros(_MAX_TOKENS),
        positions=batch.positions.new_zeros(_MAX_TOKENS),
        block_table=np.zeros((_MAX_TOKENS, table_width), dtype=np.int32),
        **arrays,
    )


def fill(steady: Batch, batch: Batch) -> None:
    """Copy a step into the shared batch: first the chunks of the step, then empty chunks."""
    chunks, tokens = len(batch.lengths), len(batch.token_ids)
    steady.token_ids[:tokens] = batch.token_ids
    steady.positions[:tokens] = batch.positions
    for name in _ARRAYS:
        array = getattr(steady, name)
        array[:chunks], array[chunks:] = getattr(batch, name), 0
    steady.block_table[:chunks, : batch.block_table.shape[1]] = batch.block_table
