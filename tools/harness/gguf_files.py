"""Writes GGUF files of tiny models with the gguf package and llama.cpp's names."""

import json
import math
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

from headrace_common.checkpoints.gguf_header import TYPES
from headrace_common.checkpoints.gguf_names import (
    EXPERTS,
    GATES,
    GEMMA4,
    HYBRIDS,
    INTERLEAVED,
    NORMED_TWICE,
    WHOLE_GEMMA4,
    is_beyond,
    names_of,
    original_name,
)
from headrace_common.checkpoints.spec import read_spec
from headrace_engine.weights.weights import Checkpoint
from tools.harness.gguf_families import add_own
from tools.harness.gguf_gemma4 import add_gemma4
from tools.harness.gguf_hybrids import IN_FULL, add_hybrid, file_columns, file_rows
from tools.harness.tiny_models import CHAT_TEMPLATE, END, make_tiny_model

NONE: Mapping[str, str] = MappingProxyType({})
_SIZES = {name: (values, size) for name, values, size in TYPES.values()}


def gguf_name(name: str, architecture: str = "") -> str:
    back = {theirs: ours for ours, theirs in (names_of(architecture) | EXPERTS | GATES).items()}
    whole = {theirs: ours for ours, theirs in WHOLE_GEMMA4.items()}
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    if architecture == GEMMA4 and found and found[2] in whole:
        return f"blk.{found[1]}.{whole[found[2]]}"
    stem, _, kind = name.rpartition(".")
    if name.endswith((".A_log", ".dt_bias")):
        _, _, number, rest = name.split(".", 3)
        return f"blk.{number}.{back[rest]}"
    if stem.startswith("model.layers."):
        _, _, number, rest = stem.split(".", 3)
        # All experts are stored in one tensor.
        rest = re.sub(r"mlp\.experts\.\d+\.", "", rest)
        return f"blk.{number}.{back[rest]}.{kind}"
    return f"{back[stem]}.{kind}"


def add_merge(folder: Path) -> int:
    """Adds a merged token to the tokenizer of make_tiny_model; returns the new number of tokens.

    llama.cpp loads no byte-level tokenizer without merges. The model's `vocab_size` must be the
    returned number.
    """
    path = folder / "tokenizer.json"
    described = json.loads(path.read_text())
    number = 1 + max(token["id"] for token in described["added_tokens"])
    described["model"]["vocab"]["\u0120t"] = number
    described["model"]["merges"] = [["\u0120", "t"]]
    path.write_text(json.dumps(described))
    return number + 1


def make_tiny_file(
    folder: Path,
    architecture: str,
    kind: str = "Q8_0",
    mixed: Mapping[str, str] = NONE,
    is_tied: bool = False,
    config: Mapping[str, Any] = MappingProxyType({}),
    left_out: tuple[str, ...] = (),
    **fields: Any,
) -> tuple[Path, Path]:
    """Makes a model folder and a GGUF file of the same model; returns both paths."""
    shape = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64}
    shape |= {"tie_word_embeddings": is_tied}
    if architecture in HYBRIDS:
        shape |= {"layer_types": ["linear_attention", "full_attention"]}
        shape |= {"linear_key_head_dim": 64, "shared_expert_intermediate_size": 256}
    if "Moe" in architecture or "Next" in architecture:
        shape |= {"num_experts": 11, "moe_intermediate_size": 256, "norm_topk_prob": True}
    if architecture == GEMMA4:
        shape |= {"num_hidden_layers": 6, "global_head_dim": 128, "tie_word_embeddings": True}
        shape |= {"hidden_size_per_layer_input": 256}
    elif architecture.startswith("Gemma"):
        shape |= {"sliding_window": 16, "query_pre_attn_scalar": 64, "tie_word_embeddings": True}
        shape |= {"num_hidden_layers": 7, "pad_token_id": 0}
    elif architecture in ("Olmo3ForCausalLM", "SmolLM3ForCausalLM"):
        shape |= {"num_hidden_layers": 5}
    elif architecture == "Phi3ForCausalLM":
        shape |= {"rope_parameters": {"rope_theta": 10_000.0, "partial_rotary_factor": 0.5}}
    shape |= {"initializer_range": 0.05, **config}
    model = make_tiny_model(folder / "model", architecture, **shape)
    fields = {"chat_template": CHAT_TEMPLATE, "eos_token_id": END} | fields
    path = folder / f"tiny-{kind}.gguf"
    return model, to_gguf(model, path, kind, mixed, left_out, **fields)


def to_gguf(
    folder: Path,
    target: Path,
    kind: str,
    mixed: Mapping[str, str] = NONE,
    left_out: tuple[str, ...] = (),
    **fields: Any,
) -> Path:
    """Writes a model folder of make_tiny_model as one GGUF file.

    The folder's own weights are rounded to the weights of the file, so that the folder and the file
    are the same model. `mixed` sets another type for some tensors, by llama.cpp's name without
    layer and kind. The tensors `left_out`, named without the layer, become zeros in the folder.
    """
    config = json.loads((folder / "config.json").read_text())
    name = config["model_type"].replace("mistral", "llama").replace("_text", "").replace("_", "")
    name = name.replace("olmo3", "olmo2")
    (architecture,) = config["architectures"]
    writer = gguf.GGUFWriter(target, name)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(heads["q_proj"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_context_length(config["max_position_embeddings"])
    if architecture == GEMMA4:
        add_gemma4(writer, config)
    else:
        _add_sizes(writer, config)
    if architecture in NORMED_TWICE:
        _add_gemma(writer, config)
    if architecture in HYBRIDS:
        add_hybrid(writer, config)
    add_own(writer, config)
    add_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()), fields)
    weights = load_file(folder / "model.safetensors")
    if count := config.get("num_experts") or config.get("num_local_experts"):
        writer.add_expert_count(count)
        writer.add_expert_used_count(config.get("top_k_experts") or config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    stacks: dict[str, list[Any]] = {}
    for key, tensor in weights.items():
        if gguf_name(key, architecture).endswith(left_out):
            weights[key] = torch.zeros_like(tensor)
            continue
        stored = mixed.get(gguf_name(key, architecture).split(".")[-2], kind)
        if tensor.ndim == 1 or key.removesuffix(".weight").endswith(IN_FULL):
            stored = "F32"
        if architecture in HYBRIDS:
            raw, weights[key] = _of_hybrid(key, tensor, stored, config)
        else:
            shift = 1 if architecture in NORMED_TWICE and key.endswith("norm.weight") else 0
            raw = encoded((tensor.float() + shift).numpy(), stored, key)
            weights[key] = decoded(raw, stored, tensor.shape) - shift
        is_interleaved = name == "llama" or architecture in INTERLEAVED
        if is_interleaved and (number := heads.get(key.split(".")[-2])):
            raw = raw.reshape(number, 2, -1, *raw.shape[1:]).swapaxes(1, 2).reshape(raw.shape)
        stacks.setdefault(gguf_name(key, architecture), []).append((key, raw, stored))
    for name, parts in stacks.items():
        parts.sort(key=lambda part: [int(n) for n in re.findall(r"\d+", part[0])])
        raw = parts[0][1]
        # Gemma 4's experts are stacked in safetensors, too.
        if "_exps." in name and architecture != GEMMA4:
            raw = np.stack([raw for _, raw, _ in parts])
        for own, its in _in_parts(name, raw, config):
            writer.add_tensor(own, np.ascontiguousarray(its), raw_dtype=Kind[parts[0][2]])
    write_file(writer)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return target


def write_file(writer: gguf.GGUFWriter) -> None:
    """Write everything that was added to the writer, and close its file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _of_hybrid(
    key: str, tensor: torch.Tensor, stored: str, config: dict[str, Any]
) -> tuple[np.ndarray, torch.Tensor]:
    """Return the tensor's bytes for the file, and its rounded values in the original order."""
    values = tensor.float().numpy()
    if key.endswith(".A_log"):
        return -np.exp(values)[file_rows(key, config, len(values))], tensor
    shift = key.endswith("norm.weight") and not key.endswith("linear_attn.norm.weight")
    values = values.reshape(len(values), -1) + shift
    rows = file_rows(key, config, len(values))
    columns = file_columns(key, config, values.shape[1])
    if values.shape[1] == 1:
        raw = values[rows, 0]
        return raw, tensor
    raw = encoded(values[rows][:, columns], stored, key)
    found = np.empty_like(values)
    found[np.ix_(rows, columns)] = dequantize(raw, Kind[stored])
    raw = raw[0] if key.endswith("shared_expert_gate.weight") else raw
    return raw, torch.from_numpy(found).reshape(tensor.shape)


def _in_parts(name: str, raw: np.ndarray, config: dict[str, Any]) -> list[tuple[str, np.ndarray]]:
    """Split Qwen3-Next's joined tensor into two tensors: "qkv" and the gates."""
    if not name.endswith("ssm_in.weight"):
        return [(name, raw)]
    first = len(raw) - config["linear_num_value_heads"] * config["linear_value_head_dim"]
    own = [name.replace("ssm_in", part) for part in ("attn_qkv", "attn_gate")]
    return [(own[0], raw[:first]), (own[1], raw[first:])]


def decoded(raw: np.ndarray, stored: str, shape: tuple[int, ...]) -> torch.Tensor:
    values = dequantize(raw, Kind[stored]).reshape(shape)
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))


def _add_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    if size := config.get("intermediate_size"):
        writer.add_feed_forward_length(size)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])


def _add_gemma(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_sliding_window(config["sliding_window"])
    if cap := config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(cap)
    if cap := config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(cap)


def encoded(values: np.ndarray, kind: str, key: str) -> np.ndarray:
    """Return the values in a GGUF type.

    The package cannot write K types. For K types, return random bytes with small scales, because
    such bytes are valid K types.
    """
    if not kind.endswith("_K"):
        return quantize(values, Kind[kind])
    generator = np.random.default_rng(sum(key.encode()))
    group, size = _SIZES[kind]
    *stack, columns = values.shape
    rows, groups = math.prod(stack), columns // group
    raw = generator.integers(0, 256, (rows, groups, size), dtype=np.uint8)
    scales = generator.uniform(0.5, 1.0, (rows, groups, 2)).astype(np.float16)
    if kind == "Q6_K":
        raw[..., -2:] = (scales[..., :1] * np.float16(2e-4)).view(np.uint8)
    else:
        raw[..., :4] = (scales * np.float16(1e-3)).view(np.uint8)
    return raw.reshape(*stack, -1)


def add_tokenizer(
    writer: gguf.GGUFWriter, described: dict[str, Any], fields: dict[str, Any]
) -> None:
    """Writes a byte-level tokenizer.json. `fields` are added to the file, or replace its keys."""
    model, added = described["model"], described["added_tokens"]
    tokens = model["vocab"] | {token["content"]: token["id"] for token in added}
    ordered = sorted(tokens, key=tokens.__getitem__)
    special = {token["content"] for token in added if token["special"]}
    own = {token["content"] for token in added if not token["special"]}
    kinds = [3 if token in special else 4 if token in own else 1 for token in ordered]
    given = {"pre": "gpt-2", "model": "gpt2"} | fields
    writer.add_tokenizer_model(given["model"])
    writer.add_tokenizer_pre(given["pre"])
    writer.add_token_list(ordered)
    writer.add_token_types(kinds)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    writer.add_token_merges(merges)
    if "chat_template" in given:
        writer.add_chat_template(given["chat_template"])
    for key in ("eos_token_id", "bos_token_id"):
        if key in given:
            getattr(writer, f"add_{key}")(given[key])
    for key in given:
        if key.startswith("general."):
            adders = {int: writer.add_int32, float: writer.add_float32, str: writer.add_string}
            adders[type(given[key])](key, given[key])
    if "add_bos_token" in given:
        writer.add_add_bos_token(given["add_bos_token"])


def compare_values(file: Path) -> int:
    """Assert that exactly the values of a folder's GGUF files are read; return their number.

    Compares sorted values, because some tensors are stored in another order. A file may hold a
    weight plus 1 (a norm), or minus its exponential (a decay).
    """
    spec, num = read_spec(file), 0
    with ExitStack() as files:
        checkpoint = Checkpoint(spec, files)
        for part in spec.weight_files:
            for tensor in gguf.GGUFReader(file / part).tensors:
                first, end = tensor.data_offset, tensor.data_offset + tensor.n_bytes
                ours = [
                    checkpoint._files[part].get_tensor(name).flatten()
                    for name, header in checkpoint.headers.items()
                    if header.file == part and first <= header.data_offsets[0] < end
                ]
                # Other tensors become settings, or belong to layers that are left out.
                if ours:
                    theirs = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
                    assert _are_equal(torch.cat(ours).numpy(), theirs), tensor.name
                    num += theirs.size
    return num


def _are_equal(ours: np.ndarray, theirs: np.ndarray) -> bool:
    ours, theirs = np.sort(ours), np.sort(theirs.ravel())
    with np.errstate(invalid="ignore", divide="ignore"):
        restored = (theirs, theirs - np.float32(1), np.sort(np.log(-theirs)))
    return any(np.allclose(ours, one, rtol=1e-6, atol=1e-7) for one in restored)


def unmapped_names(file: Path) -> list[str]:
    """Return the names in a folder's GGUF files for which transformers' names are unknown."""
    spec = read_spec(file)
    return [
        tensor.name
        for part in spec.weight_files
        for tensor in gguf.GGUFReader(file / part).tensors
        if original_name(tensor.name, spec.architecture) == tensor.name
        and tensor.name != "rope_freqs.weight"
        and not is_beyond(tensor.name, spec.config)
    ]
