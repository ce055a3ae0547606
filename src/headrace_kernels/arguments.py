"""Defines how a kernel's arguments are stored: int64 words that follow a work counter.

Most kernels name the words in a NamedTuple. Attention has more words and fills the words in two
steps: the chunks once for each forward step, the tensors for each layer.
"""

import ctypes
from typing import Any

import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic
from numba.np.numpy_support import carray
from torch import Tensor

from headrace_kernels.int8_rows import SCALE_BYTES
from headrace_kernels.numeric import f32_at, i8_at, i32_at, u16_at, u32_at

Arguments = Any
"""A C array of int64: the work counter, then the number of rows, addresses and sizes.

A kernel that works by rows computes each row independently. So the results for the first rows
do not depend on the total number of rows.
"""


def arguments_of(*words: int) -> Arguments:
    return (ctypes.c_int64 * (len(words) + 1))(0, *words)


def reader(record: Any) -> Any:
    """Return an intrinsic read(a) that loads a kernel's arguments as the NamedTuple `record`."""
    kind = types.NamedUniTuple(types.int64, len(record._fields), record)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        places = [ir.Constant(ir.IntType(64), 1 + i) for i in range(kind.count)]
        words = [builder.load(builder.gep(args[0], [place])) for place in places]
        return context.make_tuple(builder, kind, words)

    def typed(typing_context: Any, address: Any) -> Any:
        return kind(types.CPointer(types.int64)), emit

    return intrinsic(typed)


(
    NUM_TOKENS,
    STARTS,
    LENGTHS,
    FIRST_ROWS,
    TABLE,
    NUM_CHUNKS,
    TABLE_WIDTH,
    KEYS,
    VALUES,
    NUM_BLOCKS,
    KV_HEADS,
    BLOCK_SIZE,
    DIM,
    GROUP,  # number of query heads for each kv head
    WINDOW,  # number of positions; 0 means no window
    SINKS,
    NUM_SINKS,
    CAP,  # limit of scores in 1e-6; 0 means no limit
    Q,
    K,
    V,
    OUT,
    Q_STRIDE,
    K_STRIDE,
    V_STRIDE,
    OUT_STRIDE,
    SIZE,
) = range(1, 28)


def set_memory(arguments: Arguments, keys: Tensor, values: Tensor) -> None:
    """Set the addresses and the shape of the cache.

    keys, values: [num_blocks, kv_heads, block_size, dim], contiguous. In an int8 cache, the last
    dimension includes the bytes of a scale.
    """
    arguments[KEYS], arguments[VALUES] = keys.data_ptr(), values.data_ptr()
    arguments[NUM_BLOCKS : DIM + 1] = keys.shape
    if keys.dtype == torch.int8:
        arguments[DIM] -= SCALE_BYTES


def set_new(arguments: Arguments, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """Set the addresses and row strides of a layer's tensors.

    q, k, v, out: [tokens, heads, dim]. The heads of a token are contiguous; the rows may be
    further apart.
    """
    arguments[NUM_TOKENS] = q.shape[0]
    arguments[GROUP] = q.shape[1] // k.shape[1]
    for place, tensor in enumerate((q, k, v, out)):
        arguments[Q + place] = tensor.data_ptr()
        arguments[Q_STRIDE + place] = tensor.stride(0)


@njit(inline="always")
def first_visible(position: int, window: int) -> int:
    return max(0, position + 1 - window) if window else 0


@njit
def chunks_of(g: Any) -> Any:
    return (
        carray(i32_at(g[STARTS]), g[NUM_CHUNKS]),
        carray(i32_at(g[LENGTHS]), g[NUM_CHUNKS]),
        carray(i32_at(g[FIRST_ROWS]), g[NUM_CHUNKS]),
        carray(i32_at(g[TABLE]), (g[NUM_CHUNKS], g[TABLE_WIDTH])),
    )


@njit
def new_bf16(g: Any) -> Any:
    return (
        carray(u16_at(g[Q]), (g[NUM_TOKENS], g[Q_STRIDE])),
        carray(u16_at(g[K]), (g[NUM_TOKENS], g[K_STRIDE])),
        carray(u16_at(g[V]), (g[NUM_TOKENS], g[V_STRIDE])),
        carray(u16_at(g[OUT]), (g[NUM_TOKENS], g[OUT_STRIDE])),
    )


@njit
def new_float(g: Any) -> Any:
    return (
        carray(f32_at(g[Q]), (g[NUM_TOKENS], g[Q_STRIDE])),
        carray(f32_at(g[K]), (g[NUM_TOKENS], g[K_STRIDE])),
        carray(f32_at(g[V]), (g[NUM_TOKENS], g[V_STRIDE])),
        carray(f32_at(g[OUT]), (g[NUM_TOKENS], g[OUT_STRIDE])),
    )


@njit
def memory_bf16(g: Any) -> Any:
    """Return keys and values as bfloat16 bits, each [blocks, kv_heads, numbers]."""
    shape = (g[NUM_BLOCKS], g[KV_HEADS], g[BLOCK_SIZE] * g[DIM])
    return carray(u16_at(g[KEYS]), shape), carray(u16_at(g[VALUES]), shape)


@njit
def memory_float(g: Any) -> Any:
    shape = (g[NUM_BLOCKS], g[KV_HEADS], g[BLOCK_SIZE] * g[DIM])
    return carray(f32_at(g[KEYS]), shape), carray(f32_at(g[VALUES]), shape)


@njit
def memory_bytes(g: Any) -> Any:
    """Return int8 keys and values, each [blocks, kv_heads, bytes of a block and its scales]."""
    shape = (g[NUM_BLOCKS], g[KV_HEADS], g[BLOCK_SIZE] * (g[DIM] + SCALE_BYTES))
    return carray(i8_at(g[KEYS]), shape), carray(i8_at(g[VALUES]), shape)


@njit
def memory_words(g: Any) -> Any:
    """Return bfloat16 keys and values as words of two numbers."""
    shape = (g[NUM_BLOCKS], g[KV_HEADS], g[BLOCK_SIZE] * g[DIM] // 2)
    return carray(u32_at(g[KEYS]), shape), carray(u32_at(g[VALUES]), shape)
