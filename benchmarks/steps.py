"""Runs all kinds of steps on a loaded lane, and counts their bytes and operations.

A lane is the code that runs one kind of model.
"""

import statistics
import time
from array import array
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from headrace_common.checkpoints.spec import read_spec
from headrace_common.config.settings import ModelConfig, SchedulerConfig
from headrace_common.ids import BlockId, SequenceId
from headrace_common.plan import Begin, BlockCopy, Chunk, StepPlan
from headrace_common.sampling import Sampling
from headrace_engine.runner.load import load_runner

_GREEDY = Sampling(temperature=0.0, ignore_eos=True)
_BLOCK = 32
MAX_STREAMS = 16
MAX_CONTEXT = 2048
# The number of positions for which each sequence has blocks.
_ROOM = MAX_CONTEXT + 512 + 128
# The maximum number of tokens that a step on a CPU computes.
_MAX_CHUNK = 512
# The shortest time in seconds per round of a row; the first repetition is not counted.
_SECONDS = 1.0
Share = tuple[int, int, int]
"""A sequence's number, the start of its chunk and the length of its chunk."""


class Shape(msgspec.Struct, frozen=True):
    """The sizes from which bytes and operations are counted."""

    # The number of weights in all linear layers, which every token is multiplied by.
    linear: int
    # The number of weights in the output head, which each row of hidden states is multiplied by.
    head: int
    layers: int
    heads: int
    dim: int
    # Bytes of one position in all layers.
    kv_bytes: int
    # Bytes per weight of a linear layer.
    weight_bytes: float


class Row(msgspec.Struct, frozen=True):
    """A measured kind of step. A step that is too large for one plan has consecutive plans."""

    name: str
    seconds: float
    bytes: int
    operations: int


class Bench:
    """A lane whose blocks are all filled: the same random prompt is copied to all sequences."""

    def __init__(self, folder: Path, is_int8: bool) -> None:
        config = read_spec(folder).config
        hidden, dim = config["hidden_size"], config["head_dim"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        layers, mlp = config["num_hidden_layers"], config["intermediate_size"]
        kv_bytes = 2 * layers * kv_heads * dim * 2
        per_layer = hidden * dim * (2 * heads + 2 * kv_heads) + 3 * hidden * mlp
        self.shape = Shape(
            linear=layers * per_layer,
            head=hidden * config["vocab_size"],
            layers=layers,
            heads=heads,
            dim=dim,
            kv_bytes=kv_bytes,
            weight_bytes=1 if is_int8 else 2,
        )
        self.kv_cache_bytes = MAX_STREAMS * _ROOM * kv_bytes
        self._runner = load_runner(self._config(folder, is_int8), folder)[0]
        self._ids = torch.randint(0, config["vocab_size"] - 1, (_ROOM,)).tolist()

    def _config(self, folder: Path, is_int8: bool) -> ModelConfig:
        return ModelConfig(
            model=str(folder),
            device="cpu",
            max_model_len=_ROOM,
            kv_cache_memory_bytes=self.kv_cache_bytes,
            scheduler=SchedulerConfig(max_num_seqs=MAX_STREAMS),
            **({"quantize": "int8"} if is_int8 else {}),
        )

    def fill(self) -> None:
        """Gives every sequence MAX_CONTEXT computed positions."""
        self._begin(1, MAX_CONTEXT)
        self._run(_cut(0, 0, MAX_CONTEXT))
        per_sequence = _ROOM // _BLOCK
        copies = tuple(
            BlockCopy(BlockId(b), BlockId(n * per_sequence + b))
            for n in range(1, MAX_STREAMS)
            for b in range(MAX_CONTEXT // _BLOCK)
        )
        self._runner.launch(StepPlan(block_copies=copies)).result()

    def prompt(self, name: str, start: int, length: int) -> Row:
        self._begin(1, start + length)
        return self._measured(name, _cut(0, start, length))

    def decode(self, name: str, streams: int, context: int) -> Row:
        self._begin(streams, context + 1)
        return self._measured(name, [[(n, context, 1) for n in range(streams)]])

    def mixed(self, name: str, streams: int, context: int, length: int) -> Row:
        """Measure steps with `streams` decodes and `length` prompt tokens of another sequence."""
        self._begin(streams + 1, context + length)
        shares = [(n, context + length - 1, 1) for n in range(streams)]
        return self._measured(name, [[*shares, (streams, context, length)]])

    def _begin(self, count: int, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        ids = array("i", self._ids[:num_tokens])
        self._begun = tuple(Begin(SequenceId(n), ids, num_tokens, 0, _GREEDY) for n in range(count))

    def _measured(self, name: str, steps: Sequence[Sequence[Share]]) -> Row:
        times = [self._run(steps)]
        end = time.perf_counter() + _SECONDS
        while time.perf_counter() < end or len(times) < 2:
            times.append(self._run(steps))
        moved = sum(self._bytes(step) for step in steps)
        operations = sum(self._operations(step) for step in steps)
        return Row(name, statistics.median(times[1:]), moved, operations)

    def _run(self, steps: Sequence[Sequence[Share]]) -> float:
        """Restart the sequences; return the seconds from the first plan to the last token."""
        self._runner.launch(StepPlan(begun=self._begun)).result()
        plans = [StepPlan(chunks=tuple(map(self._chunk, step))) for step in steps]
        began = time.perf_counter()
        for plan in plans:
            self._runner.launch(plan).result()
        return time.perf_counter() - began

    def _chunk(self, share: Share) -> Chunk:
        number, start, length = share
        draws = (SequenceId(number),) if start + length == self._num_tokens else ()
        first = number * (_ROOM // _BLOCK)
        blocks = array("i", range(first, first + -(-(start + length) // _BLOCK)))
        return Chunk(SequenceId(number), start, length, len(draws), draws, blocks)

    def _bytes(self, step: Sequence[Share]) -> int:
        """Return the bytes of a step: weights are read once, keys and values once."""
        s = self.shape
        positions = sum(start + length for _, start, length in step)
        weights = (s.linear + (s.head if self._rows(step) else 0)) * s.weight_bytes
        return int(weights) + positions * s.kv_bytes

    def _operations(self, step: Sequence[Share]) -> int:
        """Return the operations of a step.

        Count two operations per weight and token, and four operations per query, visible position,
        head and dimension.
        """
        s = self.shape
        tokens = sum(length for _, _, length in step)
        visible = sum(start * n + n * (n + 1) // 2 for _, start, n in step)
        attention = 4 * visible * s.heads * s.dim * s.layers
        return 2 * s.linear * tokens + 2 * s.head * self._rows(step) + attention

    def _rows(self, step: Sequence[Share]) -> int:
        return sum(start + length == self._num_tokens for _, start, length in step)


def _cut(number: int, start: int, length: int) -> list[list[Share]]:
    """Divide a sequence's prompt into steps of at most _MAX_CHUNK tokens."""
    end = start + length
    return [[(number, s, min(_MAX_CHUNK, end - s))] for s in range(start, end, _MAX_CHUNK)]
