"""Phi-3 and Phi-4: Llama whose files join the weights of q, k and v, and those of gate and up."""

from typing import Any

from headrace_engine.models.llama import WEIGHTS as _LLAMA
from headrace_engine.models.llama import Llama
from headrace_engine.models.text_config import TextConfig, positive, read_text_config

WEIGHTS = _LLAMA | {
    "layers.*.attention.qkv": ("model.layers.*.self_attn.qkv_proj",),
    "layers.*.mlp.gate_up": ("model.layers.*.mlp.gate_up_proj",),
}


class Phi3(Llama):
    weights = WEIGHTS

    @staticmethod
    def read(config: dict[str, Any]) -> TextConfig:
        return read_text_config(
            {"rms_norm_eps": 1e-5} | config,
            (config.get("sliding_window"),) * positive(config, "num_hidden_layers"),
            can_rotate_part=True,
        )
