"""Reads the tensors of an adapter's file."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from headrace_common.checkpoints.adapters import AdapterFiles
from headrace_common.checkpoints.spec import ModelSpec
from headrace_common.errors import ModelError
from headrace_engine.weights.gguf_weights import GgufFile
from headrace_engine.weights.safetensors_file import open_safetensors

# The largest allowed value in a factor and the largest allowed change of a weight. The weights of
# models are far below this limit.
_LARGEST = torch.finfo(torch.float16).max


class AdapterTensors:
    """The open file of an adapter; a context manager."""

    def __init__(self, files: AdapterFiles, spec: ModelSpec) -> None:
        self._factors, self._name = files.factors, files.path.parent.name
        self._stack = ExitStack()
        if files.is_gguf and "num_attention_heads" not in spec.text_config:
            raise ModelError(
                f"GGUF adapters of {spec.architecture} are not supported; use the PEFT folder."
            )
        if files.is_gguf:
            pairs = (header for it in files.factors.values() for header in (it.down, it.up))
            file: Any = GgufFile(files.path, spec, {it.stored_as: it for it in pairs})
        else:
            file = open_safetensors(files.path)
        self._file = self._stack.enter_context(file)

    def __enter__(self) -> "AdapterTensors":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read_factors(self, module: str) -> tuple[Tensor, Tensor]:
        """Return the factors [rank, inputs] and [outputs, rank] in float32.

        The second factor includes the scale. Raises ModelError if a value is not finite, or is
        large enough that a changed weight may overflow.
        """
        factors = self._factors[module]
        down, up = (
            self._file.get_tensor(it.stored_as).float() for it in (factors.down, factors.up)
        )
        up *= factors.scale
        sizes = torch.stack([it.abs().max() for it in (down, up)])
        largest = float(torch.cat([sizes, sizes.prod(0, True) * factors.rank]).max())
        # The negated comparison also catches NaN.
        if not largest <= _LARGEST:
            raise ModelError(
                f"The adapter {self._name} changes a weight of {module} by up to {largest:g}; the "
                f"limit is {_LARGEST:g}. The adapter's file is damaged, or its training failed."
            )
        return down, up
