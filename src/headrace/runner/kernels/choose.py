"""Owns the choice of a form: the best that the processor has, once it computes what plain does."""

import logging
from array import array
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.core.errors import ModelError
from headrace.core.ids import SequenceId
from headrace.core.plan import Chunk
from headrace.models.step import CacheShape
from headrace.runner.attention import Attention, NaiveAttention
from headrace.runner.inputs import pack
from headrace.runner.kernels.attention import CpuAttention
from headrace.runner.kernels.forms import INSTRUCTIONS, Form, forms_here
from headrace.runner.kernels.linear import PackedLinear, quantize
from headrace.runner.storage import BlockStorage

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_OF_BFLOAT16 = ("amx", "bf16dot")
_INPUTS, _OUTPUTS, _ROWS = 96, 70, (1, 2, 3, 7, 45)  # every tile of a product, and its edges
_HEADS, _KV_HEADS, _DIM, _BLOCK = 4, 2, 32, 32
_CHUNKS = ((0, 70), (70, 1))
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2}  # of the largest number


class KernelChoice(NamedTuple):
    """A form, and why it is this one."""

    form: Form
    reason: str


def choose_form(wanted: str, dtype: torch.dtype, to_int8: bool) -> KernelChoice:
    """The form for a model on a CPU; ModelError if the wanted one cannot be."""
    forms = [form for form in forms_here() if dtype == torch.bfloat16 or form not in _OF_BFLOAT16]
    if wanted != "auto" and wanted not in forms:
        name = str(dtype).removeprefix("torch.")
        raise ModelError(
            f"--kernels {wanted} cannot compute {name} on this processor; use one of "
            f"auto, {', '.join(forms)}."
        )
    reason = "as asked"
    if wanted != "auto":
        forms = forms[forms.index(wanted) :]  # type: ignore[arg-type]
    elif len(forms) > 1:
        reason = f"the processor has {INSTRUCTIONS[forms[0]]}"
    else:
        reason = "the processor has neither AVX2 nor AVX-512"
    form = forms[0]
    while fault := _fault(form, dtype, to_int8):
        logger.warning("Kernels %s are not used: %s.", form, fault)
        reason = f"{form} failed its check"
        forms = forms[1:]
        form = forms[0]
    if form == "plain" and to_int8:
        raise ModelError(f"--quantize int8 is not computed by kernels plain ({reason}).")
    return KernelChoice(form, reason)


@cache
def _fault(form: Form, dtype: torch.dtype, to_int8: bool) -> str | None:
    """What is wrong with a form, or None. A few rows are computed with it and without it."""
    if form == "plain":
        return None
    generator = torch.Generator().manual_seed(0)
    try:
        for what, found, expected in _samples(form, dtype, to_int8, generator):
            size, error = expected.abs().max(), (found.float() - expected).abs().max()
            if not error <= _TOLERANCE[dtype] * size:  # NaN is a fault too
                return f"their {what} differs from torch's by {float(error / size):.2g}"
    except Exception as error:  # whatever a compiler may raise
        return f"they fail with {type(error).__name__}: {error}"
    return None


def _samples(
    form: Form, dtype: torch.dtype, to_int8: bool, generator: torch.Generator
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """What was computed, by the form, and in float32 by torch."""
    if dtype == torch.bfloat16 or to_int8:
        weight = torch.randn(_OUTPUTS, _INPUTS, generator=generator).to(dtype)
        stored, scale = quantize(weight) if to_int8 else (weight, torch.ones(_OUTPUTS))
        exact, layer = stored.float() * scale[:, None], PackedLinear(stored, scale, None, form)
        for num_rows in _ROWS:
            x = torch.randn(num_rows, _INPUTS, generator=generator).to(dtype)
            yield f"product of {num_rows} rows", layer(x), F.linear(x.float(), exact)
    storages = [
        BlockStorage(CacheShape(_KV_HEADS, _DIM, (None,)), 3, _BLOCK, dtype, _CPU) for _ in range(2)
    ]
    ours: Attention = CpuAttention(storages[0], form=form)
    plain: Attention = NaiveAttention(storages[1])
    for start, length in _CHUNKS:
        chunk = Chunk(SequenceId(0), start, length, 1, (), array("i", [2, 0, 1]))
        batch = pack([chunk], [array("i", [0] * length)], _BLOCK, _CPU)
        shape = length, _HEADS + 2 * _KV_HEADS, _DIM
        qkv = torch.randn(shape, generator=generator).to(dtype)
        q, k, v = qkv.split((_HEADS, _KV_HEADS, _KV_HEADS), dim=1)
        found, expected = (form.step(batch).attend(0, q, k, v) for form in (ours, plain))
        yield f"attention of {length} tokens", found, expected.float()
