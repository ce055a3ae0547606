"""Reads the headers of LoRA adapters, from PEFT folders and GGUF files, without torch."""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from headrace_common.adapter import Adapter
from headrace_common.checkpoints.gguf_header import TYPES, read_gguf
from headrace_common.checkpoints.gguf_names import original_name
from headrace_common.checkpoints.headers import TensorHeader, read_file, text_side
from headrace_common.checkpoints.patterns import first_matches
from headrace_common.errors import ModelError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MAX_CONFIG = 1 << 20  # bytes
_MAX_HEADER = 4 << 20  # bytes, enough for about 20,000 tensors
# Limit on the bytes of the weights. All bytes are read for the fingerprint.
_MAX_WEIGHTS = 16 << 30
_LONGEST_NAME = 512  # characters of a tensor's name
_SHOWN, _SHOWN_DIGITS = 120, 20  # characters of a text or a number in a message
_TYPES = ("F32", "F16", "BF16")
_GGUF_TYPES = tuple(name for name, *_ in TYPES.values())
_PEFT_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False,),
    "bias": ("none",),
    "lora_bias": (False,),
    "modules_to_save": ([],),
    "fan_in_fan_out": (False,),
    "trainable_token_indices": ([], {}),
    "target_parameters": ([],),
    "layer_replication": ([],),
    "use_qalora": (False,),
    "alora_invocation_tokens": ([],),
    "megatron_config": (),
    "arrow_config": (),
}
"""Options that can change the computation.

Each option has a tuple of the values that change nothing. The value null changes nothing either.
"""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
"""Initializations that also change the weights of the base model."""


class FactorHeaders(msgspec.Struct, frozen=True):
    """The two factors of one module, down [rank, inputs] and up [outputs, rank], and a scale."""

    down: TensorHeader
    up: TensorHeader
    scale: float

    @property
    def rank(self) -> int:
        return self.down.shape[0]


class AdapterFiles(msgspec.Struct, frozen=True):
    """An adapter as described by its headers.

    The keys of `factors` are modules of the base model.
    """

    path: Path  # the file with the weights
    factors: dict[str, FactorHeaders]
    is_gguf: bool = False

    @property
    def num_values(self) -> int:
        return sum(it.down.num_values + it.up.num_values for it in self.factors.values())


def read_adapter(path: Path, architecture: str) -> AdapterFiles:
    """Read an adapter for a model with the given architecture.

    Raises ModelError if the adapter does not fit the architecture. Time and memory are bounded,
    whatever the files contain.
    """
    try:
        place = path.expanduser()
        # `os.path.isfile` returns False if the name is too long.
        is_gguf = path.suffix == ".gguf" and os.path.isfile(place)
        is_folder = os.path.isdir(place)
    # `expanduser` fails for the `~` of an unknown user.
    except (RuntimeError, ValueError):
        is_gguf = is_folder = False
    if not (is_gguf or is_folder):
        raise ModelError(
            f"No adapter was found at {path}; give a folder with {CONFIG}, or a GGUF file."
        )
    try:
        return _of_gguf(place, architecture) if is_gguf else _of_peft(place)
    except OSError as error:
        raise ModelError(f"The adapter at {path} cannot be read: {error.strerror}.") from None


def name_adapter(name: str, path: Path, architecture: str, parent: str = "") -> Adapter:
    """Read an adapter's headers, and hash all bytes for the fingerprint. Raises ModelError."""
    files = read_adapter(path, architecture)
    return Adapter(name, str(path.expanduser().absolute()), fingerprint_of(files), parent)


def fingerprint_of(files: AdapterFiles) -> str:
    """Return 16 hexadecimal digits of a hash over the weights and the scales of the modules."""
    scales = sorted((module, it.scale) for module, it in files.factors.items())
    digest = hashlib.sha256(json.dumps(scales).encode())
    try:
        with files.path.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    except OSError as error:
        raise ModelError(f"{files.path.name} cannot be read: {error.strerror}.") from None
    return digest.hexdigest()[:16]


def _of_peft(folder: Path) -> AdapterFiles:
    config = _config(folder)
    _refuse_other_kinds(folder, config)
    weights = folder / WEIGHTS
    if not weights.is_file():
        is_pickle = (folder / "adapter_model.bin").exists()
        others = "; adapter_model.bin is not supported: save it as safetensors" * is_pickle
        raise ModelError(f"The adapter {folder.name} has no {WEIGHTS}{others}.")
    _check_size(weights)
    pairs: dict[str, dict[str, TensorHeader]] = {}
    for name, header in read_file(weights, _MAX_HEADER).items():
        found = _PEFT_NAME.fullmatch(name)
        if found is None or len(name) > _LONGEST_NAME:
            raise ModelError(
                f"The adapter {folder.name} has a tensor {_shown(name)}, which is not a LoRA "
                "matrix of a linear layer; embeddings, biases and whole modules are not supported."
            )
        pairs.setdefault(found[1], {})[found[2]] = header
    _check_targets(folder, config.get("target_modules"), pairs)
    ranks = _by_module(folder, config, pairs, "r", "rank_pattern")
    alphas = _by_module(folder, config, pairs, "lora_alpha", "alpha_pattern")
    factors = {}
    for module, pair in pairs.items():
        own = _factors(folder.name, module, pair, 1.0)
        if ranks[module] != own.rank:
            raise ModelError(
                f"The adapter {folder.name} has rank {own.rank} at {_shown(module)}, but "
                f"{CONFIG} says {ranks[module]:g}; save the adapter again."
            )
        divisor = math.sqrt(own.rank) if config.get("use_rslora") else own.rank
        factors[module] = msgspec.structs.replace(own, scale=alphas[module] / divisor)
    return AdapterFiles(weights, _text_names(folder.name, factors))


def _config(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG
    # Reading a pipe might never end.
    if not file.is_file():
        raise ModelError(
            f"{folder.name} has no {CONFIG}; give the folder in which PEFT saved the adapter."
        )
    with file.open("rb") as opened:
        raw = opened.read(_MAX_CONFIG + 1)
    if len(raw) > _MAX_CONFIG:
        raise ModelError(
            f"{CONFIG} of {folder.name} has more than {_MAX_CONFIG:,} bytes, the limit for a "
            "configuration; save the adapter again."
        )
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError):
        raise ModelError(
            f"{CONFIG} of {folder.name} is not valid JSON; save the adapter again."
        ) from None
    if not isinstance(config, dict):
        raise ModelError(f"{CONFIG} of {folder.name} is not an object; save the adapter again.")
    return config


def _check_size(weights: Path) -> None:
    if (size := weights.stat().st_size) > _MAX_WEIGHTS:
        raise ModelError(
            f"{weights.name} has {size:,} bytes; the limit is {_MAX_WEIGHTS:,}. Merge the adapter "
            "into its model with PEFT, and serve the merged model."
        )


def _shown(value: Any) -> str:
    """Format a value from a file for a message, on one short line."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    shown = str(value)
    if isinstance(value, int) and len(shown) > _SHOWN_DIGITS:
        return f"{shown[:_SHOWN_DIGITS]}…"
    return "".join(it if it.isprintable() else "?" for it in shown[:_SHOWN])


def _refuse_other_kinds(folder: Path, config: dict[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ModelError(
            f"The adapter {folder.name} is of type {_shown(kind)}; only LORA is supported."
        )
    for option, harmless in _HARMLESS.items():
        value = config.get(option)
        if value is not None and value not in harmless:
            what = "DoRA" if option == "use_dora" else option
            raise ModelError(
                f"The adapter {folder.name} has {what} ({option}: {_shown(value)}), which is not "
                "supported; merge the adapter into its model with PEFT, and serve the merged "
                "model."
            )
    if not isinstance(config.get("use_rslora"), bool | None):
        raise ModelError(f"use_rslora in {CONFIG} of {folder.name} is neither true nor false.")
    begins = _shown(config.get("init_lora_weights")).lower()
    if begins.startswith(_CHANGES_BASE):
        raise ModelError(
            f"The adapter {folder.name} was initialized with {begins}, which changes the model's "
            "weights; save the adapter with path_initial_model_for_weight_conversion."
        )


def _check_targets(folder: Path, targets: Any, modules: Mapping[str, Any]) -> None:
    """Raise ModelError if the adapter's modules do not match `targets`.

    `targets` is the value of target_modules: a list of name endings, or a regular expression.
    """
    if targets is None or targets == "all-linear":
        return
    if isinstance(targets, str):
        found = first_matches([targets], list(modules), CONFIG)
        strange = [it for it, number in zip(modules, found, strict=True) if number < 0]
    elif isinstance(targets, list) and all(isinstance(it, str) for it in targets):
        endings = set(targets)
        named = {it: endings.intersection(_endings(it)) for it in modules}
        strange = [it for it, ends in named.items() if not ends]
        if missing := endings.difference(*named.values()):
            raise ModelError(
                f"The adapter {folder.name} names {_shown(min(missing))} in target_modules, but "
                "lacks the tensors; save the adapter again."
            )
    else:
        raise ModelError(
            f"target_modules in {CONFIG} of {folder.name} is neither a list of names nor a regular "
            "expression."
        )
    if strange:
        raise ModelError(
            f"The adapter {folder.name} has tensors for {_shown(strange[0])}, which "
            "target_modules does not name; save the adapter again."
        )


def _endings(module: str) -> Iterable[str]:
    """Yield each name of a module that target_modules can contain: "a.b.c", "b.c" and "c"."""
    while module:
        yield module
        module = module.partition(".")[2]


def _by_module(
    folder: Path,
    config: dict[str, Any],
    modules: Iterable[str],
    option: str,
    option_by_pattern: str,
) -> dict[str, float]:
    """Return the value of an option for each module.

    The value belongs to the first pattern that matches the module's name. If no pattern matches,
    the module gets the option's default.
    """
    modules = list(modules)
    patterns = config.get(option_by_pattern) or {}
    if not isinstance(patterns, dict):
        raise ModelError(f"{option_by_pattern} in {CONFIG} of {folder.name} is not an object.")
    # PEFT puts the same prefix before each pattern.
    expressions = [rf"(.*\.)?({pattern})" for pattern in patterns]
    found = first_matches(expressions, modules, CONFIG) if patterns else [-1] * len(modules)
    # Index -1 is the option's default.
    values = [*patterns.values(), config.get(option)]
    numbers = [_finite(value) for value in values]
    for module, number in zip(modules, found, strict=True):
        if numbers[number] is None:
            raise ModelError(
                f"{CONFIG} of {folder.name} has {option} {_shown(values[number])} for "
                f"{_shown(module)}; it must be a number."
            )
    return {it: numbers[number] or 0.0 for it, number in zip(modules, found, strict=True)}


def _finite(value: Any) -> float | None:
    """Return the value if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _factors(
    adapter: str, module: str, pair: Mapping[str, TensorHeader], scale: float
) -> FactorHeaders:
    """Return the two factors of a module. Raises ModelError if the factors do not fit each other.

    The sizes of the factors are compared with the base model's sizes later.
    """
    down, up = pair.get("A"), pair.get("B")
    if down is None or up is None:
        lost = "A" if down is None else "B"
        raise ModelError(
            f"The adapter {adapter} lacks the LoRA matrix {lost} of {_shown(module)}; save the "
            "adapter again."
        )
    is_pair = len(down.shape) == len(up.shape) == 2 and down.shape[0] == up.shape[1] > 0
    if not is_pair:
        raise ModelError(
            f"The adapter {adapter} has LoRA matrices of shapes {list(down.shape)} and "
            f"{list(up.shape)} at {_shown(module)}; the shapes must be [rank, inputs] and "
            "[outputs, rank]."
        )
    return FactorHeaders(down, up, scale)


def _text_names(adapter: str, factors: dict[str, FactorHeaders]) -> dict[str, FactorHeaders]:
    """Give the modules the names that a text-only model uses.

    Raises ModelError if the adapter changes modules outside the text side.
    """
    headers = {f"{module}.weight": it.down for module, it in factors.items()}
    for name, header in headers.items():
        if header.dtype not in _TYPES:
            raise ModelError(
                f"The adapter {adapter} has {_shown(header.dtype)} at {_shown(name)}; supported "
                f"types: {', '.join(_TYPES)}."
            )
    kept = text_side(headers)
    if len(kept) < len(factors):
        raise ModelError(
            f"The adapter {adapter} changes layers outside the text side of its model, which is "
            "not supported; use an adapter for the text side only."
        )
    return dict(zip((n.removesuffix(".weight") for n in kept), factors.values(), strict=True))


def _of_gguf(path: Path, architecture: str) -> AdapterFiles:
    _check_size(path)
    head = read_gguf(path, _MAX_HEADER)
    kind = head.fields.get("general.type"), head.fields.get("adapter.type")
    if kind != ("adapter", "lora"):
        raise ModelError(
            f"{path.name} is not a LoRA adapter: its general.type is {_shown(kind[0])}, and its "
            f"adapter.type is {_shown(kind[1])}."
        )
    alpha = _finite(head.fields.get("adapter.lora.alpha"))
    if alpha is None:
        raise ModelError(f"{path.name} has no adapter.lora.alpha; convert the adapter again.")
    pairs: dict[str, dict[str, TensorHeader]] = {}
    for name, tensor in head.tensors.items():
        base, _, factor = name.rpartition(".lora_")
        if tensor.kind not in _GGUF_TYPES:
            raise ModelError(f"{path.name} has {tensor.kind} at {_shown(name)}; use F16 or F32.")
        if factor not in ("a", "b") or len(name) > _LONGEST_NAME:
            raise ModelError(
                f"{path.name} has a tensor {_shown(name)}, which is not a LoRA matrix of a layer."
            )
        module = original_name(base, architecture).removesuffix(".weight")
        if ".linear_attn." in module:
            raise ModelError(
                f"{path.name} changes {_shown(module)}. GGUF files store this module in another "
                "order, which is not supported for adapters. Give the folder that PEFT saved."
            )
        # The rows of factor B have the order of the GGUF file. The loader needs the base weight's
        # name to reorder these rows.
        stored = f"{module}.weight" if factor == "b" else f"{module}.down"
        end = tensor.offset + tensor.num_bytes
        header = TensorHeader(tensor.kind, tensor.shape, (tensor.offset, end), path.name, stored)
        pairs.setdefault(module, {})[factor.upper()] = header
    factors = {}
    for module, pair in pairs.items():
        found = _factors(path.name, module, pair, 1.0)
        factors[module] = msgspec.structs.replace(found, scale=alpha / found.rank)
    return AdapterFiles(path, factors, is_gguf=True)
