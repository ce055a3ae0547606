"""The headers of weight files: names, types and shapes; reads no value, without torch."""

import math
import os
import re
from pathlib import Path
from typing import Annotated, Any

import msgspec

from headrace_common.checkpoints.gguf_header import read_gguf
from headrace_common.checkpoints.gguf_names import is_beyond, original_name
from headrace_common.checkpoints.parts import Rows, parts
from headrace_common.checkpoints.small_file import open_regular, unreadable_refused
from headrace_common.checkpoints.spec import ModelSpec
from headrace_common.errors import ModelError

_KNOWN_TYPES, MXFP4 = ("F32", "F16", "BF16"), "MXFP4"
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "BOOL": 1} | {
    f"{sign}{8 * width}": width for sign in "IU" for width in (1, 2, 4, 8)
}
"""Bytes of a value of each type that a file names by its width."""
_MAX_TENSORS = 1 << 19
"""Tensors of a model, and of a file. The largest that are known have some 150,000."""
_MAX_NAME = 1 << 10
"""Characters of a tensor's name."""
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_BUFFERS = re.compile(r"(^|\.)(position_ids|token_type_ids|num_batches_tracked|attn\.bias)$")
"""Whole numbers that old exporters wrote, and every model makes by itself."""
_NESTED = "model.language_model."  # where a model that also sees keeps its text side
VISION = "model.visual."
_BESIDE = (VISION, "mtp.")  # its vision side, and layers that guess several tokens ahead


class TensorHeader(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]  # with `rows`: from the first row of all, as many bytes as own
    file: str = ""
    stored_as: str = ""  # its name in the file, if it has another here
    rows: Rows = ()  # of what is stored; none: all
    expert: int | None = None  # the matrix of a stack
    is_transposed: bool = False  # as stored, of an expert's matrix
    scales: tuple[str, str] = ("", "")  # of MXFP4: the file and the name of their tensor

    @property
    def num_values(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


def read_headers(spec: ModelSpec) -> dict[str, TensorHeader]:
    """Every tensor by name; ModelError if a file is damaged or holds what cannot be computed."""
    headers: dict[str, TensorHeader] = {}
    stored: dict[str, TensorHeader] = {}
    for name in spec.weight_files:
        if name.endswith(".gguf"):
            headers |= _of_gguf(spec.folder / name, spec)
        else:
            stored |= read_file(spec.folder / name)
    for tensor, header in _with_scales(stored).items():
        if _BUFFERS.search(tensor) and header.dtype not in _KNOWN_TYPES:
            continue
        if header.dtype not in (*_KNOWN_TYPES, MXFP4):
            raise _unknown_type(spec, tensor, header.dtype)
        headers |= _taken_apart(tensor, header, spec.config)
        _check_number(len(headers), spec.name)
    return headers


def _check_number(number: int, where: str) -> None:
    if number > _MAX_TENSORS:
        raise ModelError(
            f"{where} has more than {_MAX_TENSORS:,} tensors, which is more than any model that "
            "can be computed; download it again.",
            "model_corrupt",
        )


def count_parameters(spec: ModelSpec) -> int | None:
    """Return how many weights a model's files hold by their headers; None if these are damaged."""
    try:
        if spec.is_gguf:
            files = [read_gguf(spec.folder / name) for name in spec.weight_files]
            number = sum(math.prod(it.shape) for file in files for it in file.tensors.values())
        else:
            number = sum(header.num_values for header in read_headers(spec).values())
    except ModelError:
        return None
    return number if number < 2**63 else None


def _with_scales(headers: dict[str, TensorHeader]) -> dict[str, TensorHeader]:
    """Two tensors that hold one in MXFP4, bytes of two values each and scales, as that one."""
    found = dict(headers)
    for name, blocks in headers.items():
        scales = headers.get(f"{name.removesuffix('_blocks')}_scales")
        if scales is None or not scales.shape or blocks.shape != (*scales.shape, 16):
            continue
        if blocks.dtype != "U8":
            continue
        del found[scales.stored_as]
        shape = (*scales.shape[:-1], 32 * scales.shape[-1])
        place = scales.file, scales.stored_as
        found[name] = msgspec.structs.replace(blocks, dtype=MXFP4, shape=shape, scales=place)
    return found


def _taken_apart(
    name: str, header: TensorHeader, config: dict[str, Any]
) -> dict[str, TensorHeader]:
    found = {}
    for part in parts(name, header.shape, config):
        shape = header.shape if part.expert is None else header.shape[1:]
        shape = shape[::-1] if part.is_transposed else shape
        shape = (len(part.rows) or shape[0], *shape[1:])
        first, end = header.data_offsets
        if part.expert is not None:  # rows are those of its matrix
            first += part.expert * ((end - first) // header.shape[0])
        size = (end - header.data_offsets[0]) * math.prod(shape) // header.num_values
        found[part.name] = msgspec.structs.replace(
            header,
            shape=shape,
            data_offsets=(first, first + size),
            rows=part.rows,
            expert=part.expert,
            is_transposed=part.is_transposed,
        )
    return found or {name: header}


def _unknown_type(spec: ModelSpec, tensor: str, dtype: str) -> ModelError:
    what = "in fp8" if dtype.startswith("F8_") else "quantized or whole numbers"
    return ModelError(
        f"{spec.name} has weights {what} ({tensor} is {dtype}), and {', '.join(_KNOWN_TYPES)} are "
        "computed; use the same model in bfloat16, which --quantize int8 halves, or a GGUF file of "
        "it."
    )


def _of_gguf(path: Path, spec: ModelSpec) -> dict[str, TensorHeader]:
    """Under the original names and shapes; rope_freqs went into the config."""
    headers: dict[str, TensorHeader] = {}
    for name, tensor in read_gguf(path).tensors.items():
        if name == "rope_freqs.weight" or is_beyond(name, spec.config):
            continue
        original, shape = original_name(name, spec.architecture), tensor.shape
        if original.endswith("conv1d.weight"):
            shape = shape[0], 1, *shape[1:]
        elif original.endswith("shared_expert_gate.weight"):
            shape = 1, *shape
        place = tensor.offset, tensor.offset + tensor.num_bytes
        header = TensorHeader(tensor.kind, shape, place, path.name)
        headers |= _taken_apart(original, header, spec.config)
        _check_number(len(headers), path.name)
    return headers


def text_side(headers: dict[str, TensorHeader]) -> dict[str, TensorHeader]:
    """The tensors that text is computed with, by the names they have in a model of text alone."""
    return {
        f"model.{name.removeprefix(_NESTED)}" if name.startswith(_NESTED) else name: header
        for name, header in headers.items()
        if not name.startswith(_BESIDE)
    }


class _Stored(msgspec.Struct, frozen=True):
    """A tensor as a safetensors file describes it. Other keys in the file are ignored."""

    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


@unreadable_refused()
def read_file(path: Path, max_header_bytes: int = 100_000_000) -> dict[str, TensorHeader]:
    """The tensors of one safetensors file; ModelError if it is damaged.

    The default limit is that of the safetensors library, and so is the rule that tensors fill the
    file without a gap and without a byte that two share.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if length > size:
            raise _damaged(path)
        if length > max_header_bytes:
            raise ModelError(
                f"The header of {path.name} has {length:,} bytes; the limit is "
                f"{max_header_bytes:,}.",
                "model_corrupt",
            )
        raw = file.read(length)
    # Each tensor has four colons of its own, so this bounds their number before any is parsed.
    _check_number(raw.count(b":") // 4, path.name)
    try:
        content = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        content.pop("__metadata__", None)
        entry = msgspec.json.Decoder(_Stored)
        stored = {name: entry.decode(it) for name, it in content.items()}
    except (ValueError, RecursionError) as error:
        raise _damaged(path) from error
    if any(len(name) > _MAX_NAME for name in stored):
        raise _damaged(path)
    place = 0
    for it in sorted(stored.values(), key=lambda it: it.data_offsets):
        first, end = it.data_offsets
        width = _BYTES.get(it.dtype)
        if first != place or end < first or (width and end - first != width * math.prod(it.shape)):
            raise _damaged(path)
        place = end
    if size != 8 + length + place:
        raise _damaged(path)
    return {
        name: TensorHeader(it.dtype, it.shape, it.data_offsets, path.name, name)
        for name, it in stored.items()
    }


def _damaged(path: Path) -> ModelError:
    return ModelError(
        f"{path.name} of {path.parent.name} is truncated or damaged; download it again.",
        "model_corrupt",
    )
