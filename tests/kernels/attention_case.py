"""Makes random memory and steps, and computes attention by its definition in float64."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace_kernels.step import Int32s


@dataclass(frozen=True)
class Step:
    """Chunks of consecutive tokens. Each belongs to a sequence with a row in the block table."""

    token_ids: Tensor
    positions: Tensor
    starts: Int32s
    lengths: Int32s
    first_rows: Int32s
    slots: Int32s
    block_table: Int32s


def make_step(
    chunks: Sequence[tuple[int, int]], tables: Sequence[Sequence[int]], slots: Sequence[int] = ()
) -> Step:
    """Return a step with these chunks of (start, length)."""
    starts, lengths = np.array(chunks, dtype=np.int32).T.copy()
    widest = max(len(table) for table in tables)
    rows = [[*table, *[0] * (widest - len(table))] for table in tables]
    positions = [torch.arange(start, start + length) for start, length in chunks]
    return Step(
        token_ids=torch.zeros(int(lengths.sum()), dtype=torch.long),
        positions=torch.cat(positions),
        starts=starts,
        lengths=lengths,
        first_rows=np.cumsum(lengths, dtype=np.int32) - lengths,
        slots=np.array(slots or [-1] * len(chunks), dtype=np.int32),
        block_table=np.array(rows, dtype=np.int32),
    )


@dataclass
class Memory:
    """The memory of one layer."""

    keys: list[Tensor]
    values: list[Tensor]
    states: None = None
    dtype: torch.dtype = torch.float32


@dataclass
class Case:
    memory: Memory
    window: int | None
    step: Step
    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None = None
    cap: float | None = None


def make_case(
    chunks: list[tuple[int, int]],
    heads: tuple[int, int] = (4, 2),
    dim: int = 16,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    size: int = 8,
) -> Case:
    """Return a case with chunks of (start, length) in randomly chosen blocks."""
    torch.manual_seed(0)
    needed = [-(-(start + length) // size) for start, length in chunks]
    shape = sum(needed) + 3, heads[1], size, dim
    memory = Memory(*([torch.zeros(shape, dtype=dtype).normal_()] for _ in range(2)), dtype=dtype)
    free = iter(torch.randperm(sum(needed) + 3).tolist())
    step = make_step(chunks, [[next(free) for _ in range(count)] for count in needed])
    qkv = torch.randn(len(step.positions), heads[0] + 2 * heads[1], dim).to(dtype)
    q, k, v = qkv.split((heads[0], heads[1], heads[1]), dim=1)
    return Case(memory, window, step, q, k, v)


def plain(case: Case) -> tuple[Tensor, Tensor]:
    """Return copies of keys and values as [blocks, kv_heads, positions, dim].

    In memory, a word of 4 bytes has neighbouring numbers of a key, or positions of a value.
    """
    keys, values = case.memory.keys[0], case.memory.values[0]
    blocks, heads, size, dim = keys.shape
    per = 1 if size % 2 or dim % 2 else 4 // keys.itemsize
    by_position = keys.view(blocks, heads, dim // per, size, per).transpose(2, 3)
    by_number = values.view(blocks, heads, size // per, dim, per).transpose(3, 4)
    return by_position.reshape(keys.shape).clone(), by_number.reshape(keys.shape).clone()


def tables(case: Case) -> list[list[int]]:
    """Return the blocks of each token's sequence."""
    both = zip(case.step.block_table.tolist(), case.step.lengths.tolist(), strict=True)
    return [table for table, length in both for _ in range(length)]


def places(case: Case) -> list[tuple[int, int]]:
    """Return the block of each token and its offset in the block."""
    size = case.memory.keys[0].shape[2]
    both = zip(tables(case), case.step.positions.tolist(), strict=True)
    return [(table[position // size], position % size) for table, position in both]


def reference(case: Case, keys: Tensor, values: Tensor) -> Tensor:
    """Return attention by its definition, in float64.

    Adds the new tokens to `keys` and `values`, which are those of `plain`.
    """
    size, window = keys.shape[2], case.window
    written = places(case)
    for token, (block, offset) in enumerate(written):
        keys[block, :, offset] = case.k[token]
        values[block, :, offset] = case.v[token]
    rows = []
    for token, position in enumerate(case.step.positions.tolist()):
        first = max(0, position + 1 - window) if window else 0
        table = tables(case)[token]
        seen = [(table[p // size], p % size) for p in range(first, position + 1)]
        past_keys = torch.stack([keys[b, :, o] for b, o in seen]).double()
        past_values = torch.stack([values[b, :, o] for b, o in seen]).double()
        rows.append(_attend(case, case.q[token].double(), past_keys, past_values))
    return torch.stack(rows)


def _attend(case: Case, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    group, sinks, cap = q.shape[0] // keys.shape[1], case.sinks, case.cap
    out = torch.empty_like(q)
    for head in range(q.shape[0]):
        scores = keys[:, head // group] @ q[head] * q.shape[1] ** -0.5
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        extra = torch.empty(0).double() if sinks is None else sinks[head : head + 1].double()
        weights = torch.cat((scores, extra)).softmax(0)[: len(scores)]
        out[head] = weights @ values[:, head // group]
    return out
