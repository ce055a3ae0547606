"""Makes a model folder for a GGUF file: a link to the file, a config, a tokenizer and a template.

So all later code reads one kind of checkpoint. The folders are stored in the user's cache. A
folder is made again when the GGUF file or this conversion has changed.
"""

import functools
import hashlib
import json
import math
import struct
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from headrace_common.checkpoints.gguf_families import own_settings
from headrace_common.checkpoints.gguf_file_names import (
    matching,
    quantization_of,
    stem_of,
    which_file,
)
from headrace_common.checkpoints.gguf_gemma4 import gemma4_config
from headrace_common.checkpoints.gguf_header import (
    OTHER_TYPES,
    GgufHeader,
    GgufTensor,
    fields_checked,
    is_later_part,
    parts,
    read_gguf,
)
from headrace_common.checkpoints.gguf_tokenizer import build_tokenizer
from headrace_common.checkpoints.gguf_vision import (
    MMPROJ,
    VisionParts,
    add_vision,
    find_mmproj,
    is_mmproj,
    refuse_mmproj,
)
from headrace_common.checkpoints.spec import Defaults
from headrace_common.errors import ModelError
from headrace_common.system.file_systems import cache_folder
from headrace_common.version import __version__

FAMILIES = {
    # llama.cpp also uses the name llama for Mistral models.
    "llama": "LlamaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    # llama.cpp also uses the name olmo2 for OLMo 3.
    "olmo2": "Olmo2ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "qwen35": "Qwen3_5ForCausalLM",
    "qwen35moe": "Qwen3_5MoeForCausalLM",
    "qwen3next": "Qwen3NextForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
_ROUTED = ("gemma4", "gpt-oss", "qwen3moe", "qwen35moe", "qwen3next")
_HYBRIDS = ("qwen35", "qwen35moe", "qwen3next")
_SIZES = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "feed_forward_length": "intermediate_size",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base_swa": "rope_local_base_freq",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_NEEDED = tuple(_SIZES)[:3]
_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_STATES = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.inner_size": "linear_value_dim",
}
"""The GGUF fields of gated delta nets, and the config key for each field."""
_MAYBE_BIASED = ("llama", "gpt-oss")
_27B = {"gemma2": 46, "gemma3": 62}
"""The number of layers of the 27B model in each family.

Only the 27B models have an attention scale that is not derived from head_dim.
"""
# Tensors of all other types are computed in bfloat16.
_WIDE = {"F32": "float32", "F16": "float16"}
_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "</s>"),
    *("<end_of_turn>", "<turn|>", "<|return|>", "<|call|>"),
)
"""Control tokens that always end an answer. A GGUF file often names only one end token."""
_CONTROL = 3
# Gemma 4 hands over to a tool with this token, which is not a control token in GGUF files.
_HANDS_OVER = "<|tool_response>"
_SAMPLING: dict[str, tuple[str, float]] = {
    "temperature": ("temp", 0.8),
    "top_k": ("top_k", 40),
    "top_p": ("top_p", 0.95),
    "min_p": ("min_p", 0.05),
    "repetition_penalty": ("penalty_repeat", 1.0),
}
"""Each sampling setting's name in `general.sampling` of newer files, and llama.cpp's default."""
_RECOMMENDED: dict[str, dict[str, float]] = {
    # The file of smollm2. Temperature and top_p are those of the model card. The penalty ends
    # most loops: benchmarks/loops.py measures how many answers repeat themselves. The limit ends
    # the others.
    "Smollm2 135M 8k Lc100K Mix1 Ep2": {
        "temperature": 0.2,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "max_tokens": 1024,
    },
}
"""Sampling settings for models whose files have none, by `general.name`."""
_LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The parameters of all models with Llama 3's RoPE scaling. GGUF files have only the divisors."""
_TOKENIZER_CONFIG = "tokenizer_config.json"
_MODULES = tuple(
    f"gguf_{name}.py"
    for name in ("families", "file_names", "folder", "gemma4", "tokenizer", "vision")
)


def choose_file(folder: Path, wanted: str | None, given: str | None = None) -> Path:
    """Return the GGUF file that `wanted` names: a file name, or a quantization such as Q4_K_M.

    If `wanted` is None, `folder` must contain a single model. `given` is the name by which the user
    requested the model. Raises ModelError with a list of the files.
    """
    files = [path.name for path in model_files(folder) if not is_later_part(path)]
    chosen = files if wanted is None else matching(files, wanted)
    if len(chosen) == 1:
        return folder / chosen[0]
    raise ModelError(which_file(given or folder.name, files), "model_not_found")


def model_files(folder: Path) -> list[Path]:
    """Return the GGUF files of a folder in order, without vision parts (mmproj files)."""
    return [path for path in sorted(folder.glob("*.gguf")) if not is_mmproj(path.name)]


@functools.cache
def conversion() -> bytes:
    """Return a hash of the code that makes the folders; another hash makes all folders again."""
    digest = hashlib.sha256(__version__.encode())
    for module in _MODULES:
        digest.update(Path(__file__).with_name(module).read_bytes())
    return digest.digest()


def gguf_folder(path: Path, mmproj: str = "none") -> Path:
    """Return the model folder of a GGUF file, and make the folder if needed.

    `mmproj` is "none", "auto", or the path of the file with the vision part (see the setting of
    this name). Raises ModelError if a file cannot be used.
    """
    files = parts(path)
    vision = find_mmproj(path, mmproj)
    is_named = mmproj not in ("auto", "none")
    digest = hashlib.sha256(conversion())
    # If the user names the vision part, it is used or refused. If it was only found, the folder may
    # contain just a note why it is not used. So the two cases have separate folders.
    digest.update(b"named" * is_named)
    for file in (*files, vision) if vision else files:
        facts = file.stat()
        digest.update(f"{file.resolve()}\0{facts.st_size}\0{facts.st_mtime_ns}\0".encode())
    # A later part of a model stands for the whole model.
    folder = _cache() / digest.hexdigest()[:12] / stem_of(path.name)
    if not folder.is_dir():
        _make(folder, files, vision, is_named)
    return folder


def _make(folder: Path, files: list[Path], vision: Path | None, is_named: bool) -> None:
    """Make the folder under a temporary name, then rename the folder.

    Another server may make the same folder at the same time. `is_named` says whether the user named
    the vision part.
    """
    header = read_gguf(files[0])
    refuse_mmproj(header, files[0])
    for file in files[1:]:
        header.tensors.update(read_gguf(file).tensors)
    tokenizer = build_tokenizer(header)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as beside:
        own = Path(beside) / folder.name
        own.mkdir()
        for file in files:
            (own / file.name).symlink_to(file.resolve())
        tokenizer.save(str(own / "tokenizer.json"))
        with fields_checked():
            facts = {"gguf_family": header.architecture, "gguf_type": _main_type(header, folder)}
            made = VisionParts(_config(header, own), {})
            if vision is not None:
                (own / MMPROJ).symlink_to(vision.resolve())
                made = add_vision(made.config, header, vision, is_named)
            for name, content in made.files.items():
                _write(own / name, content)
            _write(own / "config.json", made.config | facts)
            described = _tokenizer_config(header) | made.files.get(_TOKENIZER_CONFIG, {})
            if made.files:
                described["tokenizer_class"] = "PreTrainedTokenizerFast"
            _write(own / _TOKENIZER_CONFIG, described)
            ends = {"eos_token_id": _end_tokens(header)}
            _write(own / "generation_config.json", ends | _sampling(header))
        try:
            own.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise


def _main_type(header: GgufHeader, folder: Path) -> str:
    """Return the quantization in the file's name, or else the type that holds the most bytes."""
    sizes: Counter[str] = Counter()
    for tensor in header.tensors.values():
        sizes[tensor.kind] += tensor.num_bytes
    return quantization_of(folder.name) or sizes.most_common(1)[0][0]


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content))


def _config(header: GgufHeader, folder: Path) -> dict[str, Any]:
    """Return the config in transformers' format.

    If only llama.cpp can run the model, the config contains the reason and a few other keys.
    """
    if reason := _objection(header):
        return _bare(header, reason)
    try:
        return _native_config(header, folder)
    except ModelError as error:
        if error.code != "model_unsupported":
            raise
        return _bare(header, str(error))


def _objection(header: GgufHeader) -> str | None:
    """Return why the architecture or a tensor type is not supported natively.

    Returns None if the architecture and all types are supported.
    """
    name = header.architecture
    if name not in FAMILIES:
        known = ", ".join(FAMILIES)
        return (
            f"GGUF files of the architecture {name} are not supported natively; supported "
            f"architectures: {known}."
        )
    if header.own("expert_count", 0) and name not in _ROUTED:
        return f"GGUF files of {name} with experts are not supported natively."
    others = {label for label, *_ in OTHER_TYPES.values()}
    if found := sorted({tensor.kind for tensor in header.tensors.values()} & others):
        return (
            f"The GGUF file has tensors of the type {', '.join(found)}, which only llama.cpp can "
            "compute."
        )
    return None


def _bare(header: GgufHeader, reason: str) -> dict[str, Any]:
    """Return a config without hyperparameters, which llama.cpp reads from the file."""
    config: dict[str, Any] = {
        "architectures": [header.architecture],
        "vocab_size": len(header.fields["tokenizer.ggml.tokens"]),
        "dtype": "bfloat16",
        "only_llama_cpp": reason,
    }
    if isinstance(length := header.own("context_length"), int):
        config["max_position_embeddings"] = length
    return config


def _native_config(header: GgufHeader, folder: Path) -> dict[str, Any]:
    name = header.architecture
    # All models but qwen35moe have a dense MLP in each layer.
    # In gemma4, the size of the MLP may differ from layer to layer.
    has_mlps = name not in ("qwen35moe", "gemma4")
    states = tuple(_STATES) if name in _HYBRIDS else ()
    for key in (*_NEEDED, *("feed_forward_length",) * has_mlps, *states):
        if not isinstance(size := header.own(key), int) or size < 1:
            raise ModelError(
                f"The GGUF file has no valid {name}.{key}; download it again.", "model_corrupt"
            )
    if header.own("block_count") > len(header.tensors):
        raise ModelError(
            "The GGUF file has fewer tensors than layers; download it again.", "model_corrupt"
        )
    given = {ours: header.own(theirs) for theirs, ours in (_SIZES | _EXPERTS).items()}
    kinds = {tensor.kind for tensor in header.tensors.values() if len(tensor.shape) > 1}
    (kind,) = kinds if len(kinds) == 1 else ("BF16",)
    config = {key: value for key, value in given.items() if value is not None} | {
        "architectures": [FAMILIES[name]],
        "dtype": _WIDE.get(kind, "bfloat16"),
        "vocab_size": header.tensors["token_embd.weight"].shape[0]
        if "token_embd.weight" in header.tensors
        else 0,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        # GGUF files do not contain this setting; llama.cpp assumes True.
        "norm_topk_prob": True,
        "attention_bias": name in _MAYBE_BIASED and "blk.0.attn_q.bias" in header.tensors,
    }
    if name == "llama":
        # llama.cpp reads each of these biases if the file has it. transformers' config has one
        # setting for all biases of attention.
        config["attention_out_bias"] = "blk.0.attn_output.bias" in header.tensors
        config["mlp_bias"] = "blk.0.ffn_down.bias" in header.tensors
    if name in _27B:
        is_27b = config["num_hidden_layers"] == _27B[name]
        size = config["hidden_size"] / config["num_attention_heads"]
        config["query_pre_attn_scalar"] = size if is_27b else config.get("head_dim", 256)
    if name in _HYBRIDS:
        config |= _hybrid(header)
    config |= own_settings(header, config)
    tensor = header.tensors.get("rope_freqs.weight")
    if name == "gemma4":
        divisors = _values(folder / tensor.file, tensor) if tensor else ()
        return config | gemma4_config(header, divisors)
    if tensor:
        return config | {"rope_scaling": _llama3(config, _values(folder / tensor.file, tensor))}
    return config | _rope(header)


def _hybrid(header: GgufHeader) -> dict[str, Any]:
    """Return the settings of the delta nets.

    The result also has the kind of each layer, and the rotated share of an attention head.
    """
    config = {ours: header.own(theirs) for theirs, ours in _STATES.items()}
    config["linear_value_head_dim"] = (
        config.pop("linear_value_dim") // config["linear_num_value_heads"]
    )
    layers = header.own("block_count") - header.own("nextn_predict_layers", 0)
    config |= {"num_hidden_layers": layers, "num_trunk_layers": layers}
    recurrent = header.own("attention.recurrent_layers")
    every = header.own("full_attention_interval", 4)
    if not isinstance(recurrent, list):
        recurrent = [(layer + 1) % every != 0 for layer in range(layers)]
    kinds = {True: "linear_attention", False: "full_attention"}
    config["layer_types"] = [kinds[bool(is_recurrent)] for is_recurrent in recurrent[:layers]]
    dim = header.own("attention.key_length")
    if isinstance(dim, int) and isinstance(turned := header.own("rope.dimension_count"), int):
        config["partial_rotary_factor"] = turned / dim
    return config


def _values(path: Path, tensor: GgufTensor) -> tuple[float, ...]:
    if tensor.kind != "F32":
        raise ModelError(
            "rope_freqs.weight of the GGUF file is not F32; download it again.", "model_corrupt"
        )
    with path.open("rb") as file:
        file.seek(tensor.offset)
        raw = file.read(tensor.num_bytes)
    return struct.unpack(f"<{len(raw) // 4}f", raw)


def _llama3(config: dict[str, Any], divisors: tuple[float, ...]) -> dict[str, Any]:
    """Return the parameters that result in these divisors (see models/rope.py).

    Raises ModelError if no parameters result in these divisors.
    """
    factor = max(divisors, default=1.0)
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    found = []
    for pair in range(min(dim // 2, len(divisors) + 1)):
        frequency = config.get("rope_theta", 10_000.0) ** (-2 * pair / dim)
        turns = _LLAMA3["original_max_position_embeddings"] * frequency / (2 * math.pi)
        low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        found.append(1 / (kept + (1 - kept) / factor))
    is_same = len(found) == len(divisors) and all(
        math.isclose(ours, theirs, rel_tol=1e-3)
        for ours, theirs in zip(found, divisors, strict=True)
    )
    if not is_same:
        raise ModelError(
            "The GGUF file scales its rotary positions in an unknown way (rope_freqs.weight)."
        )
    return _LLAMA3 | {"factor": factor}


def _rope(header: GgufHeader) -> dict[str, Any]:
    kind = header.own("rope.scaling.type", "none")
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise ModelError(
            f"Rotary positions of kind {kind} in GGUF files are not supported natively."
        )
    scaling = {"rope_type": kind, "factor": header.own("rope.scaling.factor", 1.0)}
    if header.architecture == "gpt-oss":
        # gpt-oss does not round YaRN's correction range. GGUF files have no field for the rounding.
        scaling["truncate"] = False
    if original := header.own("rope.scaling.original_context_length"):
        scaling["original_max_position_embeddings"] = original
    return {"rope_scaling": scaling}


def _end_tokens(header: GgufHeader) -> list[int]:
    fields = header.fields
    tokens = fields["tokenizer.ggml.tokens"]
    kinds = fields.get("tokenizer.ggml.token_type") or []
    stated = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    named = [
        n
        for n, kind in enumerate(kinds)
        if (kind == _CONTROL and tokens[n] in _ENDS) or tokens[n] == _HANDS_OVER
    ]
    return list(dict.fromkeys(n for n in [*stated, *named] if isinstance(n, int)))


def _sampling(header: GgufHeader) -> dict[str, float]:
    """Return the sampling defaults of a file.

    A recommended setting or llama.cpp's default replaces each missing or invalid setting.
    """
    recommended = _RECOMMENDED.get(str(header.fields.get("general.name")), {})
    found = dict(recommended)
    for ours, (theirs, plain) in _SAMPLING.items():
        otherwise = recommended.get(ours, plain)
        given = header.fields.get(f"general.sampling.{theirs}", otherwise)
        try:
            msgspec.convert({ours: given}, Defaults)
            # The file stores 0.8 in four bytes, and Python reads these bytes as 0.800000012.
            found[ours] = round(given, 6)
        except (msgspec.ValidationError, TypeError):
            found[ours] = otherwise
    return found


def _tokenizer_config(header: GgufHeader) -> dict[str, Any]:
    fields = header.fields
    tokens = fields["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {}
    for ours, theirs in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding")):
        number = fields.get(f"tokenizer.ggml.{theirs}_token_id")
        if isinstance(number, int) and 0 <= number < len(tokens):
            config[ours] = tokens[number]
    if isinstance(template := fields.get("tokenizer.chat_template"), str):
        config["chat_template"] = template
    return config


def _cache() -> Path:
    return cache_folder("gguf")
