"""From safetensors files into a model's parameters: each tensor once, in its final form."""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from headrace.core.errors import ModelError
from headrace.models.spec import ModelSpec

Table = dict[str, tuple[str, ...]]
"""Module of ours (`*`: a number) -> the checkpoint's modules that are stacked to make it."""

_DERIVED = re.compile(r"rotary_emb\.inv_freq$")  # written by old exporters, computed here


def load_weights(
    model: nn.Module, table: Table, spec: ModelSpec, dtype: torch.dtype, device: torch.device
) -> None:
    """Gives every (meta) parameter of `model` its values; ModelError names what does not fit."""
    with ExitStack() as files:
        checkpoint = Checkpoint(spec, files)
        made: dict[nn.Parameter, nn.Parameter] = {}
        for name, parameter in list(model.named_parameters(remove_duplicate=False)):
            if parameter not in made:
                sources = _sources(name, table)
                made[parameter] = checkpoint.stack(sources, parameter.shape, dtype, device)
            _assign(model, name, made[parameter])
        tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        checkpoint.refuse_unknown({source for name in tied for source in _sources(name, table)})
    model.to(device)  # buffers


def _sources(name: str, table: Table) -> list[str]:
    """Checkpoint tensors behind our parameter `name`, in stacking order."""
    module, _, kind = name.rpartition(".")
    number = re.search(r"\.(\d+)\.", name)
    pattern = re.sub(r"\.\d+\.", ".*.", module)
    numbers = number.group(1) if number else ""
    return [f"{source.replace('*', numbers)}.{kind}" for source in table[pattern]]


def _assign(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    module, _, kind = name.rpartition(".")
    setattr(model.get_submodule(module), kind, parameter)


class Checkpoint:
    """The open weight files of a model, and where each tensor lies."""

    def __init__(self, spec: ModelSpec, files: ExitStack) -> None:
        self._spec = spec
        self._place: dict[str, Any] = {}
        for name in spec.weight_files:
            opened = files.enter_context(_open(spec.folder / name))
            names = opened.keys()
            self._place.update(dict.fromkeys(names, opened))

    def stack(
        self, names: list[str], shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> nn.Parameter:
        """The named tensors below each other, copied once into memory of their own."""
        target = torch.empty(shape, dtype=dtype, device=device)
        row = 0
        for name, tensor in self._read(names):
            end = row + tensor.shape[0]
            if end > shape[0] or tensor.shape[1:] != shape[1:]:
                raise self._misshapen(name, tensor.shape, shape)
            target[row:end].copy_(tensor)
            row = end
        if row != shape[0]:
            raise self._misshapen(names[-1], tensor.shape, shape)
        return nn.Parameter(target, requires_grad=False)

    def refuse_unknown(self, known: set[str]) -> None:
        for name in sorted(self._place.keys() - known):
            if not _DERIVED.search(name):
                raise ModelError(
                    f"{self._spec.name} has a tensor {name} that {self._spec.architecture} "
                    "does not know; check config.json against the weights.",
                    "model_corrupt",
                )

    def _read(self, names: list[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            if name not in self._place:
                raise ModelError(
                    f"{self._spec.name} lacks the tensor {name}; download it again.",
                    "model_corrupt",
                )
            yield name, self._place[name].get_tensor(name)

    def _misshapen(self, name: str, shape: torch.Size, total: torch.Size) -> ModelError:
        return ModelError(
            f"Tensor {name} of {self._spec.name} has shape {list(shape)}, which does not fit "
            f"{list(total)}; check config.json against the weights.",
            "model_corrupt",
        )


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path.name} of {path.parent.name} is truncated or damaged; download it again.",
            "model_corrupt",
        ) from error
