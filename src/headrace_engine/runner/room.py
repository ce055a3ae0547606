"""Owns whether a model fits the memory that is free: before it is loaded, and meanwhile.

What is free is what can be taken without swapping, and within the limits of the process's control
groups. Other programs take memory, too, while a large model is read for minutes.
"""

import contextlib
import time
from collections.abc import Iterator

import torch

from headrace_common.checkpoints.spec import ModelSpec
from headrace_common.errors import ModelError
from headrace_common.loading import ON_LOADING
from headrace_common.messages import InstructionSet, Loading, Quantize
from headrace_engine.runner.footprint import Footprint, footprint
from headrace_engine.runner.mapped_file import objection
from headrace_engine.runner.probe import free_bytes

_LOGIT_COPIES = 4  # of a step's float32 logits: as computed, adjusted, sorted, summed
_LEFT_BYTES, _LEFT_SHARE = 256 << 20, 0.05  # kept for others while weights are read: the smaller
_CHECK_S = 0.05
_TOO_LARGE = "model_too_large"


def stored_as(quantize: str, name: str) -> str:
    """The form of weights in words, of that name's dtype where nothing else is said."""
    how = {"none": "", "int4": " int4 with its head in int8"}.get(quantize, f" {quantize}")
    return name + how


def weights_that_fit(
    spec: ModelSpec, dtype: torch.dtype, quantize: Quantize, instructions: InstructionSet, free: int
) -> Footprint:
    """Bytes of the weights; ModelError if they do not fit, with options that take less.

    Where all else fits, experts may lie in a mapped file.
    """
    needed = footprint(spec, dtype, instructions, quantize)
    if needed.peak <= free:
        return needed
    mapped = footprint(spec, dtype, instructions, quantize, maps_experts=True)
    reason = objection(mapped.mapped) if mapped.mapped else None
    if mapped.mapped and mapped.peak <= free and reason is None:
        return mapped
    stored = stored_as(quantize, str(dtype).removeprefix("torch."))
    raise ModelError(
        f"The weights of {spec.name} take {needed} in {stored} and {free >> 20} MiB are "
        f"free; use a smaller model{_remedy(spec, dtype, quantize, instructions, free)}."
        + (f" Its experts cannot stay on disk: {reason}" if reason else ""),
        _TOO_LARGE,
    )


def step_bytes(spec: ModelSpec, num_seqs: int) -> int:
    """Bytes that a step of so many sequences takes beside weights and cache, roughly."""
    return _LOGIT_COPIES * torch.float32.itemsize * spec.vocab_size * num_seqs


def check_beside(
    spec: ModelSpec, weights: Footprint, asked: int | None, least: tuple[int, int], free: int
) -> None:
    """ModelError if beside the weights there is no room for the cache, as `asked` or the least.

    `least`: bytes of the shortest cache that is served, and of a step.
    """
    shortest, step = least
    room = free - weights.held - step
    if room >= (shortest if asked is None else asked):
        return
    taken = f"{weights.held >> 20} MiB of weights and {step >> 20} for a step"
    if asked is not None:
        raise ModelError(
            f"--kv-cache-memory-bytes asks for {asked >> 20} MiB beside {taken}, and {free >> 20} "
            f"MiB are free; ask for {max(0, room >> 20)} MiB or less.",
            _TOO_LARGE,
        )
    raise ModelError(
        f"{spec.name} takes {taken}, and a cache of {shortest >> 20} MiB for one sequence; "
        f"{free >> 20} MiB are free. Close other programs, give fewer --max-num-seqs, or use a "
        "smaller model or --quantize.",
        _TOO_LARGE,
    )


@contextlib.contextmanager
def guarded(device: torch.device) -> Iterator[None]:
    """A load of weights that is given up as soon as others have taken the memory that it needs.

    ModelError then, before the system ends a process or swaps. It looks where the load tells how
    far it is.
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
                f"Other programs have taken memory since the load began: {left >> 20} MiB are "
                f"left at {100 * loading.share:.0f} % of the weights, and {keep >> 20} MiB are "
                "kept free for them. Close some, or use a smaller model or --quantize.",
                _TOO_LARGE,
            )

    token = ON_LOADING.set(check)
    try:
        yield
    finally:
        ON_LOADING.reset(token)


def _remedy(
    spec: ModelSpec, dtype: torch.dtype, quantize: Quantize, instructions: InstructionSet, free: int
) -> str:
    """Options that take less, least loss first: one that fits, or else the smallest."""
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
    taken = {other: footprint(spec, dtype, instructions, other) for other in smaller}
    other = next((name for name, needed in taken.items() if needed.peak <= free), smaller[-1])
    return f" or --quantize {other}, which takes {taken[other]}"
