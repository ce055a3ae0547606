"""Copies the contents of blocks and slots from the cache to flat bytes and back."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from headrace_engine.runner.storage import CacheStorage


class BlockBytes:
    """Copies with NumPy on the calling thread, so that torch's threads stay free for the step.

    The bytes have this order: for each layer the keys of all blocks, then for each layer the
    values of all blocks, then each layer's state and each layer's convolution inputs. The blocks
    of a draft model's storage follow those of the served model's storage.
    """

    def __init__(self, *storages: CacheStorage) -> None:
        self._blocks = _as_rows(t for it in storages for t in (*it.keys, *it.values))
        self._slots = _as_rows(t for it in storages for t in (*it.states, *it.inputs))
        self.block_bytes = sum(rows.shape[1] for rows in self._blocks)
        self.slot_bytes = sum(rows.shape[1] for rows in self._slots)

    def get(self, block_ids: Sequence[int], slot_id: int | None = None) -> memoryview:
        """Return the bytes of these blocks, and of the slot if `slot_id` is set."""
        num_slots = int(slot_id is not None)
        size = len(block_ids) * self.block_bytes + num_slots * self.slot_bytes
        data, start = np.empty(size, np.uint8), 0
        ids = np.asarray(block_ids, np.intp)
        for rows in self._blocks:
            end = start + len(ids) * rows.shape[1]
            part = data[start:end].reshape(len(ids), -1)
            # In the default mode, `take` would copy the data twice.
            np.take(rows, ids, axis=0, out=part, mode="clip")
            start = end
        for rows in self._slots if slot_id is not None else ():
            end = start + rows.shape[1]
            data[start:end] = rows[slot_id]
            start = end
        return data.data

    def put(
        self,
        data: memoryview,
        num_blocks: int,
        skip: int,
        block_ids: Sequence[int],
        slot_id: int | None,
    ) -> None:
        """Copy bytes from `get` into blocks, and into the slot if `slot_id` is set.

        `data` has the bytes of `num_blocks` blocks. The first `skip` blocks are omitted, and the
        remaining blocks are copied into `block_ids`.
        """
        flat, start = np.frombuffer(data, np.uint8), 0
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
    """Return the nonempty tensors as uint8 views [blocks or slots, bytes]."""
    return [tensor.flatten(1).view(torch.uint8).numpy() for tensor in tensors if tensor.numel() > 0]
