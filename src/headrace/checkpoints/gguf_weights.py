"""The values of GGUF files, under the names and in the row order of the original checkpoint."""

import mmap
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from headrace.checkpoints.gguf_groups import GROUP_SCHEMES, Array, Groups, read_groups
from headrace.checkpoints.gguf_names import NORMED_TWICE
from headrace.checkpoints.headers import TensorHeader
from headrace.checkpoints.spec import ModelSpec

_ROWS_AT_ONCE = 1024  # of float32, while a matrix is unpacked


class GgufFile:
    def __init__(self, path: Path, spec: ModelSpec, headers: dict[str, TensorHeader]) -> None:
        self._headers = headers
        heads = spec.config["num_attention_heads"]
        # for Llama's rotation llama.cpp lays the rows of a head's two halves in turn
        self._interleaved = {
            "q_proj": heads,
            "k_proj": spec.config.get("num_key_value_heads", heads),
        }
        if spec.architecture != "LlamaForCausalLM":
            self._interleaved = {}
        # for Gemma it adds the 1 that the model's own norms add
        self._norm_shift = 1 if spec.architecture in NORMED_TWICE else 0
        with path.open("rb") as file:
            self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __enter__(self) -> "GgufFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._content.close()

    def get_tensor(self, name: str) -> Tensor:
        """float32, as the file's rounding has left it."""
        target = torch.empty(self._headers[name].shape)
        self.copy_to(target, name)
        return target

    def copy_to(self, target: Tensor, name: str) -> None:
        """Into a tensor of any type, some rows at a time: the whole in float32 may not fit."""
        header, raw = self._headers[name], self._raw(name)
        kind = GGMLQuantizationType[header.dtype]
        order = self._order(name, header.shape[0])
        if len(header.shape) == 1:
            row = dequantize(raw, kind).astype(np.float32)[order]
            if name.endswith("norm.weight"):
                row -= self._norm_shift
            target.copy_(torch.from_numpy(row))
            return
        raw = raw.reshape(header.shape[0], -1)
        for start in range(0, len(raw), _ROWS_AT_ONCE):
            rows = order[start : start + _ROWS_AT_ONCE]
            values = torch.from_numpy(dequantize(raw[rows], kind).astype(np.float32, copy=False))
            target[start : start + len(rows)].copy_(values)

    def copy_groups_to(self, target: Groups, name: str) -> None:
        """Does what `copy_to` does for a matrix that stays in groups; the target's may be finer,
        and it may have more bits than the file."""
        header = self._headers[name]
        raw, order = self._raw(name).reshape(header.shape[0], -1), self._order(name, len(target.q))
        repeats = GROUP_SCHEMES[header.dtype].size // target.scheme.size
        for start in range(0, len(raw), _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            q, scale, minimum = map(torch.from_numpy, read_groups(raw[order[part]], header.dtype))
            target.q[part] = q
            target.scale[part] = scale.repeat_interleave(repeats, dim=1)
            target.minimum[part] = minimum.repeat_interleave(repeats, dim=1)

    def _raw(self, name: str) -> Array:
        first, end = self._headers[name].data_offsets
        return np.frombuffer(self._content, np.uint8, count=end - first, offset=first)

    def _order(self, name: str, num_rows: int) -> Array:
        """Row numbers in the file, in the original's order."""
        order = np.arange(num_rows)
        if heads := self._interleaved.get(name.split(".")[-2]):
            order = order.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
        return order
