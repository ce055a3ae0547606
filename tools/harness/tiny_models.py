"""Makes tiny models with seeded random weights, written by transformers as real model folders."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 320
# The id of <|im_end|>.
END = 258
POOLING_MODES = (
    "cls_token",
    "max_tokens",
    "mean_tokens",
    "mean_sqrt_len_tokens",
    "weightedmean_tokens",
    "lasttoken",
)
"""The names of sentence-transformers' pooling modes, in the order of the joined results."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "eos_token_id": END,
    "bos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SHARED = {"shared_expert_intermediate_size": 48}
_GPT_OSS = {
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 24,
    "pad_token_id": 0,
}
_HYBRID = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    # This width is the width of a kernel's tile.
    "linear_value_head_dim": 64,
    "rope_parameters": {"rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
}
_GEMMA4 = {
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "global_head_dim": 32,
    "sliding_window": 24,
    "final_logit_softcapping": 30.0,
    "pad_token_id": 0,
}
GEMMA4_EXPERTS: dict[str, Any] = {
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "enable_moe_block": True,
    "num_experts": 5,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
"""Changes a tiny Gemma 4 to the form with experts, as in the 26B model."""
_GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.4,
    "logits_scaling": 5.0,
}
_DENSE_GRANITE = {
    "shared_intermediate_size": 96,
    "num_local_experts": 0,
    "position_embedding_type": "rope",
    "layer_types": ["full_attention"] * 3,
    "mamba_n_heads": 8,
}
_UNIFIED = {key: value for key, value in _GEMMA4.items() if "per_layer_input" not in key}
_MORE = {
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4ForConditionalGeneration": _GEMMA4,
    "Gemma4UnifiedForCausalLM": _UNIFIED,
    "Gemma4UnifiedForConditionalGeneration": _UNIFIED,
    "Qwen3MoeForCausalLM": _EXPERTS,
    "GptOssForCausalLM": _GPT_OSS,
    "Qwen3_5ForCausalLM": _HYBRID,
    "Qwen3_5ForConditionalGeneration": _HYBRID,
    "Qwen3_5MoeForCausalLM": _HYBRID | _EXPERTS | _SHARED,
    "Qwen3_5MoeForConditionalGeneration": _HYBRID | _EXPERTS | _SHARED,
    "Qwen3NextForCausalLM": _HYBRID | _EXPERTS | _SHARED,
    "GraniteForCausalLM": _GRANITE,
    "GraniteMoeHybridForCausalLM": _GRANITE | _DENSE_GRANITE,
    "Olmo2ForCausalLM": {"pad_token_id": 0},
    # The fourth layer attends without a window.
    "Olmo3ForCausalLM": {"num_hidden_layers": 5, "sliding_window": 24, "pad_token_id": 0},
    "Phi3ForCausalLM": {"pad_token_id": 0},
    # The fourth layer does not rotate.
    "SmolLM3ForCausalLM": {"num_hidden_layers": 5, "pad_token_id": 0},
}
_EYES = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 32,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}


def make_tiny_model(
    folder: Path, architecture: str = "Qwen3ForCausalLM", seed: int = 0, **config: Any
) -> Path:
    """Makes a model folder and returns its path.

    The folder has weights, a config, a byte-level tokenizer and a chat template. `config` overrides
    keys of the model's config; a key that is None keeps its default. `dtype` and `max_shard_size`
    are for the weight files.
    """
    dtype = config.pop("dtype", torch.float32)
    max_shard_size = config.pop("max_shard_size", "1GB")
    model_class = getattr(transformers, architecture)
    given = _SHAPE | _MORE.get(architecture, {}) | config
    keys = {key: value for key, value in given.items() if value is not None}
    torch.manual_seed(seed)
    model = model_class(_config_of(model_class, keys)).to(dtype)
    _unsettle(model)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    _write_tokenizer(folder)
    return folder


def _config_of(model_class: Any, keys: dict[str, Any]) -> Any:
    """Return a model's config; for a model with vision, `keys` belong to its text config."""
    if not _sees(model_class.__name__):
        return model_class.config_class(**keys)
    tied = {"tie_word_embeddings": keys.get("tie_word_embeddings", False)}
    return model_class.config_class(text_config=keys, vision_config=_EYES, **tied)


def _sees(architecture: str) -> bool:
    return architecture.endswith("ForConditionalGeneration")


def _unsettle(model: torch.nn.Module) -> None:
    """Adds noise to norms, which start as ones, and to biases, which start as zeros.

    Without the noise, tests could not notice that two norms or two biases are mixed up. The
    projection of Gemma 3 also starts as zeros, so no image would change a logit.
    """
    with torch.no_grad():
        scales = [(n, b) for n, b in model.named_buffers() if n.endswith("layer_scalar")]
        for name, parameter in [*model.named_parameters(), *scales]:
            # The biases of several experts are stored in one matrix.
            if parameter.ndim == 1 or name.endswith(("_bias", "_projection_weight")):
                parameter.add_(torch.randn_like(parameter) * 0.2)


def _write_tokenizer(folder: Path) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {
        "chat_template": CHAT_TEMPLATE,
        "eos_token": SPECIALS[2],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described))


HARMONY = ("start", "channel", "message", "end", "call", "return", "constrain")
HARMONY_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for m in messages %}<|start|>{{ m.role }}"
    "{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ m.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def speak_harmony(folder: Path) -> dict[str, int]:
    """Adds harmony's markers and template to a model folder; returns ids by marker."""
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    markers = [f"<|{name}|>" for name in HARMONY]
    tokenizer.add_special_tokens(markers)
    tokenizer.save(str(path))
    ids = {marker: tokenizer.token_to_id(marker) for marker in markers}
    described = json.loads((folder / "tokenizer_config.json").read_text())
    described |= {"chat_template": HARMONY_TEMPLATE, "eos_token": "<|return|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    ends = {"eos_token_id": [ids["<|return|>"], ids["<|call|>"]]}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    return ids


_SEQ2SEQ: dict[str, tuple[str, dict[str, Any]]] = {
    "T5": ("T5ForConditionalGeneration", {"d_ff": 96, "n_positions": 256}),
    "GatedT5": (
        "T5ForConditionalGeneration",
        {
            "d_ff": 96,
            "n_positions": 256,
            "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": False,
        },
    ),
    "BART": (
        "BartForConditionalGeneration",
        {
            "encoder_layers": 3,
            "decoder_layers": 3,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 96,
            "decoder_ffn_dim": 96,
            "init_std": 0.2,
            "max_position_embeddings": 256,
            "tie_word_embeddings": False,
        },
    ),
}
_SEQ2SEQ_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 64,
    "d_kv": 16,
    "num_layers": 3,
    "num_heads": 4,
    "eos_token_id": END,
    "bos_token_id": 256,
    "pad_token_id": 257,
    "decoder_start_token_id": 257,
}


TURNS_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role != ('user' if loop.index0 % 2 == 0 else 'assistant') %}"
    "{{ raise_exception('Roles must alternate, and there is no system.') }}{% endif %}"
    "[{{ 'model' if m.role == 'assistant' else m.role }}]{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}[model]{% endif %}"
)
"""A template that is as strict as the templates of Gemma 2 and the first Mistral."""


def make_tiny_seq2seq(folder: Path, kind: str = "T5", **changes: Any) -> Path:
    """Makes an encoder-decoder of kind T5, GatedT5 or BART; a source ends with <|im_end|>."""
    architecture, further = _SEQ2SEQ[kind]
    further = further | changes
    model_class = getattr(transformers, architecture)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**_SEQ2SEQ_SHAPE | further))
    _unsettle(model)
    # With the initial weights, an answer would be one token repeated.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" in name or (parameter.ndim == 2 and "embed" not in name):
                parameter.mul_(4.0 if "shared" not in name else 1.0)
    model.generation_config.forced_bos_token_id = 256 if kind == "BART" else None
    model.save_pretrained(folder)
    _write_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {SPECIALS[2]}", special_tokens=[(SPECIALS[2], END)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


IMAGE = "<image>"
IMAGE_MARKS = {
    "LLaVA": IMAGE,
    "Gemma3": "<start_of_image>",
    "Qwen2-VL": "<|vision_start|><|image_pad|><|vision_end|>",
    "Qwen3.5": "<|vision_start|><|image_pad|><|vision_end|>",
    "Qwen3.5-MoE": "<|vision_start|><|image_pad|><|vision_end|>",
}
"""Maps a kind of model to the text that the model's chat template writes for an image."""
IMAGE_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}MARKS"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
_TEXT = {key: value for key, value in _SHAPE.items() if value is not None}


def make_tiny_image_model(folder: Path, kind: str) -> Path:
    """Makes an image-text model with its processor; `kind` is a key of IMAGE_MARKS."""
    kinds = {
        "LLaVA": _llava,
        "Qwen2-VL": _qwen2_vl,
        "Gemma3": _gemma3,
        "Qwen3.5": _qwen3_5,
        "Qwen3.5-MoE": _qwen3_5_moe,
    }
    make = kinds[kind]
    _write_tokenizer(folder)
    names = {
        "LLaVA": (IMAGE,),
        "Gemma3": ("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
    }.get(kind, ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"))
    inner = Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.add_special_tokens(list(names))
    inner.save(str(folder / "tokenizer.json"))
    template = IMAGE_TEMPLATE.replace("MARKS", IMAGE_MARKS[kind])
    # The fourth name, if there is one, stands for a video.
    special = dict(
        zip(("image_token", "boi_token", "eoi_token"), (names[:3][-1], *names), strict=False)
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=SPECIALS[2], extra_special_tokens=special
    )
    torch.manual_seed(0)
    ids = {name: inner.token_to_id(name) for name in names}
    model, processor = make(tokenizer, ids, template, folder)
    _unsettle(model)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def _llava(tokenizer: Any, ids: dict[str, int], template: str, _: Path) -> tuple[Any, Any]:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**_VISION),
        text_config=transformers.LlamaConfig(**_TEXT | {"vocab_size": VOCAB_SIZE}),
        image_token_id=ids[IMAGE],
        image_token_index=ids[IMAGE],
        vision_feature_layer=-2,
    )
    size = {"shortest_edge": 32}
    images = transformers.CLIPImageProcessorPil(size=size, crop_size={"height": 32, "width": 32})
    processor = transformers.LlavaProcessor(
        images, tokenizer, patch_size=8, vision_feature_select_strategy="default",
        image_token=IMAGE, num_additional_image_tokens=1, chat_template=template,
    )  # fmt: skip
    return transformers.LlavaForConditionalGeneration(config), processor


def _qwen2_vl(tokenizer: Any, ids: dict[str, int], template: str, folder: Path) -> tuple[Any, Any]:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    config = transformers.Qwen2VLConfig(
        vision_config={
            "depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2,
            "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2,
        },
        text_config=_TEXT | {"rope_parameters": rope},
        **_qwen_ids(ids),
    )  # fmt: skip
    return transformers.Qwen2VLForConditionalGeneration(config), _grid(tokenizer, template, folder)


def _qwen3_5(tokenizer: Any, ids: dict[str, int], template: str, folder: Path) -> tuple[Any, Any]:
    config = transformers.Qwen3_5Config(**_seeing_hybrid(ids, _TEXT | _HYBRID))
    return transformers.Qwen3_5ForConditionalGeneration(config), _grid(tokenizer, template, folder)


def _qwen3_5_moe(
    tokenizer: Any, ids: dict[str, int], template: str, folder: Path
) -> tuple[Any, Any]:
    text = _TEXT | _HYBRID | _EXPERTS | _SHARED
    # With seed 0, the model answers with the token that represents an image.
    torch.manual_seed(1)
    model = transformers.Qwen3_5MoeForConditionalGeneration(
        transformers.Qwen3_5MoeConfig(**_seeing_hybrid(ids, text))
    )
    return model, _grid(tokenizer, template, folder)


def _seeing_hybrid(ids: dict[str, int], text: dict[str, Any]) -> dict[str, Any]:
    rope = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    return {
        "vision_config": _EYES | {"depth": 3, "patch_size": 8, "num_position_embeddings": 9},
        "text_config": text | {"rope_parameters": text["rope_parameters"] | rope},
        **_qwen_ids(ids),
    }


def _qwen_ids(ids: dict[str, int]) -> dict[str, int]:
    return {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }


def _grid(tokenizer: Any, template: str, folder: Path) -> Any:
    """Return the part of Qwen's processor that does not need the package for videos."""
    sizes = {"shortest_edge": 16 * 16 * 2, "longest_edge": 64 * 64}
    images = transformers.Qwen2VLImageProcessorPil(
        patch_size=8, merge_size=2, temporal_patch_size=2, size=sizes
    )
    (folder / "chat_template.jinja").write_text(template)
    images.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return images


def _gemma3(tokenizer: Any, ids: dict[str, int], template: str, _: Path) -> tuple[Any, Any]:
    config = transformers.Gemma3Config(
        vision_config=_VISION,
        text_config=_TEXT | {"sliding_window": 24, "pad_token_id": 0},
        mm_tokens_per_image=4,
        image_token_id=ids["<image_soft_token>"],
        boi_token_index=ids["<start_of_image>"],
        eoi_token_index=ids["<end_of_image>"],
    )
    images = transformers.Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    processor = transformers.Gemma3Processor(
        images, tokenizer, chat_template=template, image_seq_length=4
    )
    return transformers.Gemma3ForConditionalGeneration(config), processor


_ENCODER_SHAPE = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "num_labels": 1,
}
ENCODER_SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def make_tiny_encoder(folder: Path, architecture: str = "BertModel", **config: Any) -> Path:
    """Makes a bidirectional encoder with a WordPiece tokenizer that accepts text pairs."""
    model_class = getattr(transformers, architecture)
    vocab_size = _write_word_pieces(folder)
    torch.manual_seed(0)
    shape = model_class.config_class(**_ENCODER_SHAPE | {"vocab_size": vocab_size} | config)
    model = model_class(shape)
    _unsettle(model)
    model.save_pretrained(folder)
    return folder


def _write_word_pieces(folder: Path) -> int:
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,!?"
    pieces = [*ENCODER_SPECIALS, *letters, *(f"##{letter}" for letter in letters), "the", "##ing"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(list(ENCODER_SPECIALS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])],
    )
    folder.mkdir(parents=True, exist_ok=True)
    # sentence-transformers also writes these limits. Such limits must not truncate a request's
    # texts.
    tokenizer.enable_truncation(max_length=16)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(folder / "tokenizer.json"))
    described: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 128,
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
    }
    described |= {f"{token[1:-1].lower()}_token": token for token in ENCODER_SPECIALS}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return len(vocab)


def write_pooling(
    folder: Path, *modes: str, stages: tuple[str, ...] = ("Normalize",), **settings: Any
) -> Path:
    """Writes the files that configure pooling in sentence-transformers.

    `settings` has prompts and similar keys. A Dense stage makes 24 numbers with random weights.
    """
    kinds = ("Transformer", "Pooling", *stages)
    types = [f"sentence_transformers.models.{kind}" for kind in kinds]
    paths = ["", *(f"{number}_{kind}" for number, kind in enumerate(kinds[1:], 1))]
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": kind}
        for number, (path, kind) in enumerate(zip(paths, types, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for path in paths[1:]:
        (folder / path).mkdir()
    hidden = json.loads((folder / "config.json").read_text())["hidden_size"]
    pooling: dict[str, Any] = {f"pooling_mode_{key}": key in modes for key in POOLING_MODES}
    pooling["word_embedding_dimension"] = hidden
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if settings:
        (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    for path in paths[1:]:
        if path.endswith("_Dense"):
            _write_dense(folder / path, hidden * len(modes), 24)
    return folder


def _write_dense(folder: Path, num_in: int, num_out: int) -> None:
    torch.manual_seed(num_in)
    layer = torch.nn.Linear(num_in, num_out)
    weights = {f"linear.{name}": value for name, value in layer.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    described = {
        "in_features": num_in,
        "out_features": num_out,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    (folder / "config.json").write_text(json.dumps(described))


def make_draft_model(model: Path, folder: Path, num_layers: int) -> Path:
    """Write a model that has only the first layers of another model, and the same tokenizer."""
    folder.mkdir()
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))
    shutil.copy(model / "tokenizer.json", folder)
    kept = {}
    for file in model.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            _, is_layer, rest = name.partition("layers.")
            if not is_layer or int(rest.partition(".")[0]) < num_layers:
                kept[name] = tensor
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def add_mtp_layer(folder: Path, is_right: bool = False) -> Path:
    """Add a random MTP layer to a tiny Qwen3.5 or Qwen3-Next; return the folder.

    If `is_right` is true, the layers of the model leave each token's embedding unchanged. Then the
    MTP layer predicts the same tokens as the model.
    """
    file = folder / "model.safetensors"
    torch.manual_seed(7)
    tensors = load_file(file)
    # The second layer has attention. The MTP layer gets the same numbers in another order.
    parts = {name.partition(".layers.1.")[2]: tensor for name, tensor in tensors.items()}
    for name, tensor in parts.items():
        if name:
            order = torch.randperm(tensor.numel())
            tensors[f"mtp.layers.0.{name}"] = tensor.flatten()[order].view_as(tensor)
    norm = next(it for name, it in tensors.items() if name.endswith("model.norm.weight"))
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors[f"mtp.{name}.weight"] = torch.randn_like(norm) * 0.2
    fc = torch.randn(len(norm), 2 * len(norm)).to(norm.dtype) * 0.2
    if is_right:
        fc = torch.eye(len(norm), 2 * len(norm), dtype=norm.dtype)
        silent = ("o_proj.weight", "out_proj.weight", "down_proj", "down_proj.weight")
        norms = ("norm.weight", "norm_embedding.weight")
        for name, tensor in tensors.items():
            if name.endswith((*silent, *norms)):
                tensor.zero_()
    tensors["mtp.fc.weight"] = fc
    save_file(tensors, file, metadata={"format": "pt"})
    return folder
