"""Examines a folder's GGUF files: their lanes, their memory, and which files fit."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headrace.cli.doctor_machine import Finding
from headrace_common.cache import bytes_per_position
from headrace_common.checkpoints.find import find_model, place_of
from headrace_common.checkpoints.gguf_file_names import labels
from headrace_common.checkpoints.gguf_folder import model_files
from headrace_common.checkpoints.gguf_header import is_later_part
from headrace_common.checkpoints.gguf_vision import mmproj_files
from headrace_common.checkpoints.headers import TensorHeader
from headrace_common.checkpoints.spec import ModelSpec, read_spec
from headrace_common.config.settings import ModelConfig
from headrace_common.errors import ModelError

_FORMATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class GgufChoice(NamedTuple):
    """One of several GGUF files. `held` is the size of its loaded weights; 0 if it cannot run."""

    name: str
    detail: str
    held: int = 0
    fits: bool = False


def several(model: str) -> list[Path]:
    """Return a folder's GGUF files if the folder has several and no other model; otherwise none."""
    folder = Path(model).expanduser()
    if not folder.is_dir() or any(folder.glob("*.safetensors")):
        return []
    files = [path for path in model_files(folder) if not is_later_part(path)]
    return files if len(files) > 1 else []


def choices(files: list[Path], config: ModelConfig) -> Iterator[GgufChoice]:
    """Yield a choice for each file, without loading it."""
    names = labels(file.name for file in files)
    for file in files:
        name = names[file.name]
        try:
            yield _choice(name, read_spec(find_model(str(file), mmproj=config.mmproj)), config)
        except ModelError as error:
            yield GgufChoice(name, str(error))


def advice(found: list[GgufChoice], folder: str) -> str:
    """Recommend the largest file that fits, because larger files have lost less precision."""
    if not any(one.held for one in found):
        return "no file can be run; download a file again, or choose another model"
    fitting = [one for one in found if one.fits]
    if not fitting:
        return "no file fits into the free memory; use a smaller model or fewer bits"
    best = max(fitting, key=lambda one: one.held)
    return (
        f"{folder}:{best.name} is the largest file that fits, with {best.held >> 20} MiB of weights"
    )


def _choice(name: str, spec: ModelSpec, config: ModelConfig) -> GgufChoice:
    import torch

    from headrace_engine.runner.footprint import footprint
    from headrace_engine.runner.lanes.choose import choose_lane, why_not_native
    from headrace_engine.runner.load import choose_kernels, dtype_of
    from headrace_engine.runner.probe import free_bytes

    lane = choose_lane(spec, config.lane)
    cpu = torch.device("cpu")
    free, has_encoder = free_bytes(cpu), lane.traits.facts.encoder is not None
    if not lane.traits.has_kernels:
        needed = footprint(spec, torch.float16, "plain", "own", has_encoder=has_encoder)
        why = why_not_native(spec) or "set by --lane,"
        return GgufChoice(
            name, f"{lane.traits.id}: {why} {needed} of weights", needed.held, needed.peak <= free
        )
    dtype = dtype_of(config, spec)
    quantize, instructions, _ = choose_kernels(config, spec, lane, cpu, dtype, checks=False)
    needed = footprint(spec, dtype, instructions, quantize, has_encoder=has_encoder)
    num, longest = streams_that_fit(config, spec, lane, dtype.itemsize, free - needed.held)
    detail = (
        f"{lane.traits.id}: Headrace implements this architecture; {needed} of weights, "
        f"{num} streams of {longest} tokens"
    )
    return GgufChoice(name, detail, needed.held, needed.peak <= free)


def vision_part(spec: ModelSpec, config: ModelConfig) -> Finding | None:
    """Say which vision part of a GGUF model is used, and why; None if there is none."""
    if not spec.is_gguf:
        return None
    how = "set by --mmproj"
    if config.mmproj == "auto":
        how = "the mmproj file in the model's folder"
    name, reason = spec.config.get("mmproj"), spec.config.get("mmproj_unused")
    if reason is not None:
        return Finding("vision", "warn", f"{name} ({how}) is not used: text only", str(reason))
    if name is not None:
        layers = spec.config["vision_config"]
        layers = layers.get("depth") or layers.get("num_hidden_layers")
        return Finding("vision", "ok", f"{name} ({how}): an image encoder of {layers} layers")
    place = place_of(config.model)
    beside = mmproj_files(place.parent if place.suffix == ".gguf" else place) if place else []
    if config.mmproj == "auto" and len(beside) > 1:
        names = ", ".join(path.name for path in beside)
        remedy = f"Name one with --mmproj: {names}."
        detail = f"the model's folder has {len(beside)} mmproj files: text only"
        return Finding("vision", "warn", detail, remedy)
    return None


def streams_that_fit(
    config: ModelConfig,
    spec: ModelSpec,
    lane: Any,
    item_bytes: int,
    free: int,
    draft_bytes: int = 0,
) -> tuple[int, int]:
    """Return the number of streams whose cache fits on a CPU, and the tokens of each stream.

    `free` is the memory in bytes that is free besides the weights. Recurrent states are not
    counted. A draft model caches `draft_bytes` for each token.
    """
    from headrace_engine.runner.load import CACHE_SHARE

    longest = min(n for n in (spec.max_positions, config.max_model_len, 1 << 20) if n)
    own_bytes = bytes_per_position(lane.cache_of(spec), item_bytes, config.kv_cache_dtype)
    each = (own_bytes + draft_bytes) * longest
    room = config.kv_cache_memory_bytes or int(CACHE_SHARE["cpu"] * max(0, free))
    return room // max(1, each), longest


def stored_formats(headers: Mapping[str, TensorHeader]) -> str:
    """Name the formats that hold at least 5 % of the stored bytes, the largest first."""
    sizes: Counter[str] = Counter()
    for header in headers.values():
        start, end = header.data_offsets
        sizes[_FORMATS.get(header.dtype, header.dtype)] += end - start
    shown = [name for name, size in sizes.most_common() if 20 * size >= sizes.total()]
    return " and ".join(shown)
