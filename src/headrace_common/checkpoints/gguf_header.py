"""Reads the header of a GGUF file: its fields and tensor offsets, but no values. It needs no torch.

The layout is defined by ggml's docs/gguf.md, versions 2 and 3, little endian. Every count and
length is checked against the remaining bytes before anything is read or allocated.
"""

import contextlib
import mmap
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from headrace_common.checkpoints.small_file import open_regular, unreadable_refused
from headrace_common.errors import ModelError

TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
    39: ("MXFP4", 32, 17),
}
"""The supported tensor types: name, values per group, bytes per group."""
OTHER_TYPES: dict[int, tuple[str, int, int]] = {
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
"""Types with known sizes and with values that only llama.cpp can read."""
_ALL_TYPES = TYPES | OTHER_TYPES

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_DEPTH = 4  # levels of nested arrays
_MAX_RANK = 4
_MAX_NAME = 1 << 10  # bytes of a tensor's name; llama.cpp's limit is 63
_MAX_TENSORS = 1 << 19
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class GgufTensor(msgspec.Struct, frozen=True):
    """A tensor of the file. `shape` has torch's order, outermost dimension first.

    `offset` counts from the start of the file.
    """

    kind: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    file: str


class GgufHeader(msgspec.Struct, frozen=True):
    fields: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.fields.get("general.architecture"))

    def own(self, key: str, default: Any = None) -> Any:
        """Return the field whose key is the architecture's name, a dot and `key`."""
        return self.fields.get(f"{self.architecture}.{key}", default)


@unreadable_refused()
def read_gguf(path: Path, max_bytes: int = sys.maxsize) -> GgufHeader:
    """Read the header of one file.

    Raises ModelError if the file is damaged or has an unsupported type. A header of more than
    `max_bytes` counts as damaged.
    """
    with open_regular(path) as file:
        try:
            content: Any = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            # mmap refuses an empty file.
            raise _damaged(path) from None
        with content:
            try:
                return _HeadReader(content, path.name, max_bytes).header()
            except (struct.error, UnicodeDecodeError, _DamageError):
                raise _damaged(path) from None


def parts(path: Path) -> list[Path]:
    """Return all files of a model in order, including `path`.

    Raises ModelError if a file is missing.
    """
    found = _PART.fullmatch(path.name)
    if not found:
        return [path]
    stem, count = found[1], int(found[3])
    files = [path.with_name(f"{stem}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)]
    for file in files:
        if not file.is_file():
            raise ModelError(
                f"{path.name} is one of {count} files, and {file.name} is missing; download the "
                "missing file.",
                "model_corrupt",
            )
    return files


def is_later_part(path: Path) -> bool:
    found = _PART.fullmatch(path.name)
    return bool(found) and int(found[2]) != 1  # type: ignore[index]


@contextlib.contextmanager
def fields_checked() -> Iterator[None]:
    """Raise ModelError if a field of the file has a wrong type or an unsuitable value."""
    try:
        yield
    except (TypeError, ValueError, ArithmeticError, LookupError, struct.error) as error:
        raise ModelError(
            "A field of the GGUF file is missing or invalid; download it again.", "model_corrupt"
        ) from error


class _DamageError(Exception):
    """The header contains something impossible."""


class _HeadReader:
    def __init__(self, content: mmap.mmap, name: str, max_bytes: int) -> None:
        self._content, self._name, self._place = content, name, 0
        self._end = min(len(content), max_bytes)

    def header(self) -> GgufHeader:
        magic, version = self._unpack("4sI")
        if magic != b"GGUF":
            raise _DamageError
        if version not in (2, 3):
            raise ModelError(
                f"{self._name} has GGUF version {version}, but only 2 and 3 are supported; "
                "convert the model again with a current llama.cpp."
            )
        num_tensors, num_fields = self._unpack("QQ")
        self._expect(num_tensors, 24)
        if num_tensors > _MAX_TENSORS:
            raise _DamageError
        self._expect(num_fields, 12)
        fields = {}
        for _ in range(num_fields):
            key = self._string()
            fields[key] = self._value(self._unpack("I")[0])
        described = [self._tensor() for _ in range(num_tensors)]
        alignment = fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise _DamageError
        start = -(-self._place // alignment) * alignment
        tensors = {
            name: self._placed(name, sizes, kind, start + offset)
            for name, sizes, kind, offset in described
        }
        if len(tensors) != num_tensors:
            raise _DamageError
        return GgufHeader(fields, tensors)

    def _tensor(self) -> tuple[str, list[int], int, int]:
        name = self._string()
        if len(name) > _MAX_NAME:
            raise _DamageError
        (rank,) = self._unpack("I")
        if rank > _MAX_RANK:
            raise _DamageError
        sizes = list(self._unpack(f"{rank}Q"))
        kind, offset = self._unpack("IQ")
        return name, sizes, kind, offset

    def _placed(self, name: str, sizes: list[int], kind: int, offset: int) -> GgufTensor:
        if kind not in _ALL_TYPES:
            raise ModelError(
                f"Tensor {name} of {self._name} has GGML's type {kind}, which is not "
                "supported; use a file with supported types, such as "
                f"{', '.join(e[0] for e in TYPES.values())}."
            )
        label, group, group_bytes = _ALL_TYPES[kind]
        count = 1
        for size in sizes:
            count *= size
        num_bytes = count // group * group_bytes
        if not sizes or sizes[0] % group or offset + num_bytes > len(self._content):
            raise _DamageError
        shape = tuple(reversed(sizes))
        return GgufTensor(label, shape, offset, num_bytes, self._name)

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self._unpack(_SCALARS[kind])[0]
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY or depth == _DEPTH:
            raise _DamageError
        kind, count = self._unpack("IQ")
        if kind in _SCALARS:
            self._expect(count, struct.calcsize(_SCALARS[kind]))
            return list(self._unpack(f"{count}{_SCALARS[kind]}"))
        self._expect(count, 8)
        return [self._value(kind, depth + 1) for _ in range(count)]

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        self._expect(length, 1)
        start, self._place = self._place, self._place + length
        return self._content[start : self._place].decode()

    def _unpack(self, form: str) -> tuple[Any, ...]:
        self._expect(1, size := struct.calcsize(f"<{form}"))
        found = struct.unpack_from(f"<{form}", self._content, self._place)
        self._place += size
        return found

    def _expect(self, count: int, size: int) -> None:
        """Raise if `count` items of at least `size` bytes exceed the rest of the header."""
        if count * size > self._end - self._place:
            raise _DamageError


def _damaged(path: Path) -> ModelError:
    return ModelError(
        f"{path.name} is not a complete GGUF file: it is truncated or damaged; download it again.",
        "model_corrupt",
    )
