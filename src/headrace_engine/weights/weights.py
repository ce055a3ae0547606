"""Loads safetensors or GGUF files into the parameters of a model."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headrace_common.checkpoints.headers import MXFP4, TensorHeader, read_headers, text_side
from headrace_common.checkpoints.spec import ModelSpec
from headrace_common.errors import ModelError
from headrace_common.loading import tell_weights
from headrace_engine.weights.gguf_groups import Groups, GroupScheme, common_scheme, empty_groups
from headrace_engine.weights.gguf_weights import GgufFile
from headrace_engine.weights.mxfp4 import copy_groups, values_of
from headrace_engine.weights.safetensors_file import open_safetensors

Table = Mapping[str, tuple[str, ...]]
"""Maps each module to the checkpoint modules whose rows are stacked. A `*` stands for a number."""

_LEVEL, _HEAD = "model.", "lm_head."
# Old exporters stored these tensors, which the model computes itself.
_DERIVED = re.compile(r"rotary_emb\.inv_freq$")


class LayerConverter(NamedTuple):
    """Converts each module as soon as all its parameters are loaded.

    So the complete model is never in memory in the unconverted format. `convert` gets the module's
    path and, for a weight in `schemes`, the weight's quantized groups. If `convert` gets groups, it
    must replace the weight.
    """

    convert: Callable[[str, Groups | None], None]
    schemes: Mapping[str, GroupScheme]


def load_weights(
    model: nn.Module,
    table: Table,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    converter: LayerConverter | None = None,
    headers: dict[str, TensorHeader] | None = None,
) -> None:
    """Load the values of every parameter of `model`, which is on the meta device.

    Goes through the layers from the largest to the smallest (see loading_order). `converter`
    converts a layer once its last parameter is loaded, and then the next layer is read. So peak
    memory is the model in its final format plus one unconverted layer. `headers` has the tensors to
    load; by default, these are the tensors of the text side. Raises ModelError that names the first
    tensor that is missing, unknown or of the wrong shape.
    """
    convert, schemes = converter or (lambda path, groups: None, {})
    with ExitStack() as files:
        checkpoint = Checkpoint(spec, files, headers)
        sources = _find_sources(model, table, checkpoint.headers)
        known = {source for group in sources.values() for source in group}
        checkpoint.refuse_unknown(known | getattr(model, "unused", frozenset()))
        quantized: dict[str, Groups] = {}
        sizes = [model.get_parameter(names[0]).numel() for names in loading_order(model)]
        num_done = 0

        def make(name: str) -> nn.Parameter:
            shape = model.get_parameter(name).shape
            values = checkpoint.stack(sources[name], shape, dtype, device)
            return nn.Parameter(values, requires_grad=False)

        for names, size in zip(loading_order(model), sizes, strict=True):
            made: nn.Parameter | None = None
            for name in names:
                path = name.rpartition(".")[0]
                if scheme := schemes.get(name):
                    shape = model.get_parameter(name).shape
                    quantized[path] = checkpoint.groups(sources[name], shape, scheme)
                    _assign(model, name, nn.Parameter(torch.empty(0), requires_grad=False))
                elif made is None:
                    made = make(name)
                    _assign(model, name, made)
                elif checkpoint.are_equal(sources[name], sources[names[0]]):
                    _assign(model, name, made)
                # A config can declare tied weights although the file has two different tensors. In
                # this case, keep both tensors.
                else:
                    _assign(model, name, make(name))
            del made
            for path in [name.rpartition(".")[0] for name in names]:
                if not any(p.is_meta for p in model.get_submodule(path).parameters(recurse=False)):
                    convert(path, quantized.pop(path, None))
            num_done += size
            tell_weights(num_done / sum(sizes))
    # This call moves the buffers; the parameters are on the device already.
    model.to(device)


def group_schemes(model: nn.Module, table: Table, spec: ModelSpec) -> dict[str, GroupScheme]:
    """Return the linear weights that the files store in groups, and the scheme of each."""
    headers = read_headers(spec)
    found = {}
    for name, group in _find_sources(model, table, headers).items():
        path, _, kind = name.rpartition(".")
        if kind == "weight" and isinstance(model.get_submodule(path), nn.Linear):
            scheme = common_scheme(headers[source].dtype for source in group if source in headers)
            if scheme is not None:
                found[name] = scheme
    return found


def _find_sources(
    model: nn.Module, table: Table, headers: Mapping[str, TensorHeader]
) -> dict[str, list[str]]:
    """Return the checkpoint tensors behind each parameter.

    If the checkpoint omits a tied parameter, use the tensors of the other tied parameter.
    """
    found = {}
    for names in loading_order(model):
        own = {name: sources_of(name, table) for name in names}
        present = [group for group in own.values() if all(source in headers for source in group)]
        for name, group in own.items():
            found[name] = group if group in present or not present else present[0]
    return found


def sources_of(name: str, table: Table) -> list[str]:
    """Return the checkpoint tensors behind the model's parameter `name`, in stacking order."""
    module, _, kind = name.rpartition(".")
    pattern = re.sub(r"\.\d+\.", ".*.", module)
    sources = table[pattern]
    for number in re.findall(r"\.(\d+)\.", name):
        sources = tuple(source.replace("*", number, 1) for source in sources)
    return [f"{source}.{kind}" for source in sources]


def loading_order(model: nn.Module) -> list[list[str]]:
    """Return the names of all parameters in groups of tied parameters, the largest layer first.

    While the largest layer is in memory in two formats, few other parameters are loaded.
    """
    groups: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(parameter, []).append(name)

    def size(names: list[str]) -> int:
        layers = [model.get_submodule(name.rpartition(".")[0]) for name in names]
        return max(sum(p.numel() for p in one.parameters(recurse=False)) for one in layers)

    return sorted(groups.values(), key=size, reverse=True)


def _assign(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    module, _, kind = name.rpartition(".")
    setattr(model.get_submodule(module), kind, parameter)


def text_headers(spec: ModelSpec) -> dict[str, TensorHeader]:
    """Return the headers of a model's text tensors, keyed by the names in the weight tables."""
    headers = text_side(read_headers(spec))
    # A model that was saved without a head omits the leading `model.` of its tensor names.
    level = "" if any(name.startswith(_LEVEL) for name in headers) else _LEVEL
    return {
        name if name.startswith(_HEAD) else level + name: header for name, header in headers.items()
    }


def unpacked_weights(spec: ModelSpec, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return all tensors of a vision-language GGUF model, by their names in transformers."""
    headers = read_headers(spec)
    beside = headers.keys() - text_side(headers).keys()
    found = {}
    with ExitStack() as files:
        checkpoint = Checkpoint(spec, files, headers)
        for name, header in headers.items():
            is_text = name not in beside and name.startswith(_LEVEL)
            own = name.replace(_LEVEL, "model.language_model.", 1) if is_text else name
            size = torch.Size(header.shape)
            found[own] = checkpoint.stack([name], size, dtype, torch.device("cpu"))
    return found


class Checkpoint:
    """The open weight files of a model, and the location of each tensor in them."""

    def __init__(
        self, spec: ModelSpec, files: ExitStack, headers: dict[str, TensorHeader] | None = None
    ) -> None:
        """Open the files. Without `headers`, the tensors are those of the text side."""
        self._spec = spec
        self.headers = text_headers(spec) if headers is None else headers
        self._files: dict[str, Any] = {
            name: files.enter_context(self._open(name)) for name in spec.weight_files
        }

    def _open(self, name: str) -> Any:
        path = self._spec.folder / name
        if path.suffix == ".gguf":
            own = {key: header for key, header in self.headers.items() if header.file == name}
            return GgufFile(path, self._spec, own)
        return open_safetensors(path)

    def are_equal(self, names: Sequence[str], others: Sequence[str]) -> bool:
        return all(
            name == other or torch.equal(self._tensor(name), self._tensor(other))
            for name, other in zip(names, others, strict=True)
        )

    def stack(
        self, names: Sequence[str], shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Copy the named tensors into one new tensor, stacked by rows."""
        target = torch.empty(shape, dtype=dtype, device=device)
        for name, rows in self._row_slices(names, shape):
            self._copy(name, target[rows])
        return target

    def groups(self, names: Sequence[str], shape: torch.Size, scheme: GroupScheme) -> Groups:
        """Stack tensors that the files store in groups. Does not dequantize the values."""
        target = empty_groups(scheme, *shape)
        for name, rows in self._row_slices(names, shape):
            part = Groups(scheme, *(tensor[rows] for tensor in target[1:]))
            header = self._header(name)
            if header.scales[0]:
                blocks = self._part(header, header.file, header.stored_as)
                copy_groups(blocks, self._part(header, *header.scales), part)
            else:
                self._files[header.file].copy_groups_to(part, name)
        return target

    def _row_slices(self, names: Sequence[str], shape: torch.Size) -> Iterator[tuple[str, slice]]:
        """Yield the rows that each tensor fills; ModelError if the tensors do not fill `shape`."""
        headers = [self._header(name) for name in names]
        for name, header in zip(names, headers, strict=True):
            if len(header.shape) != len(shape) or header.shape[1:] != tuple(shape[1:]):
                raise self._shape_error(name, header, shape)
        if sum(header.shape[0] for header in headers) != shape[0]:
            raise self._shape_error(names[-1], headers[-1], shape)
        row = 0
        for name, header in zip(names, headers, strict=True):
            yield name, slice(row, row + header.shape[0])
            row += header.shape[0]

    def refuse_unknown(self, known: set[str]) -> None:
        for name in sorted(self.headers.keys() - known):
            if not _DERIVED.search(name):
                raise ModelError(
                    f"{self._spec.name} has a tensor {name} that is not part of "
                    f"{self._spec.architecture}; check config.json against the weights.",
                    "model_corrupt",
                )

    def _copy(self, name: str, target: Tensor) -> None:
        file = self._files[self.headers[name].file]
        if isinstance(file, GgufFile):
            file.copy_to(target, name)
        else:
            target.copy_(self._tensor(name))

    def _tensor(self, name: str) -> Tensor:
        header = self.headers[name]
        stored = self._part(header, header.file, header.stored_as or name)
        if header.dtype == MXFP4 and header.scales[0]:
            return values_of(stored, self._part(header, *header.scales))
        return stored

    def _part(self, header: TensorHeader, file: str, stored: str) -> Tensor:
        """Return the part of a stored tensor that a header describes: rows, or an expert's rows."""
        if header.expert is None:
            tensor: Tensor = self._files[file].get_tensor(stored)
        else:
            tensor = self._files[file].get_slice(stored)[header.expert]
        tensor = tensor.T if header.is_transposed else tensor
        if not header.rows:
            return tensor
        first, last = header.rows[0], header.rows[-1]
        is_run = tuple(header.rows) == tuple(range(first, last + 1))
        return tensor[first : last + 1] if is_run else tensor[list(header.rows)]

    def _header(self, name: str) -> TensorHeader:
        if name not in self.headers:
            raise ModelError(
                f"{self._spec.name} lacks the tensor {name}; download it again.", "model_corrupt"
            )
        return self.headers[name]

    def _shape_error(self, name: str, header: TensorHeader, shape: torch.Size) -> ModelError:
        return ModelError(
            f"Tensor {name} of {self._spec.name} has the shape {list(header.shape)}, which does "
            f"not fit the model's {list(shape)}; check config.json against the weights.",
            "model_corrupt",
        )
