"""Chooses an instruction set: the best set of this processor whose results agree with torch's."""

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace_kernels.attention import CpuAttention, CpuStep
from headrace_kernels.experts import ExpertProduct, can_route
from headrace_kernels.fp4 import TWICE
from headrace_kernels.groups import INT4, GroupedWeights, Scheme
from headrace_kernels.instruction_sets import NAMES, InstructionSet, instruction_sets_here
from headrace_kernels.int8_rows import SCALE_BYTES, dequantize_rows, quantize_rows
from headrace_kernels.launch import compile_all, listed
from headrace_kernels.layers import kernels_of
from headrace_kernels.linear import (
    GroupedLinear,
    PackedLinear,
    PlainScheme,
    Quantize,
    quantize_outputs,
)
from headrace_kernels.routing import combine, route

logger = logging.getLogger(__name__)

_OF_BFLOAT16 = ("amx", "bf16dot")
# With these sizes, a check runs every tile of a product, and every incomplete tile at an edge.
_INPUTS, _OUTPUTS, _ROWS = 96, 70, (1, 2, 3, 7, 45)
_HEADS, _KV_HEADS, _DIM, _BLOCK = 4, 2, 32, 32
_CHUNKS = ((0, 70), (70, 1))  # start and length of each chunk
_KEY_HEADS, _VALUE_HEADS, _KEY_DIM, _VALUE_DIM = 2, 4, 16, 64
_KEYS, _VALUES = _KEY_HEADS * _KEY_DIM, _VALUE_HEADS * _VALUE_DIM
# The sizes of a convolution.
_CHANNELS, _WIDTH = 2 * _KEYS + _VALUES, 4
_WITH_STATES = {"convolution", "delta-gates"}  # kinds of layers with a recurrent state
# The maximum error relative to the largest number, by dtype.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2}


class KernelChoice(NamedTuple):
    """The instruction set that the kernels will use, and the reason for the choice."""

    instructions: InstructionSet
    reason: str


def choose_instructions(
    wanted: str,
    dtype: torch.dtype,
    quantize: Quantize = "none",
    groups: frozenset[PlainScheme] = frozenset(),
    kinds: frozenset[str] = frozenset(),
    checks: bool = True,
    has_int8_cache: bool = False,
) -> KernelChoice:
    """Choose the instruction set for a model on a CPU.

    groups: the schemes of the model's weights that are stored in groups.
    kinds: the kinds of the model's layers, as `prepare` names them.
    The kernels that the model needs are compiled first, several at the same time. A set whose check
    fails is skipped with a warning. Without `checks`, nothing is compiled. Raises ValueError if
    `wanted` is not a set that can compute `dtype` here. Also raises ValueError if weights must be
    quantized to int8 or int4, but only plain torch can be used.
    """
    kept: frozenset[PlainScheme] = frozenset({INT4}) if quantize == "int4" else groups
    is_bfloat16 = dtype == torch.bfloat16
    sets = [one for one in instruction_sets_here() if is_bfloat16 or one not in _OF_BFLOAT16]
    if wanted != "auto" and wanted not in sets:
        name = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"--kernels {wanted} cannot compute {name} on this processor; use one of "
            f"auto, {', '.join(sets)}."
        )
    reason = "as asked"
    if wanted != "auto":
        sets = sets[sets.index(wanted) :]  # type: ignore[arg-type]
    elif len(sets) > 1:
        reason = f"the processor has {NAMES[sets[0]]}"
    else:
        reason = "the processor has neither AVX2 nor NEON"
    instructions = sets[0]
    is_quantized = quantize in ("int8", "int4")
    asked = is_quantized, has_int8_cache
    while checks and (fault := _fault(instructions, dtype, kept, kinds, asked)):
        logger.warning("The kernels for %s are not used, because %s.", instructions, fault)
        reason = f"{instructions} failed its check"
        sets = sets[1:]
        instructions = sets[0]
    if instructions == "plain" and is_quantized:
        raise ValueError(
            f"--quantize {quantize} needs compiled kernels, but only plain torch can be used here "
            f"({reason}). Use --quantize none."
        )
    return KernelChoice(instructions, reason)


@cache
def _fault(
    instructions: InstructionSet,
    dtype: torch.dtype,
    groups: frozenset[PlainScheme],
    kinds: frozenset[str],
    asked: tuple[bool, bool],
) -> str | None:
    """Return why an instruction set cannot be used; None if the set can be used.

    Compares a few rows with torch's results. asked: two flags, the first for weights in 8 bits and
    the second for keys and values in 8 bits.
    """
    if instructions == "plain":
        return None
    to_int8, has_int8_cache = asked
    # Bytes are no more precise than bfloat16.
    has_byte_rows = any(Scheme(*kept).form.has_byte_rows for kept in groups)
    tolerance = _TOLERANCE[torch.bfloat16 if has_byte_rows else dtype]

    def samples() -> Iterator[tuple[str, Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        yield from _samples_of_attention(instructions, dtype, generator, has_int8_cache)
        has_routers = "routed-mlp" in kinds
        makers = _layer_makers(instructions, dtype, (to_int8, has_routers), groups)
        for make in makers:
            yield from _samples_of_product(make, dtype, generator)
        for make in makers[-max(len(groups), 1) :] if has_routers else ():
            yield from _samples_of_experts(make, dtype, generator)
        if not kinds.isdisjoint(_WITH_STATES):
            yield from _samples_of_states(instructions, dtype, generator)

    try:
        with listed() as needed:
            for _ in samples():
                # This round only lists the kernels. Its results are uninitialized memory.
                pass
        compile_all([*needed, *kernels_of(kinds, dtype)])
        for what, found, expected in samples():
            size, error = expected.abs().max(), (found.float() - expected).abs().max()
            # The negated comparison also catches NaN.
            if not error <= tolerance * size:
                return f"their {what} differs from torch's by {float(error / size):.2g}"
    # The compiler may raise any exception.
    except Exception as error:
        return f"they fail with {type(error).__name__}: {error}"
    return None


_LayerMaker = Callable[[torch.Generator], tuple[PackedLinear | GroupedLinear, Tensor]]
"""Makes a layer; returns the layer and its exact weights."""


def _layer_makers(
    instructions: InstructionSet,
    dtype: torch.dtype,
    plain: tuple[bool, bool],
    groups: Iterable[PlainScheme],
) -> list[_LayerMaker]:
    """Return makers of layers, one for each format in which the model stores weights.

    plain: whether weights are rounded to 8 bits, and whether the model has routers, which are
    never rounded. The maker for the format of most weights is last.
    """
    to_int8, has_routers = plain
    own: list[_LayerMaker] = []
    if dtype == torch.bfloat16 and (has_routers or not to_int8):
        own.append(partial(_packed_layer, instructions, dtype, False))
    if to_int8:
        own.append(partial(_packed_layer, instructions, dtype, True))
    return own + [partial(_grouped_layer, instructions, Scheme(*kept)) for kept in sorted(groups)]


def _samples_of_product(
    make: _LayerMaker, dtype: torch.dtype, generator: torch.Generator
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name of each check, the result of the kernels and torch's float32 result."""
    layer, exact = make(generator)
    for num_rows in _ROWS:
        x = torch.randn(num_rows, _INPUTS, generator=generator).to(dtype)
        yield f"product of {num_rows} rows", layer(x), F.linear(x.float(), exact)


def _grouped_layer(
    instructions: InstructionSet, scheme: Scheme, generator: torch.Generator
) -> tuple[GroupedLinear, Tensor]:
    low, high = (0, 16) if scheme.bits == 4 else (-127, 128)
    q = torch.randint(low, high, (_OUTPUTS, _INPUTS), generator=generator)
    size = _OUTPUTS, _INPUTS // scheme.size
    if scheme.is_float:
        power = torch.randint(120, 130, size, generator=generator).to(torch.uint8)
        wide = (power - 128.0).exp2().repeat_interleave(scheme.size, dim=1)
        made = GroupedWeights(scheme, q.to(torch.int8), power, power[:, :0])
        return GroupedLinear(made, None, instructions), torch.tensor(TWICE)[q] * wide
    scale = torch.rand(size, generator=generator).half()
    minimum = (-8 * scale * torch.rand(size, generator=generator)).half() * scheme.has_minimum
    scale_of, minimum_of = (x.float().repeat_interleave(scheme.size, 1) for x in (scale, minimum))
    exact = q * scale_of + minimum_of
    made = GroupedWeights(scheme, q.to(torch.int8), scale, minimum)
    return GroupedLinear(made, None, instructions), exact


def _packed_layer(
    instructions: InstructionSet, dtype: torch.dtype, to_int8: bool, generator: torch.Generator
) -> tuple[PackedLinear, Tensor]:
    weight = torch.randn(_OUTPUTS, _INPUTS, generator=generator).to(dtype)
    stored, scale = quantize_outputs(weight) if to_int8 else (weight, torch.ones(_OUTPUTS))
    layer = PackedLinear(stored, scale, None, instructions)
    return layer, stored.float() * scale[:, None]


def _samples_of_experts(
    make: _LayerMaker, dtype: torch.dtype, generator: torch.Generator
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield checks of experts: the weighted sum of two of three experts for each token."""
    layers, exact = zip(*(make(generator) for _ in range(3)), strict=True)
    if not can_route(layers[0].operand):
        return
    product = ExpertProduct([layer.operand for layer in layers])
    for num_rows in (1, 3, 45):
        x = torch.randn(num_rows, _INPUTS, generator=generator).to(dtype)
        # All scores of a token are different.
        scores = torch.rand(num_rows, 3, generator=generator).argsort(-1).to(dtype)
        routing = route(scores, 2, sums_to_one=True)
        found = combine(product(x, routing), routing, None, None)
        weights = torch.where(scores > 0, scores.float(), -torch.inf).softmax(-1)
        expected = torch.stack([F.linear(x.float(), weight) for weight in exact], dim=1)
        yield f"experts of {num_rows} rows", found, (expected * weights[..., None]).sum(1)


def _samples_of_attention(
    instructions: InstructionSet,
    dtype: torch.dtype,
    generator: torch.Generator,
    has_int8_cache: bool,
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield checks of attention for two chunks of one sequence."""
    past = torch.empty(0, _HEADS + 2 * _KV_HEADS, _DIM, dtype=dtype)
    for (start, length), step in _steps(instructions, dtype, has_int8_cache):
        past = torch.cat(
            (past, torch.randn(length, *past.shape[1:], generator=generator).to(dtype))
        )
        q, k, v = past[start:].split((_HEADS, _KV_HEADS, _KV_HEADS), dim=1)
        found = step.attend(0, q, k, v)
        q, k, v = past.float().transpose(0, 1).split((_HEADS, _KV_HEADS, _KV_HEADS))
        if has_int8_cache:
            k, v = (dequantize_rows(quantize_rows(x)) for x in (k, v))
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        yield f"attention of {length} tokens", found, expected.transpose(0, 1)[start:]


def _samples_of_states(
    instructions: InstructionSet, dtype: torch.dtype, generator: torch.Generator
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield checks of a gated delta net for two chunks of one sequence."""
    weight = torch.randn(_WIDTH, _CHANNELS, generator=generator).to(dtype)
    inputs = torch.zeros(_WIDTH - 1, _CHANNELS, dtype=dtype)
    state = torch.zeros(_VALUE_HEADS, _KEY_DIM, _VALUE_DIM)
    for (_, length), step in _steps(instructions, dtype):
        x = torch.randn(length, _CHANNELS, generator=generator).to(dtype)
        inputs = torch.cat((inputs[1 - _WIDTH :], x))
        terms = [inputs[j : j + length].float() * weight[j].float() for j in range(_WIDTH)]
        convolved = F.silu(torch.stack(terms).sum(0))
        yield f"convolution of {length} tokens", step.convolve(0, x, weight), convolved
        decay, beta = torch.rand(2, length, _VALUE_HEADS, generator=generator)
        q, k, v = convolved.split((_KEYS, _KEYS, _VALUES), dim=1)
        q, k = (part.unflatten(1, (_KEY_HEADS, -1)) for part in (q, k))
        qkv = q, k, v.unflatten(1, (_VALUE_HEADS, -1))
        found = step.delta_rule(0, qkv, -decay, beta)
        yield (
            f"delta rule of {length} tokens",
            found,
            delta_rule_by_formula(qkv, -decay, beta, state),
        )


def delta_rule_by_formula(
    qkv: tuple[Tensor, Tensor, Tensor], decay: Tensor, beta: Tensor, state: Tensor
) -> Tensor:
    """Compute `delta_net.delta_rule` with torch, token by token, and update the state."""
    q, k, v = qkv
    share = v.shape[1] // k.shape[1]
    q, k = (F.normalize(x, dim=2).repeat_interleave(share, 1)[..., None] for x in (q, k))
    q = q * q.shape[2] ** -0.5
    out = torch.empty_like(v)
    for t in range(len(v)):
        state.mul_(decay[t].exp()[:, None, None])
        correction = beta[t][:, None] * (v[t] - (state * k[t]).sum(1))
        state += k[t] * correction[:, None]
        out[t] = (state * q[t]).sum(1)
    return out


def _steps(
    instructions: InstructionSet, dtype: torch.dtype, has_int8_cache: bool = False
) -> Iterator[tuple[tuple[int, int], CpuStep]]:
    """Yield the start, length and attention of each step of one sequence.

    The sequence's keys, values and states are kept from one step to the next.
    """
    stored, width = (torch.int8, _DIM + SCALE_BYTES) if has_int8_cache else (dtype, _DIM)
    keys, values = torch.zeros(2, 3, _KV_HEADS, _BLOCK, width, dtype=stored)
    state = torch.zeros(1, _VALUE_HEADS, _KEY_DIM, _VALUE_DIM)
    inputs = torch.zeros(1, _WIDTH - 1, _CHANNELS, dtype=dtype)
    memory: Any = SimpleNamespace(
        dtype=dtype, keys=[keys], values=[values], states=[state], inputs=[inputs]
    )
    attention = CpuAttention(memory, (None,), instructions=instructions)
    for start, length in _CHUNKS:
        step: Any = SimpleNamespace(
            positions=torch.arange(start, start + length),
            starts=np.full(1, start, np.int32),
            lengths=np.full(1, length, np.int32),
            first_rows=np.zeros(1, np.int32),
            slots=np.zeros(1, np.int32),
            block_table=np.array([[2, 0, 1]], np.int32),  # block numbers, not in order
        )
        yield (start, length), attention.step(step)
