"""A GGUF file as a model's folder: config, tokenizer and template are written beside a link to it.

So everything after this sees one kind of checkpoint. Such folders lie in the user's cache and are
made anew when the file, or what is made of it, has changed.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import struct
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from headrace_common.checkpoints.gguf_header import (
    OTHER_TYPES,
    GgufHeader,
    GgufTensor,
    is_later_part,
    parts,
    read_gguf,
)
from headrace_common.checkpoints.gguf_tokenizer import build_tokenizer
from headrace_common.checkpoints.spec import Defaults
from headrace_common.errors import ModelError
from headrace_common.version import __version__

_FAMILIES = {
    "llama": "LlamaForCausalLM",  # llama.cpp calls Mistral so too
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "qwen35": "Qwen3_5ForCausalLM",
    "qwen35moe": "Qwen3_5MoeForCausalLM",
    "qwen3next": "Qwen3NextForCausalLM",
}
_ROUTED = ("gpt-oss", "qwen3moe", "qwen35moe", "qwen3next")
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
"""Of gated delta nets."""
_MAYBE_BIASED = ("llama", "gpt-oss")
_27B = {"gemma2": 46, "gemma3": 62}
"""Layers of the one size of a family whose scores are scaled by another size than a head's."""
_WIDE = {"F32": "float32", "F16": "float16"}  # the rest is computed in bfloat16
_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "</s>"),
    *("<end_of_turn>", "<|return|>", "<|call|>"),
)
"""Control tokens that end an answer whatever the fields say: files often name but one of them."""
_CONTROL = 3
_SAMPLING: dict[str, tuple[str, float]] = {
    "temperature": ("temp", 0.8),
    "top_k": ("top_k", 40),
    "top_p": ("top_p", 0.95),
    "min_p": ("min_p", 0.05),
    "repetition_penalty": ("penalty_repeat", 1.0),
}
"""Under general.sampling in newer files, and llama.cpp's own defaults."""
_LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The only stretching that is published under this name; files hold what it comes to."""
_SHOWN, _SHOWN_CHARS = 8, 80  # names of files in a message, and of each
_QUANTIZATION = re.compile(r"(?:^|[-_.])((?:IQ|TQ|Q)\d\w*|MXFP4\w*|BF16|F16|F32)$", re.IGNORECASE)


def choose_file(folder: Path, wanted: str | None, given: str | None = None) -> Path:
    """The only GGUF file, or the one of a name or of a quantization such as Q4_K_M.

    ModelError lists them; `given` is what the folder was called.
    """
    files = [path.name for path in sorted(folder.glob("*.gguf")) if not is_later_part(path)]
    chosen = files if wanted is None else matching(files, wanted)
    if len(chosen) == 1:
        return folder / chosen[0]
    raise ModelError(which_file(given or folder.name, files), "model_not_found")


def which_file(given: str, files: Iterable[str]) -> str:
    """Return a message that lists some of the GGUF files and says how to name one of them."""
    names = sorted(labels(files).values())
    if not names:
        return f"{given} has no GGUF files; leave out the colon and the part after it."
    shown = ", ".join(name[:_SHOWN_CHARS] for name in names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    example = f"{given}:{names[0]}"
    return f"{given} has {len(names)} GGUF files ({shown}{more}); name one, as in {example}."


def matching(files: Iterable[str], wanted: str) -> list[str]:
    """The files of that name, with or without .gguf, all parts; else of that quantization."""
    files = list(files)
    named = [name for name in files if stem_of(name) == stem_of(wanted)]
    return named or [name for name in files if quantization_of(name) == wanted.upper()]


def labels(files: Iterable[str]) -> dict[str, str]:
    """A word that tells each model apart, by its first file: the quantization, or its name."""
    firsts: dict[str, str] = {}
    for name in sorted(files):
        firsts.setdefault(stem_of(name), name)
    kinds = Counter(quantization_of(name) for name in firsts.values())
    return {
        name: kind if (kind := quantization_of(name)) and kinds[kind] == 1 else f"{stem}.gguf"
        for stem, name in firsts.items()
    }


def stem_of(name: str) -> str:
    """The name of a GGUF file without its ending, and without the number of a part."""
    return re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", name)


def quantization_of(name: str) -> str | None:
    """Q4_K_M of model-Q4_K_M.gguf, in capitals; None if the name does not say."""
    found = _QUANTIZATION.search(stem_of(name))
    return found[1].upper() if found else None


def gguf_folder(path: Path) -> Path:
    """The folder for a file, made if it is not there; ModelError if the file cannot be served."""
    files = parts(path)
    digest = hashlib.sha256(__version__.encode())
    for module in ("gguf_folder.py", "gguf_tokenizer.py"):
        digest.update(Path(__file__).with_name(module).read_bytes())
    for file in files:
        facts = file.stat()
        digest.update(f"{file.resolve()}\0{facts.st_size}\0{facts.st_mtime_ns}\0".encode())
    # a later part given by name is the whole model as well
    folder = _cache() / digest.hexdigest()[:12] / stem_of(path.name)
    if not folder.is_dir():
        _make(folder, files)
    return folder


def _make(folder: Path, files: list[Path]) -> None:
    """Beside its place first, and moved there whole: another server may make the same one."""
    header = read_gguf(files[0])
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
        with _fields_checked():
            _write(own / "config.json", _config(header, own))
            ends = {"eos_token_id": _end_tokens(header)}
            _write(own / "generation_config.json", ends | _sampling(header))
            _write(own / "tokenizer_config.json", _tokenizer_config(header))
        try:
            own.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content))


@contextlib.contextmanager
def _fields_checked() -> Iterator[None]:
    """Raise ModelError where fields of a file have wrong types or values that do not fit."""
    try:
        yield
    except (TypeError, ValueError, ArithmeticError, LookupError, struct.error) as error:
        raise ModelError(
            "The fields of the GGUF file do not fit together; download it again.", "model_corrupt"
        ) from error


def _config(header: GgufHeader, folder: Path) -> dict[str, Any]:
    """The config as transformers has it; for a file that only llama.cpp runs, with the reason."""
    if reason := _objection(header):
        return _bare(header, reason)
    try:
        return _native_config(header, folder)
    except ModelError as error:
        if error.code != "model_unsupported":
            raise
        return _bare(header, str(error))


def _objection(header: GgufHeader) -> str | None:
    """The reason why ours cannot run the architecture or types, as a sentence; None if it can."""
    name = header.architecture
    if name not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        return f"GGUF files of the architecture {name} have no implementation of ours; {known} do."
    if header.own("expert_count", 0) and name not in _ROUTED:
        return f"GGUF files of {name} with experts have no implementation of ours."
    others = {label for label, *_ in OTHER_TYPES.values()}
    if found := sorted({tensor.kind for tensor in header.tensors.values()} & others):
        return f"It has tensors of the type {', '.join(found)}, which ours do not compute."
    return None


def _bare(header: GgufHeader, reason: str) -> dict[str, Any]:
    """A config without the arithmetic, which llama.cpp itself reads from the file."""
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
    has_mlps = name != "qwen35moe"  # without experts
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
        "architectures": [_FAMILIES[name]],
        "dtype": _WIDE.get(kind, "bfloat16"),
        "vocab_size": header.tensors["token_embd.weight"].shape[0]
        if "token_embd.weight" in header.tensors
        else 0,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "norm_topk_prob": True,  # of experts; files do not say, and llama.cpp takes it so
        "attention_bias": name in _MAYBE_BIASED and "blk.0.attn_q.bias" in header.tensors,
    }
    if name in _27B:
        is_27b = config["num_hidden_layers"] == _27B[name]
        size = config["hidden_size"] / config["num_attention_heads"]
        config["query_pre_attn_scalar"] = size if is_27b else config.get("head_dim", 256)
    if name in _HYBRIDS:
        config |= _hybrid(header)
    if tensor := header.tensors.get("rope_freqs.weight"):
        return config | {"rope_scaling": _llama3(config, _values(folder / tensor.file, tensor))}
    return config | _rope(header)


def _hybrid(header: GgufHeader) -> dict[str, Any]:
    """The delta nets, which layers have them, and the share of a head that is turned."""
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
    """The parameters that give these divisors of the frequencies (as models/rope.py has it)."""
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
            "The GGUF file stretches its rotary positions in a way that ours do not know "
            "(rope_freqs.weight)."
        )
    return _LLAMA3 | {"factor": factor}


def _rope(header: GgufHeader) -> dict[str, Any]:
    kind = header.own("rope.scaling.type", "none")
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise ModelError(
            f"Rotary positions of kind {kind} in GGUF files have no implementation of ours."
        )
    scaling = {"rope_type": kind, "factor": header.own("rope.scaling.factor", 1.0)}
    if header.architecture == "gpt-oss":
        scaling["truncate"] = False  # no file says so
    if original := header.own("rope.scaling.original_context_length"):
        scaling["original_max_position_embeddings"] = original
    return {"rope_scaling": scaling}


def _end_tokens(header: GgufHeader) -> list[int]:
    fields = header.fields
    tokens = fields["tokenizer.ggml.tokens"]
    kinds = fields.get("tokenizer.ggml.token_type") or []
    stated = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    named = [n for n, kind in enumerate(kinds) if kind == _CONTROL and tokens[n] in _ENDS]
    return list(dict.fromkeys(n for n in [*stated, *named] if isinstance(n, int)))


def _sampling(header: GgufHeader) -> dict[str, float]:
    """Sampling defaults of the file; llama.cpp's own where it has none, or none that can be."""
    found: dict[str, float] = {}
    for ours, (theirs, otherwise) in _SAMPLING.items():
        given = header.fields.get(f"general.sampling.{theirs}", otherwise)
        try:
            msgspec.convert({ours: given}, Defaults)
            found[ours] = round(given, 6)  # the file has 0.8 in four bytes
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
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "headrace" / "gguf"
