"""Random block memory, a batch over it, and attention as its definition, in float64."""

from array import array
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.core.ids import SequenceId
from headrace.core.plan import Chunk
from headrace.models.step import CacheShape
from headrace.runner.inputs import Batch, pack
from headrace.runner.storage import BlockStorage

CPU = torch.device("cpu")


@dataclass
class Case:
    storage: BlockStorage
    batch: Batch
    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None = None


def make_case(
    chunks: list[tuple[int, int]],
    heads: tuple[int, int] = (4, 2),
    dim: int = 16,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    size: int = 8,
) -> Case:
    """`chunks` are (start, length); their blocks are scattered at random over the pool."""
    torch.manual_seed(0)
    needed = [-(-(start + length) // size) for start, length in chunks]
    storage = BlockStorage(CacheShape(heads[1], dim, (window,)), sum(needed) + 3, size, dtype, CPU)
    for tensor in (storage.keys[0], storage.values[0]):
        tensor.normal_()
    free = iter(torch.randperm(sum(needed) + 3).tolist())
    plan = [
        Chunk(SequenceId(i), start, length, 1, (), array("i", [next(free) for _ in range(count)]))
        for i, ((start, length), count) in enumerate(zip(chunks, needed, strict=True))
    ]
    batch = pack(plan, [array("i", [0] * length) for _, length in chunks], size, CPU)
    num_tokens = len(batch.positions)
    qkv = torch.randn(num_tokens, heads[0] + 2 * heads[1], dim).to(dtype)
    q, k, v = qkv.split((heads[0], heads[1], heads[1]), dim=1)
    return Case(storage, batch, q, k, v)


def plain(case: Case) -> tuple[Tensor, Tensor]:
    """Copies of the keys and values, [blocks, kv_heads, positions, dim], out of words of 4 bytes.

    A word holds neighbours: numbers of a key, positions of a value.
    """
    keys, values = case.storage.keys[0], case.storage.values[0]
    blocks, heads, size, dim = keys.shape
    per = 1 if size % 2 or dim % 2 else 4 // keys.itemsize
    by_position = keys.view(blocks, heads, dim // per, size, per).transpose(2, 3)
    by_number = values.view(blocks, heads, size // per, dim, per).transpose(3, 4)
    return by_position.reshape(keys.shape).clone(), by_number.reshape(keys.shape).clone()


def reference(case: Case, keys: Tensor, values: Tensor) -> Tensor:
    """Softmax of scaled products over all visible positions, float64; keys and values are updated.

    Both as `plain` gives them.
    """
    size, window = case.storage.block_size, case.storage.shape.windows[0]
    for token, index in enumerate(case.batch.write_index.tolist()):
        keys[index // size, :, index % size] = case.k[token]
        values[index // size, :, index % size] = case.v[token]
    owner = [c for c, length in enumerate(case.batch.lengths.tolist()) for _ in range(length)]
    rows = []
    for token, position in enumerate(case.batch.positions.tolist()):
        first = max(0, position + 1 - window) if window else 0
        table = case.batch.block_table[owner[token]].tolist()
        places = [(table[p // size], p % size) for p in range(first, position + 1)]
        past_keys = torch.stack([keys[b, :, o] for b, o in places]).double()
        past_values = torch.stack([values[b, :, o] for b, o in places]).double()
        rows.append(_attend(case.q[token].double(), past_keys, past_values, case.sinks))
    return torch.stack(rows)


def _attend(q: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
    group = q.shape[0] // keys.shape[1]
    out = torch.empty_like(q)
    for head in range(q.shape[0]):
        scores = keys[:, head // group] @ q[head] * q.shape[1] ** -0.5
        extra = torch.empty(0).double() if sinks is None else sinks[head : head + 1].double()
        weights = torch.cat((scores, extra)).softmax(0)[: len(scores)]
        out[head] = weights @ values[:, head // group]
    return out
