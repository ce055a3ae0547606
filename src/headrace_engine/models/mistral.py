"""Mistral: Llama with a sliding window on every layer."""

from typing import Any

from headrace_engine.models.llama import Llama
from headrace_engine.models.text_config import TextConfig, positive, read_text_config


class Mistral(Llama):
    @staticmethod
    def read(config: dict[str, Any]) -> TextConfig:
        window = config.get("sliding_window")
        return read_text_config(config, (window,) * positive(config, "num_hidden_layers"))
