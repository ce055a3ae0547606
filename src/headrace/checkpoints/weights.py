"""From safetensors files into a model's parameters: each tensor once, in its final form."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from headrace.checkpoints.headers import TensorHeader, read_headers
from headrace.checkpoints.spec import ModelSpec
from headrace.core.errors import ModelError

Table = Mapping[str, tuple[str, ...]]
"""Module of ours (`*`: a number) -> the checkpoint's modules that are stacked to make it."""

_DERIVED = re.compile(r"rotary_emb\.inv_freq$")  # written by old exporters, computed here


def load_weights(
    model: nn.Module,
    table: Table,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    settle: Callable[[str], None] = lambda path: None,
) -> None:
    """Gives every (meta) parameter of `model` its values; ModelError names what does not fit.

    `settle` may replace the module at a path; it is called as soon as that has all its parameters,
    so that two forms of all weights are never there at once.
    """
    with ExitStack() as files:
        checkpoint = Checkpoint(spec, files)
        sources = {
            name: _sources(name, table)
            for name, _ in model.named_parameters(remove_duplicate=False)
        }
        checkpoint.refuse_unknown({source for group in sources.values() for source in group})

        def make(name: str) -> nn.Parameter:
            shape = model.get_parameter(name).shape
            values = checkpoint.stack(sources[name], shape, dtype, device)
            return nn.Parameter(values, requires_grad=False)

        for names in loading_order(model):
            present = [name for name in names if checkpoint.has(sources[name])] or names[:1]
            made = make(present[0])
            for name in names:
                # A file that ties by its config and still holds two different tensors means two.
                is_own = name in present and not checkpoint.same(sources[name], sources[present[0]])
                _assign(model, name, make(name) if is_own else made)
            del made
            for path in [name.rpartition(".")[0] for name in names]:
                if not any(p.is_meta for p in model.get_submodule(path).parameters(recurse=False)):
                    settle(path)
    model.to(device)  # buffers


def _sources(name: str, table: Table) -> list[str]:
    """Checkpoint tensors behind our parameter `name`, in stacking order."""
    module, _, kind = name.rpartition(".")
    number = re.search(r"\.(\d+)\.", name)
    pattern = re.sub(r"\.\d+\.", ".*.", module)
    numbers = number.group(1) if number else ""
    return [f"{source.replace('*', numbers)}.{kind}" for source in table[pattern]]


def loading_order(model: nn.Module) -> list[list[str]]:
    """Names of parameters, those of one and the same parameter together, the largest first.

    Where two forms of the largest are held for a moment, little else is there yet.
    """
    groups: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(parameter, []).append(name)
    return [groups[p] for p in sorted(groups, key=nn.Parameter.numel, reverse=True)]


def _assign(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    module, _, kind = name.rpartition(".")
    setattr(model.get_submodule(module), kind, parameter)


class Checkpoint:
    """The open weight files of a model, and where each tensor lies."""

    def __init__(self, spec: ModelSpec, files: ExitStack) -> None:
        self._spec = spec
        self._headers = read_headers(spec)
        self._files: dict[str, Any] = {
            name: files.enter_context(safe_open(spec.folder / name, framework="pt"))
            for name in spec.weight_files
        }

    def has(self, names: Sequence[str]) -> bool:
        return all(name in self._headers for name in names)

    def same(self, names: Sequence[str], others: Sequence[str]) -> bool:
        return all(
            name == other or torch.equal(self._tensor(name), self._tensor(other))
            for name, other in zip(names, others, strict=True)
        )

    def stack(
        self, names: Sequence[str], shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """The named tensors below each other, copied once into memory of their own."""
        headers = [self._header(name) for name in names]
        for name, header in zip(names, headers, strict=True):
            if len(header.shape) != len(shape) or header.shape[1:] != tuple(shape[1:]):
                raise self._misshapen(name, header, shape)
        if sum(header.shape[0] for header in headers) != shape[0]:
            raise self._misshapen(names[-1], headers[-1], shape)
        target = torch.empty(shape, dtype=dtype, device=device)
        row = 0
        for name, header in zip(names, headers, strict=True):
            end = row + header.shape[0]
            target[row:end].copy_(self._tensor(name))
            row = end
        return target

    def refuse_unknown(self, known: set[str]) -> None:
        for name in sorted(self._headers.keys() - known):
            if not _DERIVED.search(name):
                raise ModelError(
                    f"{self._spec.name} has a tensor {name} that {self._spec.architecture} "
                    "does not know; check config.json against the weights.",
                    "model_corrupt",
                )

    def _tensor(self, name: str) -> Tensor:
        return self._files[self._headers[name].file].get_tensor(name)

    def _header(self, name: str) -> TensorHeader:
        if name not in self._headers:
            raise ModelError(
                f"{self._spec.name} lacks the tensor {name}; download it again.", "model_corrupt"
            )
        return self._headers[name]

    def _misshapen(self, name: str, header: TensorHeader, shape: torch.Size) -> ModelError:
        return ModelError(
            f"Tensor {name} of {self._spec.name} has the shape {list(header.shape)}, which does "
            f"not fit into {list(shape)}; check config.json against the weights.",
            "model_corrupt",
        )
