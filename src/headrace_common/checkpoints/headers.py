"""Reads the headers of weight files: names, types and shapes, but no values. It needs no torch."""

import math
import os
import re
from pathlib import Path
from typing import Annotated, Any

import msgspec

from headrace_common.checkpoints.gguf_header import read_gguf
from headrace_common.checkpoints.gguf_names import is_beyond, original_name, vision_name
from headrace_common.checkpoints.gguf_vision import MMPROJ
from headrace_common.checkpoints.small_file import open_regular, unreadable_refused
from headrace_common.checkpoints.spec import ModelSpec
from headrace_common.checkpoints.stacked_tensors import Rows, parts
from headrace_common.errors import ModelError

_KNOWN_TYPES, MXFP4 = ("F32", "F16", "BF16"), "MXFP4"
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "BOOL": 1} | {
    f"{sign}{8 * width}": width for sign in "IU" for width in (1, 2, 4, 8)
}
"""Bytes per value, for each type with a fixed width."""
_MAX_TENSORS = 1 << 19
"""Limit on the number of tensors, per model and per file. The largest models have about 150,000."""
_MAX_NAME = 1 << 10
"""Limit on the length of a tensor's name, in characters."""
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_BUFFERS = re.compile(r"(^|\.)(position_ids|token_type_ids|num_batches_tracked|attn\.bias)$")
"""Integer buffers from old exporters. Models compute these buffers themselves."""
_NESTED = "model.language_model."  # prefix of the text side in multimodal models
VISION = "model.visual."
_MTP = "mtp."  # prefix of the layer that drafts for its model (multi-token prediction)
# The vision and audio sides, and the MTP layer.
_BESIDE = (
    VISION,
    *(
        f"model.{name}"
        for name in (
            *("vision_tower.", "audio_tower.", "vision_embedder.", "multi_modal_projector."),
            *("embed_vision.", "embed_audio."),
        )
    ),
    _MTP,
)


class TensorHeader(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    # Start and end of the tensor's bytes. If `rows` is set, the start is the start of the whole
    # tensor or of the expert's matrix, and the length covers only the rows.
    data_offsets: tuple[int, int]
    file: str = ""
    stored_as: str = ""  # name in the file, if different
    rows: Rows = ()  # row numbers in the stored tensor; empty: all rows
    expert: int | None = None  # index in a stack of experts
    # Whether the expert's matrix is stored transposed.
    is_transposed: bool = False
    scales: tuple[str, str] = ("", "")  # file and name of the scales of an MXFP4 tensor

    @property
    def num_values(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


def read_headers(spec: ModelSpec) -> dict[str, TensorHeader]:
    """Return every tensor by name. Raises ModelError for damaged files and unsupported types."""
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
            f"{where} has more than {_MAX_TENSORS:,} tensors, the limit for a model; download it "
            "again.",
            "model_corrupt",
        )


def count_parameters(spec: ModelSpec) -> int | None:
    """Count a model's weights from the headers of its files; None if a header is damaged."""
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
    """Join the packed values and the scales of each MXFP4 weight into one entry."""
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
        # Row numbers count within the expert's matrix.
        if part.expert is not None:
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
    what = "in fp8" if dtype.startswith("F8_") else "that are quantized or whole numbers"
    return ModelError(
        f"{spec.name} has weights {what} ({tensor} is {dtype}). Supported types: "
        f"{', '.join(_KNOWN_TYPES)}. Use the same model in bfloat16, whose memory --quantize "
        "int8 halves, or as a GGUF file."
    )


def _of_gguf(path: Path, spec: ModelSpec) -> dict[str, TensorHeader]:
    """Return a GGUF file's tensors with the names and shapes of the original checkpoint.

    rope_freqs is left out, because the config contains its values. MTP layers are left out, too.
    """
    headers: dict[str, TensorHeader] = {}
    is_vision = path.name == MMPROJ
    for name, tensor in read_gguf(path).tensors.items():
        if name == "rope_freqs.weight" or is_beyond(name, spec.text_config):
            continue
        original, shape = original_name(name, spec.architecture), tensor.shape
        if is_vision:
            is_swapped = spec.config.get("mmproj_swapped") is True
            original = f"model.{vision_name(name, spec.architecture, is_swapped)}"
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
    """Return the tensors of the text side, named as in a text-only model."""
    return {
        f"model.{name.removeprefix(_NESTED)}" if name.startswith(_NESTED) else name: header
        for name, header in headers.items()
        if not name.startswith(_BESIDE)
    }


def mtp_side(headers: dict[str, TensorHeader]) -> dict[str, TensorHeader]:
    """Return the tensors of the MTP layer, which drafts for its model."""
    return {name: header for name, header in headers.items() if name.startswith(_MTP)}


def beside_text(headers: dict[str, TensorHeader]) -> dict[str, TensorHeader]:
    """Return the tensors of the vision and audio sides."""
    return {
        name: header
        for name, header in headers.items()
        if name.startswith(_BESIDE) and not name.startswith(_MTP)
    }


class _Stored(msgspec.Struct, frozen=True):
    """A tensor as described in a safetensors file. Other keys in the file are ignored."""

    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


@unreadable_refused()
def read_file(path: Path, max_header_bytes: int = 100_000_000) -> dict[str, TensorHeader]:
    """Read the header of one safetensors file. Raises ModelError if the file is damaged.

    The default limit is the same as in the safetensors library. Like the library, this function
    requires that tensors fill the file without gaps or overlaps.
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
    # The header has at least four colons per tensor. So the number of tensors is bounded before the
    # header is parsed.
    _check_number(raw.count(b":") // 4, path.name)
    try:
        content = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        metadata = content.pop("__metadata__", msgspec.Raw(b"null"))
        entry = msgspec.json.Decoder(_Stored)
        stored = {name: entry.decode(it) for name, it in content.items()}
    except (ValueError, RecursionError) as error:
        raise _damaged(path) from error
    if any(len(name) > _MAX_NAME for name in stored):
        raise _damaged(path)
    _check_metadata(path, metadata)
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


def _check_metadata(path: Path, metadata: msgspec.Raw) -> None:
    """Raise ModelError for metadata that the safetensors library would refuse."""
    try:
        msgspec.json.decode(metadata, type=dict[str, str] | None)
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"__metadata__ in {path.name} of {path.parent.name} must be an object of strings; "
            "download the file again, or save it again with the safetensors library.",
            "model_corrupt",
        ) from error


def _damaged(path: Path) -> ModelError:
    return ModelError(
        f"{path.name} of {path.parent.name} is truncated or damaged; download it again.",
        "model_corrupt",
    )
