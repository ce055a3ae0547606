"""Names of a GGUF file's tensors in the original checkpoint."""

import re

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
OTHERS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Those that mean something else in models with a norm after each part."""
NORMED_TWICE = ("Gemma2ForCausalLM", "Gemma3ForCausalLM")
EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
"""Stacks: the same tensor of all experts of a layer."""
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_OTHER = re.compile(r"(\w+)\.(weight|bias)")


def names_of(architecture: str) -> dict[str, str]:
    return NAMES | OTHERS if architecture in NORMED_TWICE else NAMES


def original_name(name: str, architecture: str) -> str:
    """Transformers' name of a tensor; an unknown name stays as it is."""
    names = names_of(architecture)
    if (found := _LAYER.fullmatch(name)) and found[2] in names:
        return f"model.layers.{found[1]}.{names[found[2]]}.{found[3]}"
    if (found := _OTHER.fullmatch(name)) and found[1] in NAMES:
        return f"{NAMES[found[1]]}.{found[2]}"
    return name


def expert_names(name: str, count: int) -> list[str]:
    """Transformers' name of each tensor in a stack of experts; none if it is no such stack."""
    found = _LAYER.fullmatch(name)
    if not found or found[2] not in EXPERTS:
        return []
    own = f"{EXPERTS[found[2]]}.{found[3]}"
    return [f"model.layers.{found[1]}.mlp.experts.{n}.{own}" for n in range(count)]
