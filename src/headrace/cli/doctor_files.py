"""The GGUF files of one folder: which lane takes each and why, its memory, and which one fits."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from headrace_common.cache import bytes_per_position
from headrace_common.checkpoints.find import find_model
from headrace_common.checkpoints.gguf_folder import labels
from headrace_common.checkpoints.gguf_header import is_later_part
from headrace_common.checkpoints.spec import ModelSpec, read_spec
from headrace_common.config.settings import ModelConfig
from headrace_common.errors import ModelError


class GgufChoice(NamedTuple):
    """One of several files; `held` is 0 where it cannot be run."""

    name: str
    detail: str
    held: int = 0
    fits: bool = False


def several(model: str) -> list[Path]:
    """The GGUF files of a folder that has more than one, and nothing else to serve."""
    folder = Path(model).expanduser()
    if not folder.is_dir() or any(folder.glob("*.safetensors")):
        return []
    files = [path for path in sorted(folder.glob("*.gguf")) if not is_later_part(path)]
    return files if len(files) > 1 else []


def choices(files: list[Path], config: ModelConfig) -> Iterator[GgufChoice]:
    """One after another; nothing is loaded."""
    names = labels(file.name for file in files)
    for file in files:
        name = names[file.name]
        try:
            yield _choice(name, read_spec(find_model(str(file))), config)
        except ModelError as error:
            yield GgufChoice(name, str(error))


def advice(found: list[GgufChoice], folder: str) -> str:
    """The largest that fits, as larger files have lost less."""
    if not any(one.held for one in found):
        return "none of them can be run; download one again, or another"
    fitting = [one for one in found if one.fits]
    if not fitting:
        return "none of them fits in the memory that is free; use a smaller model or fewer bits"
    best = max(fitting, key=lambda one: one.held)
    return f"{folder}:{best.name} is the largest that fits, with {best.held >> 20} MiB of weights"


def _choice(name: str, spec: ModelSpec, config: ModelConfig) -> GgufChoice:
    import torch

    from headrace_engine.runner.footprint import footprint
    from headrace_engine.runner.lanes.choose import choose_lane, why_not_native
    from headrace_engine.runner.load import CACHE_SHARE, dtype_of, how_computed
    from headrace_engine.runner.probe import free_bytes

    lane = choose_lane(spec, config.lane)
    cpu = torch.device("cpu")
    free = free_bytes(cpu)
    if not lane.traits.has_kernels:
        needed = footprint(spec, torch.float16, "plain", "own")
        why = why_not_native(spec) or "as asked,"
        return GgufChoice(
            name, f"{lane.traits.id}: {why} {needed} of weights", needed.held, needed.peak <= free
        )
    dtype = dtype_of(config, spec)
    quantize, instructions, _ = how_computed(config, spec, lane, cpu, dtype)
    needed = footprint(spec, dtype, instructions, quantize)
    longest = min(n for n in (spec.max_positions, config.max_model_len, 1 << 20) if n)
    each = bytes_per_position(lane.cache_of(spec), dtype.itemsize) * longest
    room = config.kv_cache_memory_bytes or int(CACHE_SHARE["cpu"] * max(0, free - needed.held))
    detail = (
        f"{lane.traits.id}: it has its own implementation; {needed} of weights, "
        f"{room // max(1, each)} streams of {longest} tokens"
    )
    return GgufChoice(name, detail, needed.held, needed.peak <= free)
