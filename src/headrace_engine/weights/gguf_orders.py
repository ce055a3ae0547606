"""Undoes the changes of llama.cpp's converter: the order of rows and columns, and some values."""

from typing import Any

import numpy as np

from headrace_common.checkpoints.gguf_names import HYBRIDS, INTERLEAVED, NORMED_TWICE
from headrace_common.checkpoints.spec import ModelSpec
from headrace_engine.weights.gguf_groups import Array

_DELTA = ".linear_attn."
# The norm of Gemma 3's projector is not listed: its weight is shifted like those of the text side.
_VISION = ("model.visual.", "model.vision_tower.")
_ORIGINAL_HEAD_ORDER = ("Qwen3NextForCausalLM",)
"""Hybrid architectures whose GGUF files keep the value heads in the original order."""


class FileOrders:
    """Maps rows and columns of the original checkpoint to the rows and columns in a GGUF file."""

    def __init__(self, spec: ModelSpec) -> None:
        config, heads = spec.text_config, spec.text_config["num_attention_heads"]
        self._is_hybrid = spec.architecture in HYBRIDS
        # For Llama's rotation, llama.cpp interleaves the rows of the two halves of each head.
        self._interleaved = {"q_proj": heads, "k_proj": config.get("num_key_value_heads", heads)}
        if spec.architecture not in INTERLEAVED:
            self._interleaved = {}
        # Some norms compute with 1 plus the stored weight. llama.cpp stores the sum instead.
        self._norm_shift = 1 if self._is_hybrid or spec.architecture in NORMED_TWICE else 0
        self._heads: Array | None = None
        # The number of channels of queries and keys together, and the number of channels of values.
        self._keys = self._values = 0
        if self._is_hybrid and spec.architecture not in _ORIGINAL_HEAD_ORDER:
            self._heads = _value_heads(config)
            self._keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
            self._values = len(self._heads) * config["linear_value_head_dim"]

    def restore(self, name: str, row: Array) -> Array:
        """Return the values that a vector of the file has in the original checkpoint."""
        if name.startswith(_VISION):
            return row
        if self._is_hybrid and name.endswith(".A_log"):
            return np.log(-row)
        if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            return row - self._norm_shift
        return row

    def row_order(self, name: str, num_rows: int) -> Array:
        order = np.arange(num_rows)
        layer, _, kind = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")
        if heads := self._interleaved.get(kind):
            return order.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
        if self._heads is None or not f"{layer}.".endswith(_DELTA) or kind in ("norm", "out_proj"):
            return order
        keys = self._keys if kind in ("in_proj_qkv", "conv1d") else 0
        return np.concatenate((order[:keys], keys + _by_heads(self._heads, num_rows - keys)))

    def column_order(self, name: str) -> Array | None:
        """Return the file's columns in the original order; None if the file has this order."""
        if self._heads is None or not name.endswith(f"{_DELTA}out_proj.weight"):
            return None
        return _by_heads(self._heads, self._values)


def _value_heads(config: dict[str, Any]) -> Array:
    """Return the position in the file of each original value head.

    The file starts with the first value head of every key head. The second value head of every key
    head follows, and so on.
    """
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    return np.arange(values).reshape(-1, keys).T.reshape(-1)


def _by_heads(heads: Array, num_rows: int) -> Array:
    size = num_rows // len(heads)
    return (heads[:, None] * size + np.arange(size)).reshape(-1)
