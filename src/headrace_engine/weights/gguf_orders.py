"""How llama.cpp's files differ from the original beyond names: the order of rows and columns, and
numbers that are added or transformed."""

from typing import Any

import numpy as np

from headrace_common.checkpoints.gguf_names import HYBRIDS, NORMED_TWICE
from headrace_common.checkpoints.spec import ModelSpec
from headrace_engine.weights.gguf_groups import Array

_DELTA = ".linear_attn."
_NO_HEADS_IN_TURN = ("Qwen3NextForCausalLM",)
"""Hybrids whose files keep value heads in the original's order."""


class FileOrders:
    """Numbers of rows and columns in the file, in the original's order."""

    def __init__(self, spec: ModelSpec) -> None:
        config, heads = spec.config, spec.config["num_attention_heads"]
        self._is_hybrid = spec.architecture in HYBRIDS
        # for Llama's rotation llama.cpp lays the rows of a head's two halves in turn
        self._interleaved = {"q_proj": heads, "k_proj": config.get("num_key_value_heads", heads)}
        if spec.architecture != "LlamaForCausalLM":
            self._interleaved = {}
        # for norms that add 1 to their weights it adds the 1
        self._norm_shift = 1 if self._is_hybrid or spec.architecture in NORMED_TWICE else 0
        self._heads: Array | None = None
        self._keys = self._values = 0  # channels of the queries and keys, and of the values
        if self._is_hybrid and spec.architecture not in _NO_HEADS_IN_TURN:
            self._heads = _value_heads(config)
            self._keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
            self._values = len(self._heads) * config["linear_value_head_dim"]

    def original(self, name: str, row: Array) -> Array:
        """The numbers of a vector as they were before."""
        if self._is_hybrid and name.endswith(".A_log"):
            return np.log(-row)
        if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            return row - self._norm_shift
        return row

    def of_rows(self, name: str, num_rows: int) -> Array:
        order = np.arange(num_rows)
        layer, _, kind = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")
        if heads := self._interleaved.get(kind):
            return order.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
        if self._heads is None or not f"{layer}.".endswith(_DELTA) or kind in ("norm", "out_proj"):
            return order
        keys = self._keys if kind in ("in_proj_qkv", "conv1d") else 0
        return np.concatenate((order[:keys], keys + _by_heads(self._heads, num_rows - keys)))

    def of_columns(self, name: str) -> Array | None:
        """None: as in the original."""
        if self._heads is None or not name.endswith(f"{_DELTA}out_proj.weight"):
            return None
        return _by_heads(self._heads, self._values)


def _value_heads(config: dict[str, Any]) -> Array:
    """Their places: llama.cpp takes the first of each key head, then the second of each."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    return np.arange(values).reshape(-1, keys).T.reshape(-1)


def _by_heads(heads: Array, num_rows: int) -> Array:
    size = num_rows // len(heads)
    return (heads[:, None] * size + np.arange(size)).reshape(-1)
