"""Which architectures have a native implementation; strings, imported on demand."""

import importlib
from typing import Any

FAMILIES = {
    "LlamaForCausalLM": "headrace.models.llama:Llama",
    "MistralForCausalLM": "headrace.models.mistral:Mistral",
    "Qwen2ForCausalLM": "headrace.models.qwen2:Qwen2",
    "Qwen3ForCausalLM": "headrace.models.qwen3:Qwen3",
}


def family(architecture: str) -> Any:
    """The class that implements an architecture; KeyError if none does."""
    module, name = FAMILIES[architecture].split(":")
    return getattr(importlib.import_module(module), name)
