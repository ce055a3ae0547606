"""Maps each natively supported architecture to a class, which is imported on demand."""

import importlib
from typing import Any

FAMILIES = {
    "LlamaForCausalLM": "headrace_engine.models.llama:Llama",
    "Gemma2ForCausalLM": "headrace_engine.models.gemma2:Gemma2",
    "Gemma3ForCausalLM": "headrace_engine.models.gemma3:Gemma3",
    "Gemma4ForCausalLM": "headrace_engine.models.gemma4:Gemma4",
    "Gemma4ForConditionalGeneration": "headrace_engine.models.gemma4:Gemma4",
    "Gemma4UnifiedForCausalLM": "headrace_engine.models.gemma4:Gemma4Unified",
    "Gemma4UnifiedForConditionalGeneration": "headrace_engine.models.gemma4:Gemma4Unified",
    "GptOssForCausalLM": "headrace_engine.models.gpt_oss:GptOss",
    "GraniteForCausalLM": "headrace_engine.models.granite:Granite",
    "GraniteMoeHybridForCausalLM": "headrace_engine.models.granitemoehybrid:GraniteMoeHybrid",
    "MistralForCausalLM": "headrace_engine.models.mistral:Mistral",
    "Olmo2ForCausalLM": "headrace_engine.models.olmo2:Olmo2",
    "Olmo3ForCausalLM": "headrace_engine.models.olmo3:Olmo3",
    "Phi3ForCausalLM": "headrace_engine.models.phi3:Phi3",
    "Qwen2ForCausalLM": "headrace_engine.models.qwen2:Qwen2",
    "Qwen3ForCausalLM": "headrace_engine.models.qwen3:Qwen3",
    "Qwen3MoeForCausalLM": "headrace_engine.models.qwen3_moe:Qwen3Moe",
    "Qwen3_5ForCausalLM": "headrace_engine.models.qwen3_5:Qwen35",
    "Qwen3_5ForConditionalGeneration": "headrace_engine.models.qwen3_5:Qwen35",
    "Qwen3_5MoeForCausalLM": "headrace_engine.models.qwen3_5_moe:Qwen35Moe",
    "Qwen3_5MoeForConditionalGeneration": "headrace_engine.models.qwen3_5_moe:Qwen35Moe",
    "Qwen3NextForCausalLM": "headrace_engine.models.qwen3_next:Qwen3Next",
    "SmolLM3ForCausalLM": "headrace_engine.models.smollm3:SmolLM3",
}


def has_head(architecture: str) -> bool:
    """Return whether the architecture has a language model head; `Qwen3Model` has none."""
    return not architecture.endswith("Model")


def is_native(architecture: str) -> bool:
    return _with_head(architecture) in FAMILIES


def family(architecture: str) -> Any:
    """Return the class that implements an architecture; KeyError if there is none."""
    module, name = FAMILIES[_with_head(architecture)].split(":")
    return getattr(importlib.import_module(module), name)


def _with_head(architecture: str) -> str:
    return architecture if has_head(architecture) else f"{architecture[:-5]}ForCausalLM"
