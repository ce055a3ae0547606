"""Loads a model's folder into a warm runner, with the figures that describe it."""

import logging
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headrace_common.cache import bytes_per_position
from headrace_common.checkpoints.spec import ModelSpec, read_spec
from headrace_common.config.settings import ModelConfig
from headrace_common.errors import ModelError
from headrace_common.layout import MemoryLayout
from headrace_common.loading import CHECKING, COMPILING, READING, WARMING, tell, tell_weights
from headrace_common.messages import InstructionSet, Quantize, Ready
from headrace_engine.runner.footprint import Footprint, kept_groups
from headrace_engine.runner.lanes.choose import choose_lane
from headrace_engine.runner.lanes.lane import Lane, LaneOptions, LaneTraits
from headrace_engine.runner.pooling import VectorHead
from headrace_engine.runner.probe import free_bytes, num_threads
from headrace_engine.runner.room import (
    check_beside,
    guarded,
    step_bytes,
    stored_as,
    weights_that_fit,
)
from headrace_engine.runner.runner import Runner
from headrace_engine.runner.trial import one_round
from headrace_engine.runner.vector_stages import vector_head
from headrace_engine.weights.fingerprint import fingerprint
from headrace_kernels import ON_COMPILE, choose_instructions

logger = logging.getLogger(__name__)

_MAX_NUM_SEQS = {"cpu": 64, "cuda": 256}
CACHE_SHARE = {"cpu": 0.25, "cuda": 0.9}  # of the memory that is free after loading
_MIN_POSITIONS = 1024  # a model that cannot hold one sequence of that length is not served
_MAX_POSITIONS = 4096  # of a model that states no limit
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float32}


class Computing(NamedTuple):
    """How weights are kept, and the instructions that compute with them, with the reason."""

    quantize: Quantize
    instructions: InstructionSet
    reason: str


class LoadedLane(NamedTuple):
    """A lane with its weights and memory, its vector head, and its limits and figures."""

    lane: Lane
    head: VectorHead
    ready: Ready


def load_runner(config: ModelConfig, folder: Path) -> tuple[Runner, Ready]:
    """Loads and warms a runner without grammars; ModelError if the model cannot be served."""
    lane, head, ready = load_lane(config, folder)
    runner = Runner(lane, head)
    warm(runner, ready.layout)
    return runner, ready


def warm(runner: Runner, layout: MemoryLayout) -> None:
    """Computes a few steps, so that the first request finds every kernel compiled."""
    tell(WARMING)
    for _ in one_round(runner, layout):
        pass


def load_lane(config: ModelConfig, folder: Path) -> LoadedLane:
    """Loads the weights and takes the memory; ModelError if the model cannot be served."""
    tell(READING)
    torch.set_num_threads(num_threads(config.threads))
    device = _device(config)
    spec = read_spec(folder)
    dtype = dtype_of(config, spec)
    make = choose_lane(spec, config.lane)
    tell(CHECKING)
    quantize, instructions, reason = how_computed(config, spec, make, device, dtype)
    mapped = _check_fits(config, spec, make, dtype, (quantize, instructions)).mapped
    if mapped:
        logger.warning(
            "Memory has no room for %d MiB of experts: they lie on disk, and what memory does not "
            "keep of them is read as they are chosen. `headrace doctor` says how much that is.",
            mapped >> 20,
        )
    options = LaneOptions(quantize, instructions, config.kernels, config.device != "cpu", mapped)
    tell_weights(0.0)
    with guarded(device):
        lane: Lane = make(spec, dtype, device, options)
    device = lane.device  # where its sequences lie
    max_num_seqs = config.scheduler.max_num_seqs or _MAX_NUM_SEQS[device.type]
    layout = _layout(config, spec, lane, max_num_seqs)
    head = vector_head(spec, lane.traits, config.pooling)
    lane.open(layout)
    name, traits = _name(lane.dtype), lane.traits
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
        fingerprint=fingerprint(spec, stored_as(quantize, name), f"{device.type} {instructions}"),
        kernels=instructions,
        kernels_reason=reason,
        tasks=traits.tasks,
        is_whole=traits.is_whole,
        vector_size=head.size,
        pooling=head.modes,
        facts=traits.facts,
        source=traits.source,
        quantize=quantize,
    )
    return LoadedLane(lane, head, ready)


def how_computed(
    config: ModelConfig, spec: ModelSpec, lane: Any, device: torch.device, dtype: torch.dtype
) -> Computing:
    """ModelError if what is asked for is computed by our kernels alone, and they cannot be used."""
    ON_COMPILE.set(_tell_compiling)
    traits: LaneTraits = lane.traits
    if traits.has_kernels and device.type == "cpu":
        quantize = "none" if config.quantize == "auto" else config.quantize
        # in float32 a file's values are computed exactly, as none of them is then rounded
        keeps = config.quantize == "auto" and dtype == torch.bfloat16
        groups = kept_groups(spec) if keeps else frozenset()
        kinds = lane.layer_kinds(spec)
        try:
            choice = choose_instructions(config.kernels, dtype, quantize, groups, kinds)
        except ValueError as error:
            raise ModelError(str(error)) from error
        is_own = groups and choice.instructions != "plain"
        return Computing("own" if is_own else quantize, *choice)
    plain = ("auto",) if traits.own_products else ("none", "auto", "plain")
    for flag, value in (("quantize", config.quantize), ("kernels", config.kernels)):
        if value not in plain:
            raise ModelError(f"--{flag} {value} needs a native lane on a CPU, not {traits.id}.")
    if traits.own_products:
        return Computing("own", "plain", f"the products are {traits.own_products}")
    reason = f"the products of lane {traits.id} on {device.type} are torch's"
    return Computing("none", "plain", reason)


def _tell_compiling(done: int, total: int) -> None:
    if done < total:
        tell(COMPILING, done / total, f"({done} of {total}), once for this processor")
    else:
        tell(CHECKING)


def _device(config: ModelConfig) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ModelError("PyTorch finds no CUDA device here; use --device cpu.")
    return torch.device("cuda" if has_cuda and config.device != "cpu" else "cpu")


def dtype_of(config: ModelConfig, spec: ModelSpec) -> torch.dtype:
    """The checkpoint's own by default; float16 is computed in float32, which holds it exactly."""
    name = spec.dtype if config.dtype == "auto" else config.dtype
    if name not in _DTYPES:
        raise ModelError(
            f"{spec.name} has {name} weights, which are not supported; give --dtype bfloat16."
        )
    return _DTYPES[name]


def _check_fits(
    config: ModelConfig,
    spec: ModelSpec,
    make: Any,
    dtype: torch.dtype,
    stored: tuple[Quantize, InstructionSet],
) -> Footprint:
    """ModelError if there is no room; before anything is read of the weights."""
    free, asked = free_bytes(_device(config)), config.kv_cache_memory_bytes
    weights = weights_that_fit(spec, dtype, *stored, free)
    if not make.traits.has_kernels:
        return weights  # what it keeps of a token is known once it is loaded
    num_seqs = config.scheduler.max_num_seqs or _MAX_NUM_SEQS["cpu"]
    each = bytes_per_position(make.cache_of(spec), dtype.itemsize)
    least = each * min(_MIN_POSITIONS, _max_positions(config, spec))
    check_beside(spec, weights, asked, (least, step_bytes(spec, num_seqs)), free)
    return weights


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _max_positions(config: ModelConfig, spec: ModelSpec) -> int:
    limits = [n for n in (spec.max_positions, config.max_model_len) if n is not None]
    return min(limits, default=_MAX_POSITIONS)


def _layout(config: ModelConfig, spec: ModelSpec, lane: Lane, max_num_seqs: int) -> MemoryLayout:
    max_positions = _max_positions(config, spec)
    room, free = config.kv_cache_memory_bytes, free_bytes(lane.device)
    if room is None:
        room = int(CACHE_SHARE[lane.device.type] * free)
    elif room > free:  # the system would promise it, and end the engine when it is written
        raise ModelError(
            f"--kv-cache-memory-bytes asks for {room >> 20} MiB and {free >> 20} MiB are free; "
            "ask for less.",
            "model_too_large",
        )
    layout = lane.layout(room, max_num_seqs, max_positions, config.block_size)
    needed = min(_MIN_POSITIONS, max_positions)
    if layout.max_positions < needed and not lane.traits.is_whole:  # that keeps nothing
        raise ModelError(
            f"{room >> 20} MiB for the cache hold {layout.max_positions} tokens of {spec.name}, "
            f"and one sequence of {needed} must fit; give it more with --kv-cache-memory-bytes.",
            "model_too_large",
        )
    return layout
