"""Adds a LoRA adapter to the weights of a model and writes the result to a new folder."""

import shutil
from contextlib import ExitStack
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from headrace_common.checkpoints.adapters import AdapterFiles, read_adapter
from headrace_common.checkpoints.spec import ModelSpec
from headrace_common.errors import ModelError
from headrace_engine.weights.adapter_weights import AdapterTensors
from headrace_engine.weights.safetensors_file import open_safetensors
from headrace_engine.weights.weights import text_headers


def merge(spec: ModelSpec, adapter: Path, out: Path) -> int:
    """Write the merged model to the folder `out`; the weights keep their dtypes.

    Returns how many matrices were changed. Raises ModelError if the adapter does not fit the model;
    nothing has been written in this case.
    """
    if spec.is_gguf:
        raise ModelError(
            f"{spec.name} is a GGUF file, and adapters cannot be merged into GGUF files; use a "
            "folder with the model's safetensors files."
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(f"{out} already exists; choose a new folder.")
    files = read_adapter(adapter, spec.architecture)
    changed = _changed(spec, adapter.name, files)
    out.mkdir(parents=True, exist_ok=True)
    try:
        _fill(out, spec, files, changed)
    # An incomplete folder would make the next attempt fail.
    except BaseException:
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
    """Return the adapter modules, by weight file and by the tensor that a module changes."""
    headers = text_headers(spec)
    found: dict[str, dict[str, str]] = {}
    for module, factors in files.factors.items():
        shape = factors.up.shape[0], factors.down.shape[1]
        header = headers.get(f"{module}.weight")
        is_part = header is not None and (header.rows or header.expert is not None)
        if header is None or header.shape != shape or is_part:
            actual = (
                "no such matrix" if header is None else f"a matrix of {list(header.shape)} there"
            )
            actual = "only a larger matrix that contains this part" if is_part else actual
            raise ModelError(
                f"The adapter {adapter} changes a matrix of {list(shape)} at {module} (rank "
                f"{factors.rank}), but {spec.name} has {actual}; the adapter is for another model."
            )
        found.setdefault(header.file, {})[header.stored_as] = module
    return found


def _write(source: Path, target: Path, changed: dict[str, str], adapter: AdapterTensors) -> None:
    with ExitStack() as files:
        file = files.enter_context(open_safetensors(source))
        tensors: dict[str, Tensor] = {}
        for name in file.keys():  # noqa: SIM118
            tensors[name] = file.get_tensor(name)
            if (module := changed.get(name)) is not None:
                down, up = adapter.read_factors(module)
                tensors[name] = (tensors[name].float() + up @ down).to(tensors[name].dtype)
        save_file(tensors, target, metadata={"format": "pt"})
