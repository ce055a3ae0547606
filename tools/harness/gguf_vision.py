"""Writes a tiny vision-language model as a pair of GGUF files, as llama.cpp's converter does."""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

from tools.harness.gguf_files import decoded, encoded, to_gguf, write_file
from tools.harness.tiny_models import END

_TEXTS = ("model.language_model.", "language_model.model.")
_VISION = ("model.visual.", "vision_tower.encoder.", "vision_tower.", "multi_modal_projector.")
NAMES = {
    "embeddings.patch_embedding": "v.patch_embd",
    "embeddings.position_embedding": "v.position_embd",
    "post_layernorm": "v.post_ln",
    "mm_soft_emb_norm": "mm.soft_emb_norm",
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    **{f"self_attn.{kind}_proj": f"attn_{kind}" for kind in ("q", "k", "v", "out")},
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "patch_embed.proj": "v.patch_embd",
    "pos_embed": "v.position_embd",
    "merger.norm": "v.post_ln",
    "merger.linear_fc1": "mm.0",
    "merger.linear_fc2": "mm.2",
    "attn.qkv": "attn_qkv",
    "attn.proj": "attn_out",
    "norm1": "ln1",
    "norm2": "ln2",
    "mlp.linear_fc1": "ffn_up",
    "mlp.linear_fc2": "ffn_down",
}


def to_gguf_pair(folder: Path, target: Path, kind: str = "F32", **fields: Any) -> tuple[Path, Path]:
    """Writes a folder of make_tiny_image_model as two GGUF files, and returns both paths.

    `fields` replace fields of the vision part; a field that is None is left out.
    """
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    text = target / "text"
    text.mkdir(parents=True)
    shutil.copy(folder / "tokenizer.json", text)
    architecture = config["architectures"][0].replace("ConditionalGeneration", "CausalLM")
    own = config["text_config"] | {"architectures": [architecture]}
    (text / "config.json").write_text(json.dumps(own))
    prefix = next(it for it in _TEXTS if any(name.startswith(it) for name in weights))
    beside = {
        name.replace(prefix, "model."): tensor
        for name, tensor in weights.items()
        if not name.startswith(_VISION)
    }
    save_file(beside, text / "model.safetensors", {"format": "pt"})
    template = (folder / "chat_template.jinja").read_text()
    model = to_gguf(
        text, target / f"tiny-{kind}.gguf", kind, chat_template=template, eos_token_id=END
    )
    vision = {name: it for name, it in weights.items() if name.startswith(_VISION)}
    path = to_mmproj(folder, vision, target / f"mmproj-tiny-{kind}.gguf", kind, fields)
    # The folder gets the rounded weights of the files, so that both have the same weights.
    rounded = load_file(text / "model.safetensors")
    renamed = {name.replace("model.", prefix, 1): it for name, it in rounded.items()}
    if "lm_head.weight" in rounded:
        renamed["lm_head.weight"] = rounded["lm_head.weight"]
    save_file(renamed | vision, folder / "model.safetensors", {"format": "pt"})
    return model, path


def to_mmproj(
    folder: Path, weights: dict[str, Any], target: Path, kind: str, fields: dict[str, Any]
) -> Path:
    """Writes the vision part, and replaces the values in `weights` by their rounded values."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(target, "clip")
    for key, value in (_fields(config, _settings(folder)) | fields).items():
        if value is not None:
            writer.add_key_value(key, value, *_type_of(value))
    for name, tensor in weights.items():
        # llama.cpp does not run the head of SigLIP, which Gemma 3 does not need.
        if name.startswith("vision_tower.head."):
            continue
        inner = next(name.removeprefix(it) for it in _VISION if name.startswith(it))
        whole, _, part = inner.rpartition(".")
        if inner == "mm_input_projection_weight":
            writer.add_tensor("mm.input_projection.weight", tensor.float().numpy())
            continue
        stored = "F32" if part == "bias" or tensor.ndim != 2 or "pos" in whole else kind
        if tensor.ndim == 5:
            for frame, suffix in enumerate(("", ".1")):
                values = tensor[:, :, frame].float().numpy()
                writer.add_tensor(f"{NAMES[whole]}.{part}{suffix}", np.ascontiguousarray(values))
            continue
        shift = 1 if "soft_emb_norm" in whole else 0
        raw = encoded((tensor.float() + shift).numpy(), stored, name)
        weights[name] = decoded(raw, stored, tensor.shape) - shift
        writer.add_tensor(f"{_gguf_name(whole)}.{part}", raw, raw_dtype=Kind[stored])
    write_file(writer)
    return target


def _settings(folder: Path) -> dict[str, Any]:
    """Return the settings of the image processor."""
    file = folder / "preprocessor_config.json"
    if file.exists():
        found: dict[str, Any] = json.loads(file.read_text())
        return found
    whole = json.loads((folder / "processor_config.json").read_text())
    found = whole["image_processor"]
    return found


def _gguf_name(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    _, number, rest = name.split(".", 2)
    return f"v.blk.{number}.{NAMES[rest]}"


def _fields(config: dict[str, Any], images: dict[str, Any]) -> dict[str, Any]:
    vision = config["vision_config"]
    depth = vision.get("depth") or vision["num_hidden_layers"]
    common = {
        "clip.has_vision_encoder": True,
        "clip.use_gelu": True,
        "clip.vision.projection_dim": config["text_config"]["hidden_size"],
        "clip.vision.patch_size": vision["patch_size"],
        "clip.vision.embedding_length": vision["hidden_size"],
        "clip.vision.feed_forward_length": vision["intermediate_size"],
        "clip.vision.block_count": depth,
        "clip.vision.attention.head_count": vision.get("num_heads")
        or vision["num_attention_heads"],
        "clip.vision.attention.layer_norm_epsilon": 1e-6,
        "clip.vision.image_mean": images["image_mean"],
        "clip.vision.image_std": images["image_std"],
    }
    if config["model_type"] == "gemma3":
        side = vision["image_size"] // vision["patch_size"]
        rows = int(config["mm_tokens_per_image"] ** 0.5)
        return common | {
            "clip.projector_type": "gemma3",
            "clip.vision.image_size": vision["image_size"],
            "clip.vision.projector.scale_factor": side // rows,
        }
    side = int(vision["num_position_embeddings"] ** 0.5) * vision["patch_size"]
    return common | {
        "clip.projector_type": "qwen3vl_merger",
        "clip.vision.image_size": side,
        "clip.vision.spatial_merge_size": vision["spatial_merge_size"],
        "clip.vision.is_deepstack_layers": [False] * depth,
        "clip.vision.image_min_pixels": images["size"]["shortest_edge"],
        "clip.vision.image_max_pixels": images["size"]["longest_edge"],
    }


def _type_of(value: Any) -> tuple[Any, ...]:
    types = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}
    if isinstance(value, list):
        return gguf.GGUFValueType.ARRAY, gguf.GGUFValueType[types[type(value[0])]]
    return (gguf.GGUFValueType[types[type(value)]],)
