"""A model with an adapter (LoRA) added to its weights, written as a folder of its own."""

import shutil
from contextlib import ExitStack
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from headrace_common.checkpoints.adapters import AdapterFiles, read_adapter
from headrace_common.checkpoints.spec import ModelSpec
from headrace_common.errors import ModelError
from headrace_engine.weights.adapter_weights import AdapterTensors
from headrace_engine.weights.weights import text_headers


def merge(spec: ModelSpec, adapter: Path, out: Path) -> int:
    """Writes the folder `out`, weights in the types that the model's have.

    Returns how many matrices were changed. ModelError, before anything is written, if the adapter
    does not fit.
    """
    if spec.is_gguf:
        raise ModelError(
            f"{spec.name} is a GGUF file, into which nothing is merged; give the folder of the "
            "same model with safetensors files."
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(f"{out} is there already; give a new folder.")
    files = read_adapter(adapter, spec.architecture)
    changed = _changed(spec, adapter.name, files)
    out.mkdir(parents=True, exist_ok=True)
    try:
        _fill(out, spec, files, changed)
    except BaseException:  # half a model would stand in the way of the next try
        shutil.rmtree(out)
        raise
    return len(files.factors)


def _fill(
    out: Path, spec: ModelSpec, files: AdapterFiles, changed: dict[str, dict[str, str]]
) -> None:
    for file in sorted(spec.folder.iterdir()):
        if file.is_file() and file.name not in spec.weight_files:
            shutil.copyfile(file, out / file.name)
    with AdapterTensors(files, spec) as tensors:
        for name in spec.weight_files:
            _write(spec.folder / name, out / name, changed.get(name, {}), tensors)


def _changed(spec: ModelSpec, adapter: str, files: AdapterFiles) -> dict[str, dict[str, str]]:
    """The adapter's modules by the names of tensors that they change, by the files of these."""
    headers = text_headers(spec)
    found: dict[str, dict[str, str]] = {}
    for module, factors in files.factors.items():
        shape = factors.up.shape[0], factors.down.shape[1]
        header = headers.get(f"{module}.weight")
        is_part = header is not None and (header.rows or header.expert is not None)
        if header is None or header.shape != shape or is_part:
            there = "no such matrix" if header is None else f"one of {list(header.shape)}"
            there = "it within another one" if is_part else there
            raise ModelError(
                f"The adapter {adapter} changes a matrix of {list(shape)} at {module} (rank "
                f"{factors.rank}), and {spec.name} has {there}; it was made for another model."
            )
        found.setdefault(header.file, {})[header.stored_as] = module
    return found


def _write(source: Path, target: Path, changed: dict[str, str], adapter: AdapterTensors) -> None:
    with ExitStack() as files:
        file = files.enter_context(safe_open(source, framework="pt"))
        tensors: dict[str, Tensor] = {}
        for name in file.keys():  # noqa: SIM118
            tensors[name] = file.get_tensor(name)
            if (module := changed.get(name)) is not None:
                down, up = adapter.pair(module)
                tensors[name] = (tensors[name].float() + up @ down).to(tensors[name].dtype)
        save_file(tensors, target, metadata={"format": "pt"})
