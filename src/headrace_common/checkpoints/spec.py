"""Reads the facts about a model from the model's folder, without weights and without torch."""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec

from headrace_common.checkpoints.gguf_vision import MMPROJ
from headrace_common.checkpoints.small_file import read_small
from headrace_common.errors import ModelError

_POSITION_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length")
_PLACEHOLDERS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
_OTHERS = {
    "adapter_config.json": "an adapter (LoRA), which is not served by itself: serve its base "
    "model{base} with --adapter NAME=FOLDER.",
    "modules.json": "a model of sentence-transformers whose stages are stored in separate "
    "folders ({stages}), which is not supported; use a model that has "
    "config.json next to modules.json.",
    "open_clip_config.json": "a CLIP model for OpenCLIP, which cannot be served because it "
    "generates no text; use a language, embedding or image-text model.",
    "model_index.json": "a pipeline of diffusers, which generates images and cannot be served; use "
    "a language or embedding model.",
}
"""Descriptions of folders that cannot be served, by the name of a file in such a folder."""
_MAX_POSITIONS = 1 << 53
_UNBOUNDED = ("time_step_limit",)
"""Fields that may be infinite. Mamba's configs use infinity for a step without an upper bound."""
_LAYERS = (
    *("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "num_decoder_layers"),
    *("encoder_layers", "decoder_layers", "num_encoder_layers"),
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Limit on the layers, and on the experts in a layer. The largest known models have 128 layers
# and 512 experts.
_MAX_COUNT = 4096
# Limit on the experts in all layers. The largest known models have about 25,000.
_MAX_EXPERTS = 1 << 16
_SHOWN_CHARS = 100  # characters of a name in a message
_PICKLED = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")

SEEING = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")
"""Vision-language architectures with a native implementation."""


_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class _RopeJson(msgspec.Struct):
    factor: float | None = None
    original_max_position_embeddings: float | None = None
    rope_type: str | None = None
    type: str | None = None


class _ConfigJson(msgspec.Struct):
    """The types of the keys that are read from config.json or from `text_config` in config.json."""

    architectures: list[str] | None = None
    text_config: dict[str, Any] | None = None
    quantization_config: dict[str, Any] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    eos_token_id: int | list[int] | None = None
    rope_scaling: _RopeJson | None = None
    rope_parameters: _RopeJson | None = None
    max_position_embeddings: int | None = None
    n_positions: int | None = None
    n_ctx: int | None = None
    max_sequence_length: int | None = None


class Defaults(msgspec.Struct, frozen=True):
    """The sampling parameters that a model recommends. The ranges are the same as in requests.

    A parameter is None if the model does not recommend a value.
    """

    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    top_p: _Share | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    min_p: _Share | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=10)] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None


class ModelSpec(msgspec.Struct, frozen=True):
    """The facts in config.json and generation_config.json, and the names of the weight files."""

    folder: Path
    architecture: str
    vocab_size: int
    # None: the model sets no limit.
    max_positions: int | None
    end_token_ids: tuple[int, ...]
    defaults: Defaults
    dtype: str
    weight_files: tuple[str, ...]
    config: dict[str, Any]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def text_config(self) -> dict[str, Any]:
        """The settings of the text side; for most models, these are all settings."""
        return self.config.get("text_config") or self.config

    @property
    def is_gguf(self) -> bool:
        return any(name.endswith(".gguf") for name in self.weight_files)

    @property
    def has_processor(self) -> bool:
        return has_processor(self.folder)

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """Tokens that stand for images and other media."""
        found = (self.config.get(name) for name in _PLACEHOLDERS)
        return tuple(token_id for token_id in found if isinstance(token_id, int))

    @property
    def has_source(self) -> bool:
        """Whether the model is an encoder-decoder, whose encoder processes the prompt."""
        return self.config.get("is_encoder_decoder") is True


def has_processor(folder: Path) -> bool:
    """Whether the folder has settings for preparing images."""
    names = ("preprocessor_config.json", "processor_config.json")
    return any(os.path.isfile(folder / name) for name in names)


def read_spec(folder: Path) -> ModelSpec:
    """Read and check a model's folder. Raises ModelError with the fault and the remedy."""
    if not folder.is_dir():
        raise ModelError(
            f"There is no model folder named {folder.name}; use another folder or a hub id.",
            "model_not_found",
        )
    config = _read_json(folder, "config.json")
    generation = {}
    if (folder / "generation_config.json").is_file():
        generation = _read_json(folder, "generation_config.json")
    _check_types(folder, "config.json", config)
    _check_types(folder, "generation_config.json", {"eos_token_id": generation.get("eos_token_id")})
    text = config.get("text_config") or config
    _check_types(folder, "config.json", text)
    _check_counts(folder, config)
    _refuse_quantized(folder, config)
    return ModelSpec(
        folder=folder,
        architecture=_architecture(folder, config),
        vocab_size=_vocab_size(folder, text),
        max_positions=_max_positions(text),
        end_token_ids=tuple(
            # Ignore ids outside the vocabulary, often -1, because no token has such an id.
            token_id
            for token_id in _end_token_ids(generation, config, text)
            if 0 <= token_id < _vocab_size(folder, text)
        ),
        defaults=_defaults(folder, generation),
        dtype=config.get("dtype")
        or config.get("torch_dtype")
        or text.get("dtype")
        or ("bfloat16" if is_mxfp4(config) else "float32"),
        weight_files=_weight_files(folder, config),
        config=config,
    )


def refuse_others(folder: Path, given: str) -> None:
    """Raise ModelError if the folder contains something other than a model.

    The message says what the folder contains.
    """
    for name, words in _OTHERS.items():
        if (folder / name).is_file() and not (folder / "config.json").is_file():
            stated = _stated(folder / name)
            base = stated.get("base_model_name_or_path") if isinstance(stated, dict) else None
            modules = stated if isinstance(stated, list) else []
            paths = [one.get("path") for one in modules if isinstance(one, dict)]
            stages = ", ".join(path for path in paths if isinstance(path, str) and path)
            shown = {
                "base": f" {base}" if base else "",
                "stages": stages or "see modules.json",
            }
            raise ModelError(f"{given} is {words.format(**shown)}")


def _stated(path: Path) -> Any:
    try:
        return _parsed(path)
    except (OSError, ValueError, RecursionError):
        return None


def _parsed(path: Path) -> Any:
    """Parse a JSON file.

    Raises OSError if the file cannot be read, and ValueError or RecursionError for invalid JSON.
    """
    content = json.loads(read_small(path))
    # Python's parser accepts half of a surrogate pair, which cannot be encoded later.
    json.dumps(content, ensure_ascii=False).encode()
    return content


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    if not path.is_file():
        refuse_others(folder, folder.name)
        raise ModelError(f"{folder.name} has no {name}; it is not a model folder.", "model_corrupt")
    try:
        content = _parsed(path)
    except OSError as error:
        raise ModelError(
            f"{name} of {folder.name} cannot be read ({error.strerror}); download it again.",
            "model_corrupt",
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"{name} of {folder.name} is not JSON; download it again.", "model_corrupt"
        ) from error
    if not isinstance(content, dict):
        raise ModelError(
            f"{name} of {folder.name} is not an object; download it again.", "model_corrupt"
        )
    _check_finite(folder, name, content)
    return content


def _check_finite(folder: Path, name: str, content: dict[str, Any]) -> None:
    """Raise ModelError if a number in a file is infinite, NaN or too large for a float."""
    waiting: list[tuple[str, Any]] = [*content.items()]
    while waiting:
        key, value = waiting.pop()
        if key in _UNBOUNDED:
            continue
        if isinstance(value, dict):
            waiting += value.items()
        elif isinstance(value, list):
            waiting += ((key, one) for one in value)
        elif isinstance(value, int | float) and not _is_finite(value):
            shown = ascii(key[:_SHOWN_CHARS])[1:-1]
            raise ModelError(
                f"{name} of {folder.name} has a {shown} that is not a finite number; download it "
                "again.",
                "model_corrupt",
            )


def _check_counts(folder: Path, config: dict[str, Any]) -> None:
    """Raise ModelError if the config states too many layers or experts.

    A model is built from these numbers before any weight is read. So large numbers alone could
    exhaust memory.
    """
    layers, experts = _largest(config, _LAYERS), _largest(config, _EXPERTS)
    for key, most in (layers, experts):
        if most > _MAX_COUNT:
            raise ModelError(
                f"config.json of {folder.name} has a {key} of {most:,}; the limit is "
                f"{_MAX_COUNT:,}. Download it again.",
                "model_corrupt",
            )
    if (product := layers[1] * experts[1]) > _MAX_EXPERTS:
        raise ModelError(
            f"config.json of {folder.name} has {product:,} experts in all its layers; the limit is "
            f"{_MAX_EXPERTS:,}. Download it again.",
            "model_corrupt",
        )


def _largest(config: dict[str, Any], keys: tuple[str, ...]) -> tuple[str, int]:
    """Return the key with the largest number among these keys, and the number.

    Searches the config and the dictionaries in the config.
    """
    configs = [config, *(it for it in config.values() if isinstance(it, dict))]
    found = [(key, it[key]) for it in configs for key in keys if isinstance(it.get(key), int)]
    return max(found, key=lambda one: one[1], default=("", 0))


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    # The whole number is too large for a float.
    except OverflowError:
        return False


def _check_types(folder: Path, name: str, config: dict[str, Any]) -> None:
    try:
        msgspec.convert(config, _ConfigJson)
    except msgspec.ValidationError as error:
        place = str(error).rpartition("`$.")[2].rstrip("`")
        raise ModelError(
            f"{name} of {folder.name} has a {place} of the wrong type; download it again.",
            "model_corrupt",
        ) from error


def _architecture(folder: Path, config: dict[str, Any]) -> str:
    names = config.get("architectures") or []
    if len(names) != 1 or not isinstance(names[0], str):
        raise ModelError(
            f"config.json of {folder.name} must name one architecture; it names {len(names)}.",
            "model_corrupt",
        )
    return names[0]


def _vocab_size(folder: Path, text: dict[str, Any]) -> int:
    size = text.get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise ModelError(
            f"config.json of {folder.name} has no valid vocab_size: the model does not process "
            "text, or the file is damaged; use a language or embedding model, or download the "
            "model again.",
            "model_corrupt",
        )
    return size


def _max_positions(text: dict[str, Any]) -> int | None:
    """Return the length of the model's longest sequence, or None if the config states no limit.

    With YaRN, the result is at least the original length times the factor, because
    max_position_embeddings may state a shorter length.
    """
    stated = next((text[key] for key in _POSITION_KEYS if (text.get(key) or 0) > 0), None)
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
    if stated and original and factor and "yarn" in (rope.get("rope_type"), rope.get("type")):
        stated = max(stated, int(min(original * factor, _MAX_POSITIONS)))
    return stated and min(stated, _MAX_POSITIONS)


def _end_token_ids(*sources: dict[str, Any]) -> tuple[int, ...]:
    """Return the end tokens of the first source that has any."""
    for source in sources:
        ends = source.get("eos_token_id")
        if ends is not None:
            return tuple(ends) if isinstance(ends, list) else (ends,)
    return ()


def _defaults(folder: Path, generation: dict[str, Any]) -> Defaults:
    try:
        return msgspec.convert(generation, Defaults, strict=False)
    except msgspec.ValidationError as error:
        raise ModelError(
            f"generation_config.json of {folder.name} has a sampling default that is not a number "
            "or is out of range; correct it or delete the file.",
            "model_corrupt",
        ) from error


def _refuse_quantized(folder: Path, config: dict[str, Any]) -> None:
    quantization = config.get("quantization_config")
    if quantization and not is_mxfp4(config):
        method = quantization.get("quant_method", "unnamed")
        raise ModelError(
            f"{folder.name} is quantized ({method}), which is not supported; "
            "use the same model with float32, float16 or bfloat16 weights."
        )


def is_mxfp4(config: dict[str, Any]) -> bool:
    """Whether a model's experts are quantized to MXFP4. MXFP4 is computed without conversion."""
    return bool((config.get("quantization_config") or {}).get("quant_method") == "mxfp4")


def _weight_files(folder: Path, config: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of the safetensors or GGUF files, in order.

    The vision part of a GGUF model comes last. Raises ModelError if a file is missing.
    """
    if (folder / "model.safetensors.index.json").is_file():
        index = _read_json(folder, "model.safetensors.index.json")
        names = tuple(sorted(set(_weight_map(folder, index).values())))
        for name in names:
            # Unlike Path.is_file, os.path.isfile treats a name that no disk can store as a
            # missing file.
            if Path(name).name != name or not os.path.isfile(folder / name):
                shown = ascii(Path(name).name[:_SHOWN_CHARS])[1:-1]
                raise ModelError(
                    f"{folder.name} lacks the shard {shown}; download it again.",
                    "model_corrupt",
                )
        return names
    if (folder / "model.safetensors").is_file():
        return ("model.safetensors",)
    if files := sorted({path.name for path in folder.glob("*.gguf")} - {MMPROJ}):
        vision = (MMPROJ,) if "vision_config" in config and (folder / MMPROJ).is_file() else ()
        return (*files, *vision)
    for pickled in _pickled(folder):
        raise ModelError(
            f"{folder.name} has pickled weights only ({pickled}), which are never read; "
            "convert them to model.safetensors."
        )
    raise ModelError(f"{folder.name} has no model.safetensors; download it again.", "model_corrupt")


def _weight_map(folder: Path, index: dict[str, Any]) -> dict[str, str]:
    try:
        return msgspec.convert(index["weight_map"], dict[str, str])
    except (KeyError, msgspec.ValidationError) as error:
        raise ModelError(
            f"model.safetensors.index.json of {folder.name} has no valid weight_map; "
            "download it again.",
            "model_corrupt",
        ) from error


def _pickled(folder: Path) -> Iterator[str]:
    for pattern in _PICKLED:
        yield from sorted(path.name for path in folder.glob(pattern))
