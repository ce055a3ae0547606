"""One layer of experts beside reading the experts that it chooses, measured in the same run.

    python -m benchmarks.experts [--quantize int4] [--tokens 1 4] [--rounds 15]

The layer is of Qwen3-30B-A3B's shape: hidden 2048, 128 experts of 768, of which a token takes 8.
Reading is one pass over the very bytes of the chosen experts, by as many threads, which take pieces
as they come. A round computes many inputs, one after another, and then reads what each of them
chose: more bytes than a cache holds lie between two uses of an expert. The layer runs as it does in
a small step, captured, with its router, its choice and its sum.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numba import njit
from numba.np.numpy_support import carray
from torch import Tensor, nn

from headrace.models.experts import ExpertsConfig, RoutedMLP
from headrace.models.layers import GatedMLP
from headrace_kernels import pack_linear, prepare
from headrace_kernels.arguments import arguments_of, reader
from headrace_kernels.capture import capture
from headrace_kernels.fuse import fuse
from headrace_kernels.launch import Kernel, parallel
from headrace_kernels.numeric import i64_at, take_next

_HIDDEN, _NUM, _SIZE, _CHOSEN = 2048, 128, 768, 8
_NUM_LAYERS, _NUM_INPUTS = 2, 12
_PIECE = 1 << 12  # words of 8 bytes: about a panel


class _Text(msgspec.Struct):
    """The part of a config that a gated MLP reads."""

    hidden_size: int = _HIDDEN
    mlp_size: int = _SIZE
    has_mlp_bias: bool = False


class _Reads(NamedTuple):
    num: int
    table: int  # addresses and numbers of words
    sums: int


_read_arguments = reader(_Reads)


@njit(fastmath=True)
def _sum(words: Any) -> int:
    total = np.int64(0)
    for i in range(words.size):
        total += words[i]
    return total


@Kernel
def _read(a: Any) -> None:
    g = _read_arguments(a)
    table, sums = carray(i64_at(g.table), (g.num, 2)), carray(i64_at(g.sums), g.num)
    while True:
        piece = take_next(a)
        if piece >= g.num:
            break
        sums[piece] = _sum(carray(i64_at(table[piece, 0]), table[piece, 1]))


class _Reading:
    """Reads all of some tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.num_bytes = sum(tensor.nbytes for tensor in tensors)
        pieces = []
        for tensor in tensors:
            words = tensor.nbytes // 8
            for first in range(0, words, _PIECE):
                pieces.append((tensor.data_ptr() + 8 * first, min(_PIECE, words - first)))
        self._table, self._sums = torch.tensor(pieces), torch.zeros(len(pieces), dtype=torch.int64)

    def __call__(self) -> None:
        pointers = self._table.data_ptr(), self._sums.data_ptr()
        parallel(_read, arguments_of(*_Reads(len(self._table), *pointers)))


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


class _Captured:
    """A layer as small steps replay it."""

    def __init__(self, layer: Any, num_tokens: int) -> None:
        self._steady = torch.zeros(num_tokens, _HIDDEN).bfloat16()
        graph, self.result = capture(lambda: layer(self._steady), [self._steady], {})
        self._calls = fuse(graph.first_rows(num_tokens))

    def __call__(self, x: Tensor) -> None:
        self._steady.copy_(x)
        for call in self._calls:
            call()


def _seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _measure(layers: list[Any], num_tokens: int, rounds: int) -> str:
    inputs = [torch.randn(num_tokens, _HIDDEN).bfloat16() for _ in range(_NUM_INPUTS)]
    pairs = [(layer, x) for x in inputs for layer in layers]
    reads = [_reading(*pair) for pair in pairs]
    steps = {layer: _Captured(layer, num_tokens) for layer in layers}
    computing, reading = [], []
    for _ in range(1 + rounds):  # the first compiles
        computing.append(np.array([_seconds(partial(steps[layer], x)) for layer, x in pairs]))
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
    print(f"{args.quantize}, {torch.get_num_threads()} threads")
    with torch.inference_mode():
        for num_tokens in args.tokens:
            print(_measure(layers, num_tokens, args.rounds))


if __name__ == "__main__":
    main()
