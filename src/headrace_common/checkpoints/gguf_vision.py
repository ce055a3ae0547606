"""Reads the vision part of a GGUF model, which llama.cpp stores in a separate file (mmproj).

The file has the architecture `clip`: an image encoder, and a projector that turns the encoder's
output into embeddings of the text model. Nothing in the file is trusted. Each size must be the
size of a tensor in the file, so that the file's own length bounds all sizes.
"""

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headrace_common.checkpoints.gguf_file_names import base_of, quantization_of
from headrace_common.checkpoints.gguf_header import GgufHeader, fields_checked, read_gguf
from headrace_common.errors import ModelError

MMPROJ = "mmproj.gguf"
"""Name of the link to the vision part in the folder that is made for a GGUF model."""
_MAX_HEADER = 16 << 20
_MAX_PIXELS = 1 << 26
_SHOWN_CHARS = 60  # characters of a text from the file in a message
_SIZES = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_heads",
    "block_count": "depth",
    "patch_size": "patch_size",
}
"""The fields below `clip.vision.`, and the config key for each field."""
_QWEN_PIXELS = (1 << 16, 1 << 24)
"""The smallest and the largest image in pixels, as in the published settings of Qwen3.5."""
_QWEN_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_QWEN_SECTIONS = [11, 11, 10]
_NOT_TEXT = ("architectures", "rope_scaling")


_GEMMA3_FACTOR = 4
_GEMMA3_IMAGES = ("<image_soft_token>", "<unused99>")


class VisionParts(NamedTuple):
    """A model's config with its vision part, and settings of image processor and tokenizer."""

    config: dict[str, Any]
    files: dict[str, dict[str, Any]]


def is_mmproj(name: str) -> bool:
    """Whether a file of this name is the vision part of a model, by llama.cpp's convention."""
    return name.lower().startswith("mmproj") and name.endswith(".gguf")


def mmproj_files(folder: Path) -> list[Path]:
    """Return the vision parts in a folder by name; none if the folder cannot be read."""
    try:
        return [folder / name for name in sorted(os.listdir(folder)) if is_mmproj(name)]
    except OSError:
        return []


def best_mmproj(sizes: Mapping[str, int], model: str) -> str | None:
    """Return which of several vision parts, given with their sizes, belongs to a GGUF file.

    Files whose names differ only in the quantization are the same part; of these, the F16 file is
    returned, or else the smallest. If there are different parts, only a part whose name contains
    the model's name is certain to belong to the file. Returns None if no part is certain.
    """
    if len({base_of(name) for name in sizes}) > 1:
        own = base_of(model).lower()
        sizes = {name: size for name, size in sizes.items() if own in name.lower()}
        if len({base_of(name) for name in sizes}) != 1:
            return None
    return min(sizes, key=lambda it: (quantization_of(it) != "F16", sizes[it], it), default=None)


def is_used_unnamed(architecture: str) -> bool:
    """Return whether a GGUF model of this architecture uses a vision part that was only found."""
    projectors = _PROJECTORS.values()
    return any(architecture in it.families and not it.must_be_named for it in projectors)


def find_mmproj(model: Path, setting: str) -> Path | None:
    """Return the vision part of a GGUF file: the file in `setting`, or the one beside the file.

    `setting` is a path, or the name of a file in the folder of the GGUF file. Raises ModelError if
    there is no such file.
    """
    if setting == "none":
        return None
    if setting == "auto":
        sizes = {path.name: _size_of(path) for path in mmproj_files(model.parent)}
        best = best_mmproj(sizes, model.name)
        return model.parent / best if best else None
    path = os.path.abspath(os.path.expanduser(setting))
    if not os.path.isfile(path) and os.path.isfile(model.parent / setting):
        path = str(model.parent / setting)
    if not os.path.isfile(path):
        raise ModelError(
            f"--mmproj: there is no file {setting!r}. Give the path of the model's mmproj file, or "
            "omit --mmproj to serve text only.",
            "model_not_found",
        )
    return Path(path)


def _size_of(path: Path) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def refuse_mmproj(header: GgufHeader, path: Path) -> None:
    """Raise ModelError if a file is only the vision part of a model."""
    if header.architecture == "clip":
        raise ModelError(
            f"{path.name} is only the vision part of a model. Serve the model's own GGUF file, and "
            f"add --mmproj {path.name}."
        )


def add_vision(config: dict[str, Any], text: GgufHeader, path: Path, is_named: bool) -> VisionParts:
    """Add the vision part at `path` to the config of a text model.

    If the vision part cannot be used and the user named it (`is_named`), raises ModelError. If the
    user did not name it, returns a config that contains the reason; the model then serves text.
    """
    try:
        with fields_checked():
            found = _read_vision(config, text, path, is_named)
    except ModelError as error:
        if is_named:
            raise
        return VisionParts(config | {"mmproj": path.name, "mmproj_unused": str(error)}, {})
    return VisionParts(found.config | {"mmproj": path.name}, found.files)


def _read_vision(
    config: dict[str, Any], text: GgufHeader, path: Path, is_named: bool
) -> VisionParts:
    if reason := config.get("only_llama_cpp"):
        raise ModelError(
            f"This model runs in llama.cpp, and Headrace passes no images to llama.cpp. {reason}"
        )
    vision = read_gguf(path, _MAX_HEADER)
    if vision.architecture != "clip":
        raise ModelError(
            f"{path.name} is not the vision part of a model: its architecture is "
            f"{_shown(vision.architecture)} instead of clip. Give the model's mmproj file."
        )
    fields = vision.fields
    kind = fields.get("clip.vision.projector_type") or fields.get("clip.projector_type")
    projector = _PROJECTORS.get(str(kind))
    if projector is None or text.architecture not in projector.families:
        known = " and ".join(f"{it.label} ({name})" for name, it in _PROJECTORS.items())
        raise ModelError(
            f"{path.name} has the projector {_shown(kind)}, which is not supported for the "
            f"architecture {_shown(text.architecture)}; supported: {known}. Use the model's "
            "safetensors files, or serve text only with --mmproj none."
        )
    made, wanted = _shape(vision, path, projector.output)[projector.axis], config["hidden_size"]
    if made != wanted:
        raise ModelError(
            f"{path.name} makes embeddings of {made:,} numbers, but the text model's embeddings "
            f"have {wanted:,}: the files belong to different models. Use the mmproj file that was "
            "published with the model."
        )
    if projector.must_be_named and not is_named:
        raise ModelError(
            f"{projector.label} reads images only in transformers, with all its weights unpacked "
            f"to 2 bytes each. To read images, add --mmproj {path.name}."
        )
    return projector.read(config, text, vision, path)


def _read_qwen(
    config: dict[str, Any], text: GgufHeader, vision: GgufHeader, path: Path
) -> VisionParts:
    """Read the encoder of Qwen3.5, whose projector merges neighbouring patches."""
    fields = vision.fields
    sizes = _sizes(vision, path)
    merge = fields.get("clip.vision.spatial_merge_size", 2)
    if not isinstance(merge, int) or merge < 1:
        raise _corrupt(path, "clip.vision.spatial_merge_size is invalid")
    if any(fields.get("clip.vision.is_deepstack_layers") or ()):
        raise ModelError(
            f"{path.name} feeds several layers of the text model (deepstack), which Qwen3.5 does "
            "not do. Use the mmproj file that was published with the model."
        )
    hidden, patch = sizes["hidden_size"], sizes["patch_size"]
    num_cells = _shape(vision, path, "v.position_embd.weight")[0]
    joined = hidden * merge * merge
    expected = {
        "v.patch_embd.weight": (hidden, 3, patch, patch),
        "v.patch_embd.weight.1": (hidden, 3, patch, patch),
        "v.position_embd.weight": (math.isqrt(num_cells) ** 2, hidden),
        "v.blk.0.ffn_up.weight": (sizes["intermediate_size"], hidden),
        "mm.0.weight": (joined, joined),
        "mm.2.weight": (config["hidden_size"], joined),
    }
    _check_shapes(vision, path, expected)
    # The rotation of a head has two axes of the same size, and each axis needs pairs.
    if hidden % (4 * sizes["num_heads"]):
        raise _corrupt(path, f"{hidden} numbers cannot be shared by {sizes['num_heads']} heads")
    moe = "_moe" if text.architecture == "qwen35moe" else ""
    own = {
        "architectures": [f"Qwen3_5{moe.title().replace('_', '')}ForConditionalGeneration"],
        "model_type": f"qwen3_5{moe}",
        "text_config": _qwen_text(config, text) | {"model_type": f"qwen3_5{moe}_text"},
        "vision_config": sizes
        | {
            "model_type": f"qwen3_5{moe}_vision",
            "spatial_merge_size": merge,
            "temporal_patch_size": 2,
            "out_hidden_size": config["hidden_size"],
            "num_position_embeddings": num_cells,
        },
        "dtype": config["dtype"],
        "tie_word_embeddings": config["tie_word_embeddings"],
    }
    for key, token in _QWEN_TOKENS.items():
        own[key] = _token_id(text, token)
    smallest, largest = _pixels(fields, path, _QWEN_PIXELS)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "patch_size": patch,
        "temporal_patch_size": 2,
        "merge_size": merge,
        "size": {"shortest_edge": smallest, "longest_edge": largest},
        **_colours(fields, path),
    }
    return VisionParts(own, {"preprocessor_config.json": processor})


def _qwen_text(config: dict[str, Any], text: GgufHeader) -> dict[str, Any]:
    """Return the config of the text side, whose positions have three axes."""
    sections = text.own("rope.dimension_sections", _QWEN_SECTIONS)[:3]
    share = config.get("partial_rotary_factor", 0.25)
    if not all(isinstance(size, int) and size >= 0 for size in sections):
        raise ValueError("an axis has an invalid size")
    rope = {
        "rope_type": "default",
        "rope_theta": config.get("rope_theta", 10_000.0),
        "partial_rotary_factor": share,
        "mrope_section": sections,
        "mrope_interleaved": True,
    }
    own = {key: value for key, value in config.items() if key not in _NOT_TEXT}
    return own | {"rope_parameters": rope | config.get("rope_scaling", {})}


def _read_gemma3(
    config: dict[str, Any], text: GgufHeader, vision: GgufHeader, path: Path
) -> VisionParts:
    """Read the encoder of Gemma 3 (SigLIP), whose projector averages squares of patches."""
    fields = vision.fields
    sizes = _sizes(vision, path)
    hidden, patch, wide = sizes["hidden_size"], sizes["patch_size"], sizes["intermediate_size"]
    side = math.isqrt(_shape(vision, path, "v.position_embd.weight")[0])
    factor = fields.get("clip.vision.projector.scale_factor", _GEMMA3_FACTOR)
    if not isinstance(factor, int) or factor < 1 or side % factor or hidden % sizes["num_heads"]:
        raise _corrupt(path, f"{side} x {side} patches cannot be averaged by {factor}")
    is_swapped = _shape(vision, path, "v.blk.0.ffn_down.weight") == (wide, hidden) != (hidden, wide)
    up = "ffn_down" if is_swapped else "ffn_up"
    expected = {
        "v.patch_embd.weight": (hidden, 3, patch, patch),
        "v.position_embd.weight": (side * side, hidden),
        f"v.blk.0.{up}.weight": (wide, hidden),
        "mm.soft_emb_norm.weight": (hidden,),
        "mm.input_projection.weight": (hidden, config["hidden_size"]),
    }
    _check_shapes(vision, path, expected)
    num_rows = (side // factor) ** 2
    tokens = _gemma3_tokens(text)
    own = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {key: it for key, it in config.items() if key != "architectures"}
        | {
            "model_type": "gemma3_text",
            "query_pre_attn_scalar": int(config["query_pre_attn_scalar"]),
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": hidden,
            "intermediate_size": wide,
            "num_hidden_layers": sizes["depth"],
            "num_attention_heads": sizes["num_heads"],
            "patch_size": patch,
            "image_size": side * patch,
            "vision_use_head": False,
        },
        "mm_tokens_per_image": num_rows,
        **{f"{key}_index": _token_id(text, token) for key, token in tokens.items()},
        "mmproj_swapped": is_swapped,
        "dtype": config["dtype"],
        "tie_word_embeddings": config["tie_word_embeddings"],
    }
    size = {"height": side * patch, "width": side * patch}
    images = {"image_processor_type": "Gemma3ImageProcessor", "size": size}
    processor = {
        "processor_class": "Gemma3Processor",
        "image_processor": images | _colours(fields, path),
        "image_seq_length": num_rows,
    }
    return VisionParts(own, {"processor_config.json": processor, "tokenizer_config.json": tokens})


def _gemma3_tokens(text: GgufHeader) -> dict[str, str]:
    """Return the tokens around an image, and the token that stands for an image.

    Some GGUF files lack that token, because its id follows the vocabulary. An unused token then
    replaces it.
    """
    tokens = text.fields["tokenizer.ggml.tokens"]
    image = next((it for it in _GEMMA3_IMAGES if it in tokens), _GEMMA3_IMAGES[0])
    return {"image_token": image, "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}


class _Projector(NamedTuple):
    label: str
    families: tuple[str, ...]
    # The tensor that makes the embeddings, and its axis that is as long as an embedding.
    output: str
    axis: int
    # Whether the user must name the file, because reading images takes much more memory.
    must_be_named: bool
    read: Callable[[dict[str, Any], GgufHeader, GgufHeader, Path], VisionParts]


_PROJECTORS = {
    "qwen3vl_merger": _Projector(
        "Qwen3.5", ("qwen35", "qwen35moe"), "mm.2.weight", 0, False, _read_qwen
    ),
    "gemma3": _Projector(
        "Gemma 3", ("gemma3",), "mm.input_projection.weight", 1, True, _read_gemma3
    ),
}


def _sizes(vision: GgufHeader, path: Path) -> dict[str, int]:
    found = {}
    for theirs, ours in _SIZES.items():
        size = vision.fields.get(f"clip.vision.{theirs}")
        if not isinstance(size, int) or size < 1:
            raise _corrupt(path, f"clip.vision.{theirs} is missing or invalid")
        found[ours] = size
    if found["depth"] > len(vision.tensors):
        raise _corrupt(path, "it has fewer tensors than layers")
    return found


def _shape(vision: GgufHeader, path: Path, name: str) -> tuple[int, ...]:
    if name not in vision.tensors or 0 in vision.tensors[name].shape:
        raise _corrupt(path, f"the tensor {name} is missing or empty")
    return vision.tensors[name].shape


def _check_shapes(vision: GgufHeader, path: Path, expected: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in expected.items():
        if (found := _shape(vision, path, name)) != shape:
            raise _corrupt(path, f"{name} has the shape {list(found)} instead of {list(shape)}")


def _token_id(text: GgufHeader, token: str) -> int:
    tokens: list[str] = text.fields["tokenizer.ggml.tokens"]
    if token not in tokens:
        raise ModelError(
            f"The text model has no token {token}, which stands for an image. Use a GGUF file of "
            "the model that reads images."
        )
    return tokens.index(token)


def _pixels(fields: Mapping[str, Any], path: Path, usual: tuple[int, int]) -> tuple[int, int]:
    names = ("image_min_pixels", "image_max_pixels")
    smallest, largest = (
        fields.get(f"clip.vision.{name}", size) for name, size in zip(names, usual, strict=True)
    )
    if not 1 <= smallest <= largest <= _MAX_PIXELS:
        raise _corrupt(path, f"images of {smallest} to {largest} pixels are not possible")
    return smallest, largest


def _colours(fields: Mapping[str, Any], path: Path) -> dict[str, list[float]]:
    """Return the mean and the deviation of each colour, to which images are normalized."""
    found = {}
    for name in ("image_mean", "image_std"):
        values = [float(value) for value in fields.get(f"clip.vision.{name}", [0.5] * 3)]
        is_sound = len(values) == 3 and all(0 <= value <= 1 for value in values)
        if not is_sound or (name == "image_std" and min(values) < 1e-3):
            raise _corrupt(path, f"clip.vision.{name} is invalid")
        # The file stores four bytes, and Python reads the mean 0.48 as 0.479999989.
        found[name] = [round(value, 7) for value in values]
    return found


def _shown(text: object) -> str:
    return ascii(str(text)[:_SHOWN_CHARS])[1:-1]


def _corrupt(path: Path, fault: str) -> ModelError:
    return ModelError(f"{path.name} cannot be used: {fault}; download it again.", "model_corrupt")
