"""The naive attention against scores written out by hand."""

from array import array

import pytest
import torch

from headrace_common.cache import KvCacheDtype, LayerCache
from headrace_common.ids import SequenceId
from headrace_common.layout import MemoryLayout
from headrace_common.plan import Chunk
from headrace_engine.runner.attention import NaiveAttention
from headrace_engine.runner.inputs import pack
from headrace_engine.runner.storage import CacheStorage
from headrace_kernels import dequantize_rows, quantize_rows

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 8, 4
CPU = torch.device("cpu")


def storage_of(*cache: LayerCache, kind: KvCacheDtype = "auto") -> CacheStorage:
    return CacheStorage(cache, MemoryLayout(BLOCK, num_blocks=8), torch.float32, CPU, kind)


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
    """Row by row, head by head, over a whole sequence from position 0 on."""
    out = q.new_zeros(len(q), HEADS, v.shape[2])
    for i in range(len(q)):
        for head in range(HEADS):
            first, group = max(0, i - window + 1), head // (HEADS // k.shape[1])
            scores = k[first : i + 1, group] @ q[i, head] / q.shape[2] ** 0.5
            out[i, head] = scores.softmax(0) @ v[first : i + 1, group]
    return out


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("cut", [1, 4, 5, 11])
@pytest.mark.parametrize("kind", ["auto", "int8"])
def test_any_cut_over_scattered_blocks_gives_the_definition(
    window: int | None, cut: int, kind: KvCacheDtype
) -> None:
    torch.manual_seed(0)
    storage = storage_of(LayerCache(KV_HEADS, DIM, DIM, window), kind=kind)
    attention = NaiveAttention(storage)
    q, k, v = (torch.randn(11, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    out = torch.empty_like(q)
    for start in range(0, 11, cut):
        length = min(cut, 11 - start)
        chunk = Chunk(SequenceId(0), start, length, 0, (), array("i", [6, 1, 3]))
        step = attention.step(pack([chunk], [array("i", [0] * length)], BLOCK, CPU))
        piece = slice(start, start + length)
        out[piece] = step.attend(0, q[piece], k[piece], v[piece])
    if kind == "int8":
        k, v = (dequantize_rows(quantize_rows(x)) for x in (k, v))
    torch.testing.assert_close(out, expected(q, k, v, window or 1000))


def test_layers_may_differ_in_heads_windows_and_the_sizes_of_keys_and_values() -> None:
    torch.manual_seed(0)
    cache = LayerCache(KV_HEADS, DIM, DIM), LayerCache(1, DIM, 5, window=3), LayerCache(HEADS, 6, 9)
    attention = NaiveAttention(storage_of(*cache))
    chunk = Chunk(SequenceId(0), 0, 11, 0, (), array("i", [6, 1, 3]))
    step = attention.step(pack([chunk], [array("i", [0] * 11)], BLOCK, CPU))
    for layer, each in enumerate(cache):
        q = torch.randn(11, HEADS, each.key_dim)
        k = torch.randn(11, each.num_kv_heads, each.key_dim)
        v = torch.randn(11, each.num_kv_heads, each.value_dim)
        out = step.attend(layer, q, k, v)
        torch.testing.assert_close(out, expected(q, k, v, each.window or 1000))


def test_unwritten_positions_of_a_block_have_no_influence() -> None:
    storage = storage_of(LayerCache(KV_HEADS, DIM, DIM))
    storage.keys[0].fill_(float("nan"))
    storage.values[0].fill_(float("nan"))
    chunk = Chunk(SequenceId(0), 0, 2, 0, (), array("i", [1]))
    step = NaiveAttention(storage).step(pack([chunk], [array("i", [0, 0])], BLOCK, CPU))
    out = step.attend(0, *(torch.ones(2, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)))
    assert torch.equal(out, torch.ones(2, HEADS, DIM))


def test_caps_soften_scores_and_sinks_take_a_share_of_the_weights() -> None:
    torch.manual_seed(0)
    sinks = torch.randn(HEADS)
    q, k, v = (torch.randn(5, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    storage = storage_of(LayerCache(KV_HEADS, DIM, DIM))
    batch = pack(
        [Chunk(SequenceId(0), 0, 5, 0, (), array("i", [1, 0]))], [array("i", [0] * 5)], BLOCK, CPU
    )
    out = NaiveAttention(storage, [sinks]).step(batch).attend(0, q, k, v, cap=0.5)
    for i in range(5):
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            scores = 0.5 * torch.tanh(k[: i + 1, group] @ q[i, head] / DIM**0.5 / 0.5)
            weights = scores.exp() / (scores.exp().sum() + sinks[head].exp())
            torch.testing.assert_close(out[i, head], weights @ v[: i + 1, group])
