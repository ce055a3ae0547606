"""Kernels for matrix products, attention and recurrent layers on a CPU (see README.md)."""

from headrace_kernels.attention import CpuAttention
from headrace_kernels.cache import kept_code
from headrace_kernels.choose import choose_instructions
from headrace_kernels.compiler import ON_COMPILE
from headrace_kernels.int8_rows import dequantize_rows, quantize_rows
from headrace_kernels.layers import prepare
from headrace_kernels.linear import pack_linear, packing_bytes
from headrace_kernels.low_rank import (
    LowRankLayer,
    LowRankPart,
    SlotRows,
    add_low_rank,
    add_low_rank_by_torch,
    compile_low_rank,
)
from headrace_kernels.replay import CapturedForward

__all__ = [
    "ON_COMPILE",
    "CapturedForward",
    "CpuAttention",
    "LowRankLayer",
    "LowRankPart",
    "SlotRows",
    "add_low_rank",
    "add_low_rank_by_torch",
    "choose_instructions",
    "compile_low_rank",
    "dequantize_rows",
    "kept_code",
    "pack_linear",
    "packing_bytes",
    "prepare",
    "quantize_rows",
]
