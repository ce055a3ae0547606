"""The headers of weight files: names, types and shapes; reads no value, without torch."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec

from headrace.checkpoints.gguf_header import read_gguf
from headrace.checkpoints.gguf_names import expert_names, original_name
from headrace.checkpoints.spec import ModelSpec
from headrace.core.errors import ModelError

_KNOWN_TYPES = ("F32", "F16", "BF16")
_BUFFERS = re.compile(r"(^|\.)(position_ids|token_type_ids|num_batches_tracked|attn\.bias)$")
"""Whole numbers that old exporters wrote, and every model makes by itself."""
_NESTED = "model.language_model."  # where a model that also sees keeps its text side
_MAX_EXPERTS = 4096  # of a layer; a stack of more is not taken apart, so nobody knows it
VISION = "model.visual."
_BESIDE = (VISION, "mtp.")  # its vision side, and layers that guess several tokens ahead


class TensorHeader(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]
    file: str = ""
    stored_as: str = ""  # its name in the file, if it has another here

    @property
    def num_values(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


def read_headers(spec: ModelSpec) -> dict[str, TensorHeader]:
    """Every tensor by name; ModelError if a file is damaged or holds what cannot be computed."""
    headers: dict[str, TensorHeader] = {}
    for name in spec.weight_files:
        if name.endswith(".gguf"):
            headers |= _of_gguf(spec.folder / name, spec.architecture)
            continue
        for tensor, header in _read_file(spec.folder / name).items():
            if _BUFFERS.search(tensor) and header.dtype not in _KNOWN_TYPES:
                continue
            if header.dtype not in _KNOWN_TYPES:
                raise _unknown_type(spec, tensor, header.dtype)
            headers[tensor] = header
    return headers


def _unknown_type(spec: ModelSpec, tensor: str, dtype: str) -> ModelError:
    what = "in fp8" if dtype.startswith("F8_") else "quantized or whole numbers"
    return ModelError(
        f"{spec.name} has weights {what} ({tensor} is {dtype}), and {', '.join(_KNOWN_TYPES)} are "
        "computed; use the same model in bfloat16, which --quantize int8 halves, or a GGUF file of "
        "it."
    )


def _of_gguf(path: Path, architecture: str) -> dict[str, TensorHeader]:
    """Under the original names, each expert of a stack apart; rope_freqs went into the config."""
    headers = {}
    for name, tensor in read_gguf(path).tensors.items():
        if name == "rope_freqs.weight":
            continue
        names, shape = [original_name(name, architecture)], tensor.shape
        is_stack = len(shape) == 3 and shape[0] <= _MAX_EXPERTS
        if is_stack and (experts := expert_names(name, shape[0])):
            names, shape = experts, shape[1:]
        size = tensor.num_bytes // len(names)
        for number, own in enumerate(names):
            first = tensor.offset + number * size
            headers[own] = TensorHeader(tensor.kind, shape, (first, first + size), path.name)
    return headers


def text_side(headers: dict[str, TensorHeader]) -> dict[str, TensorHeader]:
    """The tensors that text is computed with, by the names they have in a model of text alone."""
    return {
        f"model.{name.removeprefix(_NESTED)}" if name.startswith(_NESTED) else name: header
        for name, header in headers.items()
        if not name.startswith(_BESIDE)
    }


def _read_file(path: Path) -> dict[str, TensorHeader]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        raw = file.read(length) if length <= size else b""
    try:
        content: dict[str, Any] = json.loads(raw)
        content.pop("__metadata__", None)
        for name, entry in content.items():
            entry |= {"file": path.name, "stored_as": name}
        headers = msgspec.convert(content, dict[str, TensorHeader])
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path) from error
    end = max((header.data_offsets[1] for header in headers.values()), default=0)
    if size != 8 + length + end:
        raise _damaged(path)
    return headers


def _damaged(path: Path) -> ModelError:
    return ModelError(
        f"{path.name} of {path.parent.name} is truncated or damaged; download it again.",
        "model_corrupt",
    )
