"""Owns how attention's arguments lie in a kernel's frame: one order, written and read here alone.

A step fills in its chunks once, each layer its tensors; kernels read them back as arrays.
"""

from typing import Any

from numba import njit
from numba.np.numpy_support import carray
from torch import Tensor

from headrace.runner.kernels.numeric import f32_at, i32_at, u16_at, u32_at
from headrace.runner.kernels.pool import Frame

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
    GROUP,  # query heads per kv head
    WINDOW,  # 0: none
    SINKS,
    NUM_SINKS,
    Q,
    K,
    V,
    OUT,
    Q_STRIDE,
    K_STRIDE,
    V_STRIDE,
    OUT_STRIDE,
    FRAME_SIZE,
) = range(1, 27)


def set_memory(frame: Frame, keys: Tensor, values: Tensor) -> None:
    """keys, values: [num_blocks, kv_heads, block_size, dim], contiguous."""
    frame[KEYS], frame[VALUES] = keys.data_ptr(), values.data_ptr()
    frame[NUM_BLOCKS : DIM + 1] = keys.shape


def set_new(frame: Frame, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """All [tokens, heads, dim] with their heads side by side; rows may be further apart."""
    frame[NUM_TOKENS] = q.shape[0]
    frame[GROUP] = q.shape[1] // k.shape[1]
    for place, tensor in enumerate((q, k, v, out)):
        frame[Q + place] = tensor.data_ptr()
        frame[Q_STRIDE + place] = tensor.stride(0)


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
    """Keys and values, each [blocks, kv_heads, numbers of one head's block]."""
    shape = (g[NUM_BLOCKS], g[KV_HEADS], g[BLOCK_SIZE] * g[DIM])
    return carray(u16_at(g[KEYS]), shape), carray(u16_at(g[VALUES]), shape)


@njit
def memory_float(g: Any) -> Any:
    shape = (g[NUM_BLOCKS], g[KV_HEADS], g[BLOCK_SIZE] * g[DIM])
    return carray(f32_at(g[KEYS]), shape), carray(f32_at(g[VALUES]), shape)


@njit
def memory_words(g: Any) -> Any:
    """The same memory of bfloat16, two in a word."""
    shape = (g[NUM_BLOCKS], g[KV_HEADS], g[BLOCK_SIZE] * g[DIM] // 2)
    return carray(u32_at(g[KEYS]), shape), carray(u32_at(g[VALUES]), shape)
