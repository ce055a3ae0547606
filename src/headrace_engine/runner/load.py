"""Loads a model's folder into a runner, warms up the runner, and describes the loaded model."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import torch

from headrace_common.cache import KvCacheDtype, bytes_per_position, bytes_per_slot
from headrace_common.checkpoints.find import draft_model, find_here
from headrace_common.checkpoints.same_tokenizer import check_same_tokenizer
from headrace_common.checkpoints.spec import ModelSpec, read_spec
from headrace_common.config.settings import ModelConfig
from headrace_common.errors import ModelError
from headrace_common.layout import MemoryLayout
from headrace_common.loading import CHECKING, COMPILING, READING, WARMING, tell, tell_weights
from headrace_common.messages import DraftFacts, InstructionSet, LaneFacts, Quantize, Ready
from headrace_engine.runner.drafter import Drafter, MtpDrafter
from headrace_engine.runner.footprint import Footprint, kept_groups, packed_footprint
from headrace_engine.runner.lanes.choose import choose_lane
from headrace_engine.runner.lanes.lane import Lane, LaneOptions, LaneTraits
from headrace_engine.runner.lanes.mtp import MtpLane, mtp_layer
from headrace_engine.runner.lanes.native_text import NativeText
from headrace_engine.runner.pooling import VectorHead
from headrace_engine.runner.probe import free_bytes, num_threads
from headrace_engine.runner.room import (
    check_cache_fits,
    step_bytes,
    stored_as,
    watch_memory,
    weights_that_fit,
)
from headrace_engine.runner.runner import Runner
from headrace_engine.runner.trial import one_round
from headrace_engine.runner.vector_stages import vector_head
from headrace_engine.weights.fingerprint import fingerprint
from headrace_kernels import ON_COMPILE, choose_instructions

logger = logging.getLogger(__name__)

_MAX_NUM_SEQS = {"cpu": 64, "cuda": 256}
# The default size of the cache, as a fraction of the memory that is free after loading.
CACHE_SHARE = {"cpu": 0.25, "cuda": 0.9}
# A model is not served if the cache has no room for one sequence of this length.
_MIN_POSITIONS = 1024
# The maximum number of positions if neither the model nor the user sets a limit.
_MAX_POSITIONS = 4096
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float32}


class ComputeChoice(NamedTuple):
    """The quantization of the weights, and the instruction set of the kernels with the reason."""

    quantize: Quantize
    instructions: InstructionSet
    reason: str


class LoadPlan(NamedTuple):
    """How a model will run, as far as this is known before the load."""

    spec: ModelSpec
    lane_class: Any
    device: torch.device
    torch_dtype: torch.dtype
    choice: ComputeChoice
    weights: Footprint
    draft: "LoadPlan | None" = None
    kv_cache_dtype: KvCacheDtype = "auto"

    @property
    def position_bytes(self) -> int:
        """Return the bytes that a lane with kernels caches for each token."""
        cache = self.lane_class.cache_of(self.spec)
        return bytes_per_position(cache, self.torch_dtype.itemsize, self.kv_cache_dtype)

    @property
    def name(self) -> str:
        """Return the model's name; for an MTP layer, a description with the model's name."""
        is_own = self.lane_class is MtpLane
        return f"MTP layer of {self.spec.name}" if is_own else self.spec.name

    @property
    def facts(self) -> LaneFacts:
        facts: LaneFacts = self.lane_class.traits.facts
        return facts

    @property
    def dtype(self) -> str:
        return _name(self.torch_dtype)

    @property
    def kernels(self) -> InstructionSet:
        return self.choice.instructions

    @property
    def quantize(self) -> Quantize:
        return self.choice.quantize

    @property
    def mapped_bytes(self) -> int:
        return self.weights.mapped


class LoadedLane(NamedTuple):
    """A lane with weights and memory, the vector head, the Ready message, and the draft model."""

    lane: Lane
    head: VectorHead
    ready: Ready
    drafter: Drafter | None


def load_runner(config: ModelConfig, folder: Path) -> tuple[Runner, Ready]:
    """Load and warm up a runner without grammars; ModelError if the model cannot be served."""
    lane, head, ready, drafter = load_lane(config, folder)
    runner = Runner(lane, head, drafter=drafter)
    warm(runner, ready.layout)
    return runner, ready


def warm(runner: Runner, layout: MemoryLayout) -> None:
    """Run a few steps, so that all kernels are compiled before the first request."""
    tell(WARMING)
    for _ in one_round(runner, layout):
        pass


def load_lane(config: ModelConfig, folder: Path) -> LoadedLane:
    """Load the weights and allocate the cache; ModelError if the model cannot be served."""
    tell(READING)
    torch.set_num_threads(num_threads(config.threads))
    plan = plan_load(config, folder)
    spec, lane_class, device, dtype, choice, _, draft, kv_cache_dtype = plan
    if device.type == "cuda":
        # By default, cuDNN may round the inputs of float32 convolutions to 10 bits (TF32).
        torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]
    quantize, instructions, reason = choice
    mapped = plan.mapped_bytes
    if mapped:
        logger.warning(
            "%d MiB of experts do not fit into memory. The experts are kept on disk and read when "
            "tokens use them; `headrace doctor` shows how much is read per token.",
            mapped >> 20,
        )
    may_offload = config.device != "cpu"
    options = LaneOptions(
        quantize, instructions, config.kernels, may_offload, mapped, kv_cache_dtype
    )
    tell_weights(0.0)
    with watch_memory(device):
        lane: Lane = lane_class(spec, dtype, device, options)
        drafter = None if draft is None else _load_drafter(draft, lane)
    # The device of the caches, which can differ from the requested device.
    device = lane.device
    max_num_seqs = config.scheduler.max_num_seqs or _MAX_NUM_SEQS[device.type]
    layout = _layout(config, plan, lane, max_num_seqs)
    head = vector_head(spec, lane.traits, config.pooling)
    lane.open(layout)
    if drafter is not None:
        drafter.open(layout, spec.vocab_size)
    name, traits, kind = _name(lane.dtype), lane.traits, f"{device.type} {instructions}"
    ready = Ready(
        lane=traits.id,
        device=device.type,
        dtype=name,
        vocab_size=spec.vocab_size,
        max_model_len=layout.max_positions,
        max_num_seqs=min(max_num_seqs, layout.num_slots or max_num_seqs),
        num_parameters=lane.num_parameters,
        weight_bytes=lane.weight_bytes,
        mapped_bytes=mapped,
        layout=layout,
        fingerprint=fingerprint(spec, stored_as(quantize, name, kv_cache_dtype), kind),
        kernels=instructions,
        kernels_reason=reason,
        tasks=traits.tasks,
        is_whole=traits.is_whole,
        vector_size=head.size,
        pooling=head.modes,
        facts=traits.facts,
        source=traits.source,
        quantize=quantize,
        draft=drafter.facts if drafter else None,
        kv_cache_dtype=kv_cache_dtype,
    )
    return LoadedLane(lane, head, ready, drafter)


def _load_drafter(plan: LoadPlan, served: Lane) -> Drafter:
    """Load the weights of the draft model, or of the MTP layer of `served`."""
    quantize, instructions, _ = plan.choice
    options = LaneOptions(quantize, instructions, mapped_bytes=plan.mapped_bytes)
    is_own = plan.lane_class is MtpLane
    own = (served,) if is_own else ()
    lane = plan.lane_class(plan.spec, plan.torch_dtype, plan.device, options, *own)
    weights = fingerprint(plan.spec, stored_as(quantize, plan.dtype), f"cpu {instructions}")
    facts = DraftFacts(
        plan.name,
        lane.num_parameters,
        lane.weight_bytes,
        plan.position_bytes,
        plan.spec.max_positions or _MAX_POSITIONS,
        f"mtp {weights}" if is_own else weights,
        is_own,
    )
    return MtpDrafter(lane, facts, cast(NativeText, served)) if is_own else Drafter(lane, facts)


def plan_load(config: ModelConfig, folder: Path, checks_kernels: bool = True) -> LoadPlan:
    """Decide how the model will run; ModelError if the model cannot be served.

    Reads no weights. Without `checks_kernels`, no kernel is compiled.
    """
    device = _device(config)
    spec = read_spec(folder)
    dtype = dtype_of(config, spec)
    lane_class = choose_lane(spec, config.lane)
    tell(CHECKING)
    choice = choose_kernels(config, spec, lane_class, device, dtype, checks_kernels)
    is_native = lane_class.traits.has_kernels and device.type == "cpu"
    if config.draft not in (None, "off") and not is_native:
        raise ModelError(
            f"--draft needs a native lane on a CPU, not {lane_class.traits.id} on {device.type}; "
            "omit --draft."
        )
    draft = None
    if (name := draft_model(config.draft)) is not None:
        draft = _plan_draft(config, name, folder, checks_kernels)
    elif config.draft != "off" and is_native:
        draft = _plan_mtp(config, spec, device, dtype, choice)
    fits = partial(_check_fits, config, spec, lane_class, dtype, choice[:2])
    if config.draft is None and draft is not None:
        draft = _without_shortage(draft, fits)
    weights = fits(draft)
    kv_cache_dtype = config.kv_cache_dtype
    return LoadPlan(spec, lane_class, device, dtype, choice, weights, draft, kv_cache_dtype)


def _plan_draft(config: ModelConfig, name: str, folder: Path, checks_kernels: bool) -> LoadPlan:
    """Decide how the draft model `name` of the model in `folder` will run."""
    draft = find_here(name, mmproj="none")
    if draft is None or not (draft / "config.json").is_file():
        raise ModelError(
            f"The draft model {name!r} is not on this machine. Give the path of a folder with "
            "config.json or of a GGUF file, or serve that model once to download it.",
            "model_not_found",
        )
    check_same_tokenizer(folder, draft)
    config = msgspec.structs.replace(
        config,
        model=str(draft),
        draft="off",
        lane="native-text",
        kv_cache_memory_bytes=None,
        kv_cache_dtype="auto",
    )
    plan = plan_load(config, draft, checks_kernels)
    if bytes_per_slot(plan.lane_class.cache_of(plan.spec), plan.torch_dtype.itemsize):
        raise ModelError(
            f"{plan.spec.name} cannot be a draft model, because some of its layers keep a state "
            "that a wrong guess would spoil. Use a model with attention in every layer."
        )
    return plan


def _plan_mtp(
    config: ModelConfig,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    choice: ComputeChoice,
) -> LoadPlan | None:
    """Decide how the model's own MTP layer will run; None if the layer is not used.

    Raises ModelError if the user asks for a layer that the model does not have.
    """
    is_asked = config.draft is not None
    is_exact = choice.instructions == "plain" or (dtype, choice.quantize) == (torch.float32, "none")
    can_guess = config.scheduler.guess != "off" and not is_exact
    if is_asked and not can_guess:
        raise ModelError(
            "--draft mtp needs --guess auto, compiled kernels (not --kernels plain), and bfloat16 "
            "or quantized weights. Change these settings, or omit --draft."
        )
    layer = mtp_layer(spec) if can_guess else None
    if is_asked and layer is None:
        raise ModelError(
            f"{spec.name} has no MTP layer that Headrace supports: one layer, in safetensors files "
            "of Qwen3.5 or Qwen3-Next. Omit --draft, or name a draft model."
        )
    if layer is None:
        return None
    weights = packed_footprint(layer, dtype, choice.quantize)
    return LoadPlan(spec, MtpLane, device, dtype, choice, weights)


def _without_shortage(
    draft: LoadPlan, fits: Callable[[LoadPlan | None], Footprint]
) -> LoadPlan | None:
    """Return an MTP layer that the user did not ask for, or None if memory is too short for it."""
    try:
        is_short = fits(draft).mapped > 0
    except ModelError:
        is_short = True
    if is_short:
        logger.info("There is not enough memory for the %s, so it is not used.", draft.name)
    return None if is_short else draft


def choose_kernels(
    config: ModelConfig,
    spec: ModelSpec,
    lane: Any,
    device: torch.device,
    dtype: torch.dtype,
    checks: bool = True,
) -> ComputeChoice:
    """Choose quantization and kernels; ModelError if the settings need unavailable kernels.

    Without `checks`, no kernel is compiled.
    """
    ON_COMPILE.set(_tell_compiling)
    traits: LaneTraits = lane.traits
    if traits.has_kernels and device.type == "cpu":
        quantize = "none" if config.quantize == "auto" else config.quantize
        # With float32, the quantized groups of a file are dequantized, so that results are exact.
        keeps = config.quantize == "auto" and dtype == torch.bfloat16
        groups = kept_groups(spec) if keeps else frozenset()
        kinds = lane.layer_kinds(spec)
        try:
            choice = choose_instructions(
                config.kernels,
                dtype,
                quantize,
                groups,
                kinds,
                checks,
                has_int8_cache=config.kv_cache_dtype == "int8",
            )
        except ValueError as error:
            raise ModelError(str(error)) from error
        is_own = groups and choice.instructions != "plain"
        return ComputeChoice("own" if is_own else quantize, *choice)
    if config.kv_cache_dtype != "auto":
        raise ModelError(
            f"--kv-cache-dtype {config.kv_cache_dtype} needs a native lane on a CPU, not "
            f"{traits.id} on {device.type}. Use --kv-cache-dtype auto."
        )
    plain = ("auto",) if traits.own_kernels else ("none", "auto", "plain")
    for flag, value in (("quantize", config.quantize), ("kernels", config.kernels)):
        if value not in plain:
            raise ModelError(
                f"--{flag} {value} needs a native lane on a CPU, not {traits.id} on {device.type}."
            )
    if traits.own_kernels:
        return ComputeChoice("own", "plain", f"the lane uses {traits.own_kernels} kernels")
    reason = f"lane {traits.id} computes matrix products with torch on {device.type}"
    return ComputeChoice("none", "plain", reason)


def _tell_compiling(done: int, total: int) -> None:
    if done < total:
        tell(COMPILING, done / total, f"({done} of {total}), once for this processor")
    else:
        tell(CHECKING)


def _device(config: ModelConfig) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ModelError("PyTorch finds no CUDA device on this machine; use --device cpu.")
    return torch.device("cuda" if has_cuda and config.device != "cpu" else "cpu")


def dtype_of(config: ModelConfig, spec: ModelSpec) -> torch.dtype:
    """Return the dtype to compute in; the default is the checkpoint's dtype.

    float16 models are computed in float32, which represents every float16 value exactly.
    """
    name = spec.dtype if config.dtype == "auto" else config.dtype
    if name not in _DTYPES:
        raise ModelError(
            f"{spec.name} has {name} weights, which are not supported; use --dtype bfloat16."
        )
    return _DTYPES[name]


def _check_fits(
    config: ModelConfig,
    spec: ModelSpec,
    lane_class: Any,
    dtype: torch.dtype,
    stored: tuple[Quantize, InstructionSet],
    draft: LoadPlan | None,
) -> Footprint:
    """Return the memory of the weights.

    Raises ModelError, before any weight is read, if there is too little memory for the model and
    its draft model.
    """
    device = _device(config)
    free, wanted = free_bytes(device), config.kv_cache_memory_bytes
    if draft is not None:
        free = max(0, free - draft.weights.peak)
    has_encoder = lane_class.traits.facts.encoder is not None
    weights = weights_that_fit(spec, dtype, *stored, free, has_encoder)
    if not lane_class.traits.has_kernels:
        # For a lane without kernels, the cache's size per token is known only after loading.
        return weights
    num_seqs = config.scheduler.max_num_seqs or _MAX_NUM_SEQS[device.type]
    cache = lane_class.cache_of(spec)
    each = bytes_per_position(cache, dtype.itemsize, config.kv_cache_dtype)
    each += draft.position_bytes if draft is not None else 0
    least = each * min(_MIN_POSITIONS, _max_positions(config, spec))
    check_cache_fits(spec, weights, wanted, (least, step_bytes(spec, num_seqs)), free)
    return weights


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _max_positions(config: ModelConfig, spec: ModelSpec) -> int:
    limits = [n for n in (spec.max_positions, config.max_model_len) if n is not None]
    return min(limits, default=_MAX_POSITIONS)


def _layout(config: ModelConfig, plan: LoadPlan, lane: Lane, max_num_seqs: int) -> MemoryLayout:
    spec = plan.spec
    max_positions = _max_positions(config, spec)
    room, free = config.kv_cache_memory_bytes, free_bytes(lane.device)
    if room is None:
        room = int(CACHE_SHARE[lane.device.type] * free)
    # The system would grant the memory at first, and kill the engine when the cache is written.
    elif room > free:
        raise ModelError(
            f"--kv-cache-memory-bytes asks for {room >> 20} MiB, but only {free >> 20} MiB are "
            "free; lower this value.",
            "model_too_large",
        )
    own = room
    if plan.draft is not None:
        # Both models cache the same positions.
        own = room * plan.position_bytes // (plan.position_bytes + plan.draft.position_bytes)
    layout = lane.layout(own, max_num_seqs, max_positions, config.block_size)
    needed = min(_MIN_POSITIONS, max_positions)
    # A lane that runs prompts whole has no cache that could be too small.
    if layout.max_positions < needed and not lane.traits.is_whole:
        raise ModelError(
            f"A cache of {room >> 20} MiB has room for {layout.max_positions} tokens of "
            f"{spec.name}, but one sequence of {needed} tokens must fit; raise "
            "--kv-cache-memory-bytes.",
            "model_too_large",
        )
    return layout
