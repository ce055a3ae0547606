"""The numbers of blocks and slots as flat bytes, in and out; knows no file and no owner."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from headrace_engine.runner.storage import CacheStorage


class BlockBytes:
    """Copies by NumPy on the calling thread, so that torch's threads stay with the step.

    The order: of each layer the keys, then the values of all blocks, block by block; then each
    layer's state and inputs.
    """

    def __init__(self, storage: CacheStorage) -> None:
        self._blocks = _as_rows((*storage.keys, *storage.values))
        self._slots = _as_rows((*storage.states, *storage.inputs))
        self.block_bytes = sum(rows.shape[1] for rows in self._blocks)
        self.slot_bytes = sum(rows.shape[1] for rows in self._slots)

    def get(self, block_ids: Sequence[int], slot_id: int | None = None) -> memoryview:
        """A copy of these blocks, and of a slot."""
        num_slots = int(slot_id is not None)
        size = len(block_ids) * self.block_bytes + num_slots * self.slot_bytes
        numbers, start = np.empty(size, np.uint8), 0
        ids = np.asarray(block_ids, np.intp)
        for rows in self._blocks:
            end = start + len(ids) * rows.shape[1]
            part = numbers[start:end].reshape(len(ids), -1)
            np.take(rows, ids, axis=0, out=part, mode="clip")  # any other mode copies twice
            start = end
        for rows in self._slots if slot_id is not None else ():
            end = start + rows.shape[1]
            numbers[start:end] = rows[slot_id]
            start = end
        return numbers.data

    def put(
        self,
        numbers: memoryview,
        num_blocks: int,
        skip: int,
        block_ids: Sequence[int],
        slot_id: int | None,
    ) -> None:
        """Fills blocks with all but the first `skip` of `num_blocks`, and a slot."""
        flat, start = np.frombuffer(numbers, np.uint8), 0
        ids = np.asarray(block_ids, np.intp)
        for rows in self._blocks:
            end = start + num_blocks * rows.shape[1]
            rows[ids] = flat[start:end].reshape(num_blocks, -1)[skip:]
            start = end
        for rows in self._slots if slot_id is not None else ():
            end = start + rows.shape[1]
            rows[slot_id] = flat[start:end]
            start = end


def _as_rows(tensors: Iterable[torch.Tensor]) -> list[np.ndarray]:
    """uint8 [blocks or slots, bytes] over the tensors' own memory; none of empty ones."""
    return [tensor.flatten(1).view(torch.uint8).numpy() for tensor in tensors if tensor.numel() > 0]
