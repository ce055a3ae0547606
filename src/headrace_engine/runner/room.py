"""Checks whether a model fits into the free memory, before and during loading.

Free memory is the memory that can be allocated without swapping, within the limits of the
process's control groups. Loading a large model takes minutes, and other programs may take memory
meanwhile.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from headrace_common.cache import KvCacheDtype
from headrace_common.checkpoints.spec import ModelSpec
from headrace_common.errors import ModelError
from headrace_common.loading import ON_LOADING
from headrace_common.messages import InstructionSet, Loading, Quantize
from headrace_engine.runner.footprint import Footprint, footprint
from headrace_engine.runner.mapped_file import objection
from headrace_engine.runner.probe import free_bytes

# Copies of a step's float32 logits: as computed, adjusted, sorted and summed.
_LOGIT_COPIES = 4
# Loading leaves this many bytes or this share to other programs, whichever is smaller.
_LEFT_BYTES, _LEFT_SHARE = 256 << 20, 0.05
_CHECK_S = 0.05
_TOO_LARGE = "model_too_large"


def stored_as(quantize: str, name: str, kv_cache_dtype: KvCacheDtype = "auto") -> str:
    """Describe how weights and the cache are stored, for messages and fingerprints."""
    how = {"none": "", "int4": " int4 with its head in int8"}.get(quantize, f" {quantize}")
    return name + how + (f" with a cache in {kv_cache_dtype}" if kv_cache_dtype != "auto" else "")


def weights_that_fit(
    spec: ModelSpec,
    dtype: torch.dtype,
    quantize: Quantize,
    instructions: InstructionSet,
    free: int,
    has_encoder: bool = False,
) -> Footprint:
    """Return the memory of the weights; ModelError with smaller options if weights do not fit.

    If everything else fits, experts may be kept in a mapped file. `has_encoder` says whether the
    lane also loads the vision and audio sides.
    """
    size = partial(footprint, spec, dtype, instructions, has_encoder=has_encoder)
    needed = size(quantize)
    if needed.peak <= free:
        return needed
    mapped = size(quantize, maps_experts=True)
    reason = objection(mapped.mapped) if mapped.mapped else None
    if mapped.mapped and mapped.peak <= free and reason is None:
        return mapped
    stored = stored_as(quantize, str(dtype).removeprefix("torch."))
    raise ModelError(
        f"The weights of {spec.name} take {needed} in {stored}, but only {free >> 20} MiB are "
        f"free; use a smaller model{_remedy(size, dtype, quantize, instructions, free)}."
        + (f" Its experts cannot be kept on disk: {reason}" if reason else ""),
        _TOO_LARGE,
    )


def step_bytes(spec: ModelSpec, num_seqs: int) -> int:
    """Estimate the bytes that a step of `num_seqs` sequences takes besides weights and cache."""
    return _LOGIT_COPIES * torch.float32.itemsize * spec.vocab_size * num_seqs


def check_cache_fits(
    spec: ModelSpec, weights: Footprint, wanted: int | None, least: tuple[int, int], free: int
) -> None:
    """Raise ModelError if the cache does not fit into memory with the weights.

    `wanted` is the size of the cache in bytes, if the user has set a size. `least` has the bytes
    of the smallest cache that may be served, and the bytes of a step.
    """
    shortest, step = least
    room = free - weights.held - step
    if room >= (shortest if wanted is None else wanted):
        return
    taken = f"{weights.held >> 20} MiB of weights and {step >> 20} MiB for a step"
    if wanted is not None:
        raise ModelError(
            f"--kv-cache-memory-bytes asks for {wanted >> 20} MiB besides {taken}, but only "
            f"{free >> 20} MiB are free; set it to at most {max(0, room >> 20)} MiB.",
            _TOO_LARGE,
        )
    raise ModelError(
        f"{spec.name} takes {taken}, and {shortest >> 20} MiB to cache one sequence, but only "
        f"{free >> 20} MiB are free. Close other programs, lower --max-num-seqs, or use a smaller "
        "model or --quantize.",
        _TOO_LARGE,
    )


@contextlib.contextmanager
def watch_memory(device: torch.device) -> Iterator[None]:
    """Stop loading weights if other programs take the memory that the weights need.

    Free memory is checked at each progress report. ModelError is raised before the system would
    swap or kill a process.
    """
    tell = ON_LOADING.get()
    keep = min(_LEFT_BYTES, int(_LEFT_SHARE * free_bytes(device)))
    checked_at = 0.0

    def check(loading: Loading) -> None:
        nonlocal checked_at
        tell(loading)
        if time.monotonic() < checked_at + _CHECK_S:
            return
        checked_at = time.monotonic()
        if (left := free_bytes(device)) < keep:
            raise ModelError(
                f"Loading stopped at {100 * loading.share:.0f} % of the weights, because other "
                f"programs have taken memory: {left >> 20} MiB are free, and {keep >> 20} MiB must "
                "stay free. Close programs, or use a smaller model or --quantize.",
                _TOO_LARGE,
            )

    token = ON_LOADING.set(check)
    try:
        yield
    finally:
        ON_LOADING.reset(token)


def _remedy(
    size: Callable[[Quantize], Footprint],
    dtype: torch.dtype,
    quantize: Quantize,
    instructions: InstructionSet,
    free: int,
) -> str:
    """Return smaller options as text: the least lossy option that fits, or else the smallest."""
    if dtype == torch.float32 and quantize == "none":
        return " or --dtype bfloat16"
    all_smaller: dict[Quantize, tuple[Quantize, ...]] = {
        "none": ("int8", "int4"),
        "own": ("int4",),
        "int8": ("int4",),
        "int4": (),
    }
    smaller = all_smaller[quantize]
    if instructions == "plain" or not smaller:
        return ""
    taken = {other: size(other) for other in smaller}
    other = next((name for name, needed in taken.items() if needed.peak <= free), smaller[-1])
    return f" or --quantize {other}, which takes {taken[other]}"
