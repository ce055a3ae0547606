"""One layer of experts beside reading the experts that it chooses, measured in the same run.

    python -m benchmarks.experts [--quantize int4] [--tokens 1 4] [--rounds 15]

The layer is of Qwen3-30B-A3B's shape: hidden 2048, 128 experts of 768, of which a token takes 8;
with `--quantize mxfp4` it is gpt-oss-20b's: hidden 2880, 32 experts of 2880, of which it takes 4.
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
from typing import Any, NamedTuple

import msgspec
import numba
import numpy as np
import torch
from numba import njit, prange
from torch import Tensor, nn

from headrace.core.ids import SequenceId, SlotId
from headrace.core.plan import Chunk
from headrace.models.experts import ExpertsConfig, RoutedMLP
from headrace.models.gpt_oss import GptOssExperts
from headrace.models.layers import ClampedMLP, GatedMLP
from headrace.models.step import BARE
from headrace.runner.inputs import Batch, pack
from headrace_kernels import CapturedForward, pack_linear, prepare

_MXFP4 = 4, 32, False, True
_NUM_LAYERS, _NUM_INPUTS = 2, 12
_PIECE = 1 << 12  # words of 8 bytes: about a panel
_CPU = torch.device("cpu")


class _Shape(NamedTuple):
    hidden: int
    num: int
    size: int
    chosen: int
    is_gpt_oss: bool = False


_A3B, _GPT_OSS = _Shape(2048, 128, 768, 8), _Shape(2880, 32, 2880, 4, is_gpt_oss=True)


class _Text(msgspec.Struct):
    """The part of a config that a gated MLP reads."""

    hidden_size: int
    mlp_size: int
    has_mlp_bias: bool


@njit(parallel=True, fastmath=True)
def _sum(words: Any, pieces: Any) -> int:
    total = np.int64(0)
    for n in prange(len(pieces)):
        piece = words[pieces[n, 0] : pieces[n, 1]]
        part = np.int64(0)
        for i in range(len(piece)):  # from 0: an index that may be negative is not vectorized
            part += piece[i]
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


def _layer(quantize: str, shape: _Shape, seed: int) -> Any:
    torch.manual_seed(seed)
    is_gpt_oss = shape.is_gpt_oss
    experts = ExpertsConfig(
        num=shape.num,
        num_chosen=shape.chosen,
        size=shape.size,
        sums_to_one=True,
        has_router_bias=is_gpt_oss,
    )
    text: Any = _Text(shape.hidden, shape.size, is_gpt_oss)
    model = nn.Module()
    with torch.device("meta"):
        model.mlp = (GptOssExperts if is_gpt_oss else RoutedMLP)(text, experts)
    for path, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear):
            continue
        if module.bias is not None:
            module.bias = nn.Parameter(torch.zeros(module.out_features), requires_grad=False)
        if is_gpt_oss and ".experts." in path:
            size = module.out_features, module.in_features
            codes = torch.randint(0, 16, size, dtype=torch.int8)
            scales = torch.full((size[0], size[1] // 32), 120, dtype=torch.uint8)
            pack_linear(model, path, (_MXFP4, codes, scales, scales[:, :0]), "own")
            continue
        weight = 0.02 * torch.randn(module.weight.shape, dtype=torch.bfloat16)
        module.weight = nn.Parameter(weight, requires_grad=False)
        pack_linear(model, path, quantize="none" if is_gpt_oss else quantize)  # type: ignore[arg-type]
    kinds = {GatedMLP: "gated-mlp", ClampedMLP: "clamped-mlp"}
    prepare(model, kinds | {RoutedMLP: "routed-mlp", GptOssExperts: "routed-mlp"})
    return model.mlp


def _reading(layer: Any, x: Tensor) -> _Reading:
    scores = layer.router(x).float()
    chosen = sorted(set(scores.topk(layer.num_chosen).indices.flatten().tolist()))
    experts = [layer.experts[number] for number in chosen]
    return _Reading([part.weight for each in experts for part in (each.gate_up, each.down)])


def _seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _measure(layers: list[Any], hidden: int, num_tokens: int, rounds: int) -> str:
    table = torch.randn(_NUM_INPUTS * num_tokens, hidden).bfloat16()
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
    parser.add_argument("--quantize", default="int4", choices=["none", "int8", "int4", "mxfp4"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    shape = _GPT_OSS if args.quantize == "mxfp4" else _A3B
    layers = [_layer(args.quantize, shape, seed) for seed in range(_NUM_LAYERS)]
    numba.set_num_threads(torch.get_num_threads())
    print(f"{args.quantize}, {torch.get_num_threads()} threads")
    with torch.inference_mode():
        for num_tokens in args.tokens:
            print(_measure(layers, shape.hidden, num_tokens, args.rounds))


if __name__ == "__main__":
    main()
