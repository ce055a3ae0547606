"""One layer of experts beside reading the experts that it chooses, measured in the same run.

    python -m benchmarks.experts [--quantize int4] [--tokens 1 4] [--rounds 15]

The layer is of Qwen3-30B-A3B's shape: hidden 2048, 128 experts of 768, of which a token takes 8.
Reading is one pass over the very bytes of the chosen experts, by as many threads, which take pieces
as they come. A round computes many inputs, one after another, and then reads what each of them
chose: more bytes than a cache holds lie between two uses of an expert. The layer runs as it does in
a small step, captured, with its router, its choice and its sum.
"""

import argparse
import ctypes
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import numba
import numpy as np
import torch
from numba import njit, prange
from torch import Tensor, nn

from headrace.core.ids import SequenceId, SlotId
from headrace.core.plan import Chunk
from headrace.models.experts import ExpertsConfig, RoutedMLP
from headrace.models.layers import GatedMLP
from headrace.models.step import BARE
from headrace.runner.inputs import Batch, pack
from headrace_kernels import CapturedForward, pack_linear, prepare

_HIDDEN, _NUM, _SIZE, _CHOSEN = 2048, 128, 768, 8
_NUM_LAYERS, _NUM_INPUTS = 2, 12
_PIECE = 1 << 12  # words of 8 bytes: about a panel
_CPU = torch.device("cpu")


class _Text(msgspec.Struct):
    """The part of a config that a gated MLP reads."""

    hidden_size: int = _HIDDEN
    mlp_size: int = _SIZE
    has_mlp_bias: bool = False


@njit(parallel=True, fastmath=True)
def _sum(words: Any, pieces: Any) -> int:
    total = np.int64(0)
    for n in prange(len(pieces)):
        first, end = pieces[n]
        part = np.int64(0)
        for i in range(first, end):
            part += words[i]
        total += part
    return total


class _Reading:
    """Reads all of some tensors, where they lie."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.num_bytes = sum(tensor.nbytes for tensor in tensors)
        base = min(tensor.data_ptr() for tensor in tensors)
        end = max(tensor.data_ptr() + tensor.nbytes for tensor in tensors)
        whole = ctypes.cast(base, ctypes.POINTER(ctypes.c_int64))
        self._words = np.ctypeslib.as_array(whole, ((end - base) // 8,))
        pieces = []
        for tensor in tensors:
            begin = (tensor.data_ptr() - base) // 8
            stop = begin + tensor.nbytes // 8
            pieces += [(n, min(n + _PIECE, stop)) for n in range(begin, stop, _PIECE)]
        self._pieces = np.array(pieces)

    def __call__(self) -> None:
        _sum(self._words, self._pieces)


class _Step:
    """A layer as small steps replay it; a token's id is the row of its input."""

    def __init__(self, layer: Any, table: Tensor) -> None:
        self._run = CapturedForward(lambda batch: layer(table[batch.token_ids], BARE), 1)

    def __call__(self, batch: Batch) -> None:
        self._run(batch)


def _batch(ids: range) -> Batch:
    blocks = array("i", [0])
    chunks = [Chunk(SequenceId(n), 0, 1, 1, (), blocks, SlotId(0)) for n in ids]
    return pack(chunks, [array("i", [n]) for n in ids], 16, _CPU)


def _layer(quantize: str, seed: int) -> Any:
    torch.manual_seed(seed)
    experts = ExpertsConfig(num=_NUM, num_chosen=_CHOSEN, size=_SIZE, sums_to_one=True)
    model = nn.Module()
    with torch.device("meta"):
        model.mlp = RoutedMLP(_Text(), experts)  # type: ignore[arg-type]
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            weight = 0.02 * torch.randn(module.weight.shape, dtype=torch.bfloat16)
            module.weight = nn.Parameter(weight, requires_grad=False)
            pack_linear(model, path, quantize=quantize)  # type: ignore[arg-type]
    prepare(model, {RoutedMLP: "routed-mlp", GatedMLP: "gated-mlp"})
    return model.mlp


def _reading(layer: Any, x: Tensor) -> _Reading:
    scores = layer.router(x).float()
    chosen = sorted(set(scores.topk(_CHOSEN).indices.flatten().tolist()))
    experts = [layer.experts[number] for number in chosen]
    return _Reading([part.weight for each in experts for part in (each.gate_up, each.down)])


def _seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _measure(layers: list[Any], num_tokens: int, rounds: int) -> str:
    table = torch.randn(_NUM_INPUTS * num_tokens, _HIDDEN).bfloat16()
    inputs = [range(n * num_tokens, (n + 1) * num_tokens) for n in range(_NUM_INPUTS)]
    steps = [_Step(layer, table) for layer in layers]
    pairs = [(step, _batch(ids)) for ids in inputs for step in steps]
    reads = [_reading(layer, table[ids.start : ids.stop]) for ids in inputs for layer in layers]
    computing, reading = [], []
    for _ in range(1 + rounds):  # the first compiles
        computing.append(np.array([_seconds(partial(step, batch)) for step, batch in pairs]))
        reading.append(np.array([_seconds(read) for read in reads]))
    took, floor = (1e6 * float(np.median(times[1:])) for times in (computing, reading))
    ratios = sorted(c.sum() / r.sum() for c, r in zip(computing[1:], reading[1:], strict=True))
    num_bytes = statistics.mean(read.num_bytes for read in reads)
    return (
        f"{num_tokens} token(s): {took:.0f} us; reading {num_bytes / 2**20:.1f} MiB {floor:.0f} us "
        f"({num_bytes / floor / 1e3:.1f} GB/s); ratio {statistics.median(ratios):.2f} "
        f"({ratios[0]:.2f} to {ratios[-1]:.2f} in {rounds} rounds)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quantize", default="int4", choices=["none", "int8", "int4"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    layers = [_layer(args.quantize, seed) for seed in range(_NUM_LAYERS)]
    numba.set_num_threads(torch.get_num_threads())
    print(f"{args.quantize}, {torch.get_num_threads()} threads")
    with torch.inference_mode():
        for num_tokens in args.tokens:
            print(_measure(layers, num_tokens, args.rounds))


if __name__ == "__main__":
    main()
