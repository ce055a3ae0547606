"""Owns the choice of an instruction set: the best one here that computes what plain does."""

import itertools
import logging
from array import array
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.checkpoints.gguf_groups import Groups, GroupScheme
from headrace.core.errors import ModelError
from headrace.core.ids import SequenceId, SlotId
from headrace.core.plan import Chunk
from headrace.models.step import CacheShape, StateShape, Step
from headrace.runner.attention import Attention, NaiveAttention
from headrace.runner.inputs import pack
from headrace.runner.kernels.attention import CpuAttention
from headrace.runner.kernels.groups import INT4
from headrace.runner.kernels.instruction_sets import NAMES, InstructionSet, instruction_sets_here
from headrace.runner.kernels.linear import GroupedLinear, PackedLinear, Quantize, quantize_outputs
from headrace.runner.storage import BlockStorage

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_OF_BFLOAT16 = ("amx", "bf16dot")
_INPUTS, _OUTPUTS, _ROWS = 96, 70, (1, 2, 3, 7, 45)  # every tile of a product, and its edges
_HEADS, _KV_HEADS, _DIM, _BLOCK = 4, 2, 32, 32
_CHUNKS = ((0, 70), (70, 1))
_STATE = StateShape(
    num_layers=1, num_heads=4, key_dim=16, value_dim=64, num_channels=320, num_inputs=3
)
_KEYS, _VALUES = 32, 256  # channels of two key heads, and of all value heads
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2}  # of the largest number


class KernelChoice(NamedTuple):
    """An instruction set for the kernels, and why it is this one."""

    instructions: InstructionSet
    reason: str


def choose_instructions(
    wanted: str,
    dtype: torch.dtype,
    quantize: Quantize = "none",
    groups: frozenset[GroupScheme] = frozenset(),
    has_states: bool = False,
) -> KernelChoice:
    """Chooses the instruction set for a model on a CPU; ModelError if the wanted one cannot be.

    `groups`: of its own weights, which plain unpacks.
    """
    kept = frozenset({INT4}) if quantize == "int4" else groups
    is_bfloat16 = dtype == torch.bfloat16
    sets = [one for one in instruction_sets_here() if is_bfloat16 or one not in _OF_BFLOAT16]
    if wanted != "auto" and wanted not in sets:
        name = str(dtype).removeprefix("torch.")
        raise ModelError(
            f"--kernels {wanted} cannot compute {name} on this processor; use one of "
            f"auto, {', '.join(sets)}."
        )
    reason = "as asked"
    if wanted != "auto":
        sets = sets[sets.index(wanted) :]  # type: ignore[arg-type]
    elif len(sets) > 1:
        reason = f"the processor has {NAMES[sets[0]]}"
    else:
        reason = "the processor has neither AVX2 nor AVX-512"
    instructions = sets[0]
    while fault := _fault(instructions, dtype, quantize in ("int8", "int4"), kept, has_states):
        logger.warning("Kernels %s are not used: %s.", instructions, fault)
        reason = f"{instructions} failed its check"
        sets = sets[1:]
        instructions = sets[0]
    if instructions == "plain" and quantize in ("int8", "int4"):
        raise ModelError(
            f"--quantize {quantize} is not computed by kernels plain ({reason}); "
            "use --quantize none."
        )
    return KernelChoice(instructions, reason)


@cache
def _fault(
    instructions: InstructionSet,
    dtype: torch.dtype,
    to_int8: bool,
    groups: frozenset[GroupScheme],
    has_states: bool,
) -> str | None:
    """The fault of an instruction set, or None: computes a few rows with it and without it."""
    if instructions == "plain":
        return None
    generator = torch.Generator().manual_seed(0)
    try:
        samples = itertools.chain(
            _samples(instructions, dtype, to_int8, generator),
            *(_grouped_samples(instructions, kept, dtype, generator) for kept in sorted(groups)),
            _samples_of_states(instructions, dtype, generator) if has_states else (),
        )
        for what, found, expected in samples:
            size, error = expected.abs().max(), (found.float() - expected).abs().max()
            if not error <= _TOLERANCE[dtype] * size:  # NaN is a fault too
                return f"their {what} differs from torch's by {float(error / size):.2g}"
    except Exception as error:  # whatever a compiler may raise
        return f"they fail with {type(error).__name__}: {error}"
    return None


def _grouped_samples(
    instructions: InstructionSet,
    groups: GroupScheme,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> Iterator[tuple[str, Tensor, Tensor]]:
    low, high = (0, 16) if groups.bits == 4 else (-127, 128)
    q = torch.randint(low, high, (_OUTPUTS, _INPUTS), generator=generator)
    size = _OUTPUTS, _INPUTS // groups.size
    scale = torch.rand(size, generator=generator).half()
    minimum = (-8 * scale * torch.rand(size, generator=generator)).half() * groups.has_minimum
    wide = (part.float().repeat_interleave(groups.size, dim=1) for part in (scale, minimum))
    exact = q * next(wide) + next(wide)
    layer = GroupedLinear(Groups(groups, q.to(torch.int8), scale, minimum), None, instructions)
    for num_rows in _ROWS:
        x = torch.randn(num_rows, _INPUTS, generator=generator).to(dtype)
        yield f"product of {num_rows} rows in groups", layer(x), F.linear(x.float(), exact)


def _samples(
    instructions: InstructionSet, dtype: torch.dtype, to_int8: bool, generator: torch.Generator
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yields a name, the result by these instructions, and torch's in float32."""
    if dtype == torch.bfloat16 or to_int8:
        weight = torch.randn(_OUTPUTS, _INPUTS, generator=generator).to(dtype)
        stored, scale = quantize_outputs(weight) if to_int8 else (weight, torch.ones(_OUTPUTS))
        exact = stored.float() * scale[:, None]
        layer = PackedLinear(stored, scale, None, instructions)
        for num_rows in _ROWS:
            x = torch.randn(num_rows, _INPUTS, generator=generator).to(dtype)
            yield f"product of {num_rows} rows", layer(x), F.linear(x.float(), exact)
    for length, steps in _steps(instructions, dtype):
        shape = length, _HEADS + 2 * _KV_HEADS, _DIM
        qkv = torch.randn(shape, generator=generator).to(dtype)
        q, k, v = qkv.split((_HEADS, _KV_HEADS, _KV_HEADS), dim=1)
        found, expected = (step.attend(0, q, k, v) for step in steps)
        yield f"attention of {length} tokens", found, expected.float()


def _samples_of_states(
    instructions: InstructionSet, dtype: torch.dtype, generator: torch.Generator
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The same for a gated delta net."""
    weight = torch.randn(4, _STATE.num_channels, generator=generator).to(dtype)
    for length, steps in _steps(instructions, dtype):
        x = torch.randn(length, _STATE.num_channels, generator=generator).to(dtype)
        found, expected = (step.convolve(0, x, weight) for step in steps)
        yield f"convolution of {length} tokens", found, expected
        decay, beta = torch.rand(2, length, _STATE.num_heads, generator=generator)
        q, k, v = expected.split((_KEYS, _KEYS, _VALUES), dim=1)
        qkv = (q.unflatten(1, (2, -1)), k.unflatten(1, (2, -1)), v.unflatten(1, (4, -1)))
        found, expected = (step.delta_rule(0, qkv, -decay, beta) for step in steps)
        yield f"delta rule of {length} tokens", found, expected


def _steps(
    instructions: InstructionSet, dtype: torch.dtype
) -> Iterator[tuple[int, tuple[Step, Step]]]:
    """Steps of one sequence, by these instructions and by torch, with their number of tokens."""
    shape = CacheShape(_KV_HEADS, _DIM, (None,), _STATE)
    storages = [BlockStorage(shape, 3, _BLOCK, dtype, _CPU, num_slots=1) for _ in range(2)]
    ours: Attention = CpuAttention(storages[0], instructions=instructions)
    plain: Attention = NaiveAttention(storages[1])
    for start, length in _CHUNKS:
        chunk = Chunk(SequenceId(0), start, length, 1, (), array("i", [2, 0, 1]), SlotId(0))
        batch = pack([chunk], [array("i", [0] * length)], _BLOCK, _CPU)
        yield length, (ours.step(batch), plain.step(batch))
