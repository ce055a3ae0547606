"""What the weights of a loaded model take, and what they would take in fewer bits."""

from collections.abc import Iterator
from pathlib import Path

from headrace.checkpoints.spec import read_spec
from headrace.core.messages import Ready


def weights(folder: Path, ready: Ready) -> str:
    import torch

    from headrace.runner.footprint import footprint

    dtype = getattr(torch, ready.dtype)
    needed = footprint(read_spec(folder), dtype, ready.kernels, ready.quantize)
    kept = {"none": "", "own": "the file's own bits and "}.get(
        ready.quantize, f"{ready.quantize} and "
    )
    return f"{needed}, in {kept}{ready.dtype}"


def smaller(folder: Path, ready: Ready) -> Iterator[str]:
    """What the weights would take in forms of fewer bits."""
    import torch

    from headrace.runner.footprint import footprint

    if ready.kernels == "plain":
        return
    spec, dtype = read_spec(folder), getattr(torch, ready.dtype)
    held = footprint(spec, dtype, ready.kernels, ready.quantize).held
    for kind in ("int8", "int4"):
        needed = footprint(spec, dtype, ready.kernels, kind)
        if needed.held < held:
            yield f"{needed.held >> 20} MiB with --quantize {kind}"
