"""Qwen2: Llama with biases on queries, keys and values, and windows on some layers."""

from typing import Any

from headrace_engine.models.llama import Llama
from headrace_engine.models.text_config import TextConfig, layer_windows, read_text_config


class Qwen2(Llama):
    @staticmethod
    def read(config: dict[str, Any]) -> TextConfig:
        window = config.get("sliding_window") if config.get("use_sliding_window") else None
        return read_text_config(config, layer_windows(config, window), has_qkv_bias=True)
