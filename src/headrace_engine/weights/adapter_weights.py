"""The values of an adapter's files."""

from contextlib import ExitStack
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from headrace_common.checkpoints.adapters import AdapterFiles
from headrace_common.checkpoints.spec import ModelSpec
from headrace_common.errors import ModelError
from headrace_engine.weights.gguf_weights import GgufFile

_LARGEST = torch.finfo(torch.float16).max  # weights of models are far below this


class AdapterTensors:
    """An adapter's open file; a context."""

    def __init__(self, files: AdapterFiles, spec: ModelSpec) -> None:
        self._factors, self._name = files.factors, files.path.parent.name
        self._stack = ExitStack()
        if files.is_gguf and "num_attention_heads" not in spec.config:
            raise ModelError(
                f"GGUF adapters of {spec.architecture} are not read; give PEFT's folder."
            )
        if files.is_gguf:
            pairs = (header for it in files.factors.values() for header in (it.down, it.up))
            file: Any = GgufFile(files.path, spec, {it.stored_as: it for it in pairs})
        else:
            file = safe_open(files.path, framework="pt")
        self._file = self._stack.enter_context(file)

    def __enter__(self) -> "AdapterTensors":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def pair(self, module: str) -> tuple[Tensor, Tensor]:
        """float32 [rank, inputs] and [outputs, rank], the latter scaled.

        ModelError if a value is not finite, or so large that a change of a weight may not be.
        """
        factors = self._factors[module]
        down, up = (
            self._file.get_tensor(it.stored_as).float() for it in (factors.down, factors.up)
        )
        up *= factors.scale
        sizes = torch.stack([it.abs().max() for it in (down, up)])
        largest = float(torch.cat([sizes, sizes.prod(0, True) * factors.rank]).max())
        if not largest <= _LARGEST:  # so for NaN, too
            raise ModelError(
                f"The adapter {self._name} changes a weight of {module} by up to {largest:g}; the "
                f"limit is {_LARGEST:g}. Its file is damaged, or its training failed."
            )
        return down, up
