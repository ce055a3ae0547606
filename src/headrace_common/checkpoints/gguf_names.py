"""Translates tensor names of GGUF files into the names of the original checkpoint."""

import math
import re
from collections.abc import Mapping
from typing import Any

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
"""In models with norms both before and after each sublayer, these names have another meaning."""
GEMMA3_SEES = "Gemma3ForConditionalGeneration"
NORMED_TWICE = ("Gemma2ForCausalLM", "Gemma3ForCausalLM", GEMMA3_SEES)
OF_HYBRIDS = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
GATES = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
"""Names within a layer. The translation replaces the whole name, including the suffix."""
HYBRIDS = (
    *("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM"),
    *("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
)
OF_GPT_OSS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}
INTERLEAVED = ("LlamaForCausalLM", "GraniteForCausalLM", "SmolLM3ForCausalLM")
"""In GGUF files of these models, the two halves of each rotated head are interleaved."""
GPT_OSS = "GptOssForCausalLM"
GEMMA4 = "Gemma4ForCausalLM"
OF_OLMO = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
OF_PHI3 = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
OF_GEMMA4 = {
    "ffn_gate_inp": "router.proj",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
WHOLE_GEMMA4 = {
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_gate_exps.weight": "experts.gate_proj",
    "ffn_up_exps.weight": "experts.up_proj",
    "ffn_down_exps.weight": "experts.down_proj",
}
"""Names within a layer. The translation replaces the whole name, including the suffix."""
EXPERTS = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
    "ffn_gate_up_exps": "gate_up_proj",
}
"""Names of stacks. A stack joins the same tensor of all experts in a layer."""
OF_VISION = {
    "v.patch_embd": "patch_embed.proj",
    "v.position_embd": "pos_embed",
    "v.post_ln": "merger.norm",
    "mm.0": "merger.linear_fc1",
    "mm.2": "merger.linear_fc2",
    "ln1": "norm1",
    "ln2": "norm2",
    "attn_qkv": "attn.qkv",
    "attn_out": "attn.proj",
    "ffn_up": "mlp.linear_fc1",
    "ffn_down": "mlp.linear_fc2",
}
"""Names in the vision part of Qwen3.5: whole names, and names within a layer."""
OF_SIGLIP = {
    "v.patch_embd": "vision_tower.embeddings.patch_embedding",
    "v.position_embd": "vision_tower.embeddings.position_embedding",
    "v.post_ln": "vision_tower.post_layernorm",
    "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    **{f"attn_{kind}": f"self_attn.{kind}_proj" for kind in ("q", "k", "v", "out")},
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
"""Names in the vision part of Gemma 3."""
_SIGLIP_LAYERS = "vision_tower.encoder.layers"
_PROJECTION = "multi_modal_projector.mm_input_projection_weight"
SECOND_FRAME = ".1"
"""Suffix of the second half of the patch embedding, whose kernel covers two frames of a video."""
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_GATES = re.compile(r"blk\.(\d+)\.(ssm_a|ssm_dt\.bias)")
_SINKS = re.compile(r"blk\.(\d+)\.attn_sinks\.weight")
_IN_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_OTHER = re.compile(r"(\w+)\.(weight|bias)")
_SWAPPED = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
_VISION = re.compile(r"(v\.blk\.(\d+)\.(\w+)|(?:v|mm)\.\w+)(\.(?:weight|bias)(?:\.1)?)")


_OWN = {
    **dict.fromkeys(HYBRIDS, OF_HYBRIDS),
    **dict.fromkeys(NORMED_TWICE, OTHERS),
    **dict.fromkeys(("Olmo2ForCausalLM", "Olmo3ForCausalLM"), OF_OLMO),
    GEMMA4: OTHERS | OF_GEMMA4,
    GPT_OSS: OF_GPT_OSS,
    "Phi3ForCausalLM": OF_PHI3,
}
"""Names that a family adds to NAMES or replaces in NAMES."""


def names_of(architecture: str) -> dict[str, str]:
    return NAMES | _OWN.get(architecture, {})


def original_name(name: str, architecture: str) -> str:
    """Return the tensor's name in transformers. Unknown names are returned unchanged."""
    names = names_of(architecture)
    if architecture in HYBRIDS and (found := _GATES.fullmatch(name)):
        return f"model.layers.{found[1]}.{GATES[found[2]]}"
    if architecture == GPT_OSS and (found := _SINKS.fullmatch(name)):
        return f"model.layers.{found[1]}.self_attn.sinks"
    is_gemma4 = architecture == GEMMA4
    if is_gemma4 and (found := _IN_LAYER.fullmatch(name)) and found[2] in WHOLE_GEMMA4:
        return f"model.layers.{found[1]}.{WHOLE_GEMMA4[found[2]]}"
    if (found := _LAYER.fullmatch(name)) and found[2] in EXPERTS:
        # Original gpt-oss files store all matrices transposed, except those named `_blocks`. GGUF
        # files never store them transposed, so their matrices get the name `_blocks`.
        kinds = {"weight": "_blocks", "bias": "_bias"} if architecture == GPT_OSS else {}
        stack = EXPERTS[found[2]] + kinds.get(found[3], "")
        return f"model.layers.{found[1]}.mlp.experts.{stack}"
    if (found := _LAYER.fullmatch(name)) and found[2] in names:
        return f"model.layers.{found[1]}.{names[found[2]]}.{found[3]}"
    if (found := _OTHER.fullmatch(name)) and found[1] in names:
        return f"{names[found[1]]}.{found[2]}"
    return name


def vision_name(name: str, architecture: str, is_swapped: bool = False) -> str:
    """Return a vision tensor's name in transformers, below the name of the model.

    An unknown name stays at the end of the result. `is_swapped` says that the names of both
    matrices of each MLP are swapped, as older converters of Gemma 3 wrote them.
    """
    is_qwen = architecture in HYBRIDS
    names, layers = (OF_VISION, "blocks") if is_qwen else (OF_SIGLIP, _SIGLIP_LAYERS)
    module = "visual." if is_qwen else ""
    if not is_qwen and name == "mm.input_projection.weight":
        return _PROJECTION
    found = _VISION.fullmatch(name)
    own = found and (found[3] or found[1])
    if is_swapped and own in _SWAPPED:
        own = _SWAPPED[own]
    if not found or own not in names:
        return f"{module or 'vision_tower.'}{name}"
    place = f"{layers}.{found[2]}." if found[2] else ""
    return f"{module}{place}{names[own]}{found[4]}"


def is_beyond(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a tensor belongs to an MTP (multi-token prediction) layer.

    MTP layers follow the model's main layers.
    """
    found = re.match(r"blk\.(\d+)\.", name)
    return found is not None and int(found[1]) >= config.get("num_trunk_layers", math.inf)
