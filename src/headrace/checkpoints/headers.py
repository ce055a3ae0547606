"""What the weight files say they hold; reads their headers and not a value, without torch."""

import json
from pathlib import Path
from typing import Any

import msgspec

from headrace.checkpoints.spec import ModelSpec
from headrace.core.errors import ModelError

_KNOWN_TYPES = ("F32", "F16", "BF16")


class TensorHeader(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]
    file: str = ""

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
        for tensor, header in _read_file(spec.folder / name).items():
            if header.dtype not in _KNOWN_TYPES:
                raise ModelError(
                    f"Tensor {tensor} of {spec.name} has the type {header.dtype}; "
                    f"only {', '.join(_KNOWN_TYPES)} are supported."
                )
            headers[tensor] = header
    return headers


def _read_file(path: Path) -> dict[str, TensorHeader]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        raw = file.read(length) if length <= size else b""
    try:
        content: dict[str, Any] = json.loads(raw)
        content.pop("__metadata__", None)
        for entry in content.values():
            entry["file"] = path.name
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
