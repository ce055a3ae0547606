"""Describes the memory of a loaded model, and the number of streams that fit into the memory."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from headrace_common.checkpoints.spec import read_spec
from headrace_common.layout import MemoryLayout
from headrace_common.messages import DraftFacts, Ready

if TYPE_CHECKING:
    from headrace_engine.runner.lanes.lane import Lane
    from headrace_engine.runner.load import LoadPlan


def cache_bytes(lane: "Lane", block_size: int) -> tuple[int, int]:
    """Return the bytes per token and the fixed bytes per sequence.

    Both are computed from the lane's layouts for two memory budgets.
    """
    small, large = 1 << 40, 1 << 41
    lengths = [lane.layout(b, 1, 1 << 60, block_size).max_positions for b in (small, large)]
    # If tokens take no memory, the whole memory is recurrent state.
    if lengths[0] == lengths[1]:
        return 0, small // max(1, lane.layout(small, 1 << 40, 1 << 60, block_size).num_slots)
    per_token = round((large - small) / max(1, lengths[1] - lengths[0]))
    fixed = small - lengths[0] * per_token
    if fixed <= block_size * per_token:
        # The small rest is a rounding error.
        return per_token, 0
    layout = lane.layout(small, 1, 1 << 60, block_size)
    return per_token, fixed // max(1, layout.num_slots + layout.num_snapshots)


def slots(layout: MemoryLayout, per_sequence: int) -> str:
    """Describe the slots for recurrent states, which limit the number of streams."""
    if not layout.num_blocks or not layout.num_slots:
        return ""
    size = f"{per_sequence / (1 << 20):.1f} MiB"
    kept = f"{layout.num_snapshots} more for saved states of prefixes"
    return f"; {layout.num_slots} slots of {size} for recurrent states, and {kept}"


def fit(ready: Ready) -> str:
    """Describe how many tokens fit, and how many streams of the maximum length or shorter."""
    layout = ready.layout
    whole = layout.max_positions
    num = layout.num_slots
    if layout.num_blocks:
        num = layout.num_blocks // max(1, layout.blocks_for(whole))
    most = ready.max_num_seqs
    streams = f"{min(num, most)} streams of {whole} tokens, or {most} shorter streams"
    return f"{layout.num_positions} tokens fit: {streams}"


def weights(folder: Path, ready: "Ready | LoadPlan") -> str:
    """Describe the size and the format of the weights in memory."""
    import torch

    from headrace_engine.runner.footprint import footprint

    dtype = getattr(torch, ready.dtype)
    spec, is_mapped = read_spec(folder), ready.mapped_bytes > 0
    has_encoder = ready.facts.encoder is not None
    needed = footprint(spec, dtype, ready.kernels, ready.quantize, is_mapped, has_encoder)
    kept = {"none": "", "own": "the file's own format and "}.get(
        ready.quantize, f"{ready.quantize} and "
    )
    return f"{needed}, in {kept}{ready.dtype}"


def draft_model(facts: DraftFacts) -> str:
    """Describe the draft model and its memory."""
    return (
        f"{facts.name}: {facts.weight_bytes >> 20} MiB of weights, and {facts.position_bytes} "
        "bytes of cache per token; GET /props of the running server shows how many of its tokens "
        "were right"
    )


def on_disk(folder: Path, ready: "Ready | LoadPlan") -> str:
    """Describe the experts that stay on disk, and how many of those bytes a token reads."""
    config = read_spec(folder).config
    config = config.get("text_config") or config
    num = config.get("num_experts") or config["num_local_experts"]
    share = config["num_experts_per_tok"] / num
    return (
        f"{ready.mapped_bytes >> 20} MiB stay on disk, because they do not fit into memory; each "
        f"token uses {round(share * ready.mapped_bytes) >> 20} MiB of them, read from disk unless "
        "cached"
    )


def smaller(folder: Path, ready: "Ready | LoadPlan") -> Iterator[str]:
    """Yield the memory that the weights would take in each smaller format."""
    import torch

    from headrace_engine.runner.footprint import footprint

    if ready.kernels == "plain":
        return
    spec, dtype = read_spec(folder), getattr(torch, ready.dtype)
    size = partial(
        footprint, spec, dtype, ready.kernels, has_encoder=ready.facts.encoder is not None
    )
    held = size(ready.quantize).held
    for kind in ("int8", "int4"):
        needed = size(kind)
        if needed.held < held:
            yield f"{needed.held >> 20} MiB with --quantize {kind}"
