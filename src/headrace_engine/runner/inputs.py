"""Packs the chunks of a plan into one batch by concatenating the tokens of the chunks."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_common.plan import Chunk

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Batch:
    """The inputs of a forward: tensors on the model's device, and arrays on the host."""

    token_ids: Tensor  # int64 [tokens]
    positions: Tensor  # int64 [tokens], or [3, tokens] if there are images
    write_index: Tensor  # int64 [tokens]: block * block_size + offset
    rows: Tensor  # int64 [rows]: indices of the tokens whose hidden states are needed
    starts: Ints  # [chunks]: position of each chunk's first token
    lengths: Ints  # [chunks]
    first_rows: Ints  # [chunks]: the index of each chunk's first token in the batch
    slots: Ints  # [chunks]: the slot with the state of the chunk's sequence; -1 without a slot
    block_table: Ints  # [chunks, max_blocks], padded with 0; covers start + length positions


def pack(
    chunks: Sequence[Chunk],
    token_ids: Sequence["array[int]"],
    block_size: int,
    device: torch.device,
) -> Batch:
    """Pack chunks; `token_ids` has the token ids of each chunk."""
    figures = np.empty((3, len(chunks)), dtype=np.int32)
    rows, end = [], 0
    for number, chunk in enumerate(chunks):
        figures[:, number] = chunk.start, chunk.length, chunk.slot_id
        end += chunk.length
        rows.append(np.arange(end - chunk.num_rows, end))
    starts, lengths, slots = figures
    first_rows = np.cumsum(lengths, dtype=np.int32) - lengths
    table = _block_table(chunks, block_size)
    owner = np.repeat(np.arange(len(chunks)), lengths)  # [tokens]: the index of each token's chunk
    positions = np.arange(len(owner)) + (starts - first_rows)[owner]
    blocks = table[owner, positions // block_size].astype(np.int64)

    def on_device(values: NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(values.astype(np.int64, copy=False)).to(device)

    return Batch(
        token_ids=on_device(np.concatenate(tuple(map(np.asarray, token_ids)))),
        positions=on_device(positions),
        write_index=on_device(blocks * block_size + positions % block_size),
        rows=on_device(np.concatenate(rows)),
        starts=starts,
        lengths=lengths,
        first_rows=first_rows,
        slots=slots,
        block_table=table,
    )


def _block_table(chunks: Sequence[Chunk], block_size: int) -> Ints:
    width = 0
    for chunk in chunks:
        width = max(width, -(-(chunk.start + chunk.length) // block_size))
    table = np.zeros((len(chunks), width), dtype=np.int32)
    for row, chunk in enumerate(chunks):
        count = -(-(chunk.start + chunk.length) // block_size)
        table[row, :count] = np.asarray(chunk.block_ids)[:count]
    return table
