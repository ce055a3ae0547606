"""Owns the recording of a step's kernels, so that a like step runs them without the Python between.

A decode step of one size calls the same kernels with the same addresses every time, hundreds of
them, and for a small model the calls cost as much as the work. `record` runs a function once and
notes what it computed with, in memory that stays; `Tape.play` computes it again from whatever
then lies in the inputs.
"""

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ALIGNMENT = 64  # a cache line
_CHUNK_BYTES = 1 << 22
_OWN_TYPES = (torch.bfloat16, torch.float32)

_current = threading.local()

Call = Callable[[], object]
Own = Mapping[Any, Callable[[Tensor, Tensor, Tensor], None]]


class CannotRecord(Exception):
    """The function looked at a number, or made several tensors at once."""


class Arena:
    """Memory for the results of recorded calls, handed out in order, anew to every recording.

    Recordings share it: while one is played, nothing of the others is needed.
    """

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []
        self._at = (0, 0)  # chunk, byte

    def rewind(self) -> None:
        self._at = (0, 0)

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        size = shape.numel() * dtype.itemsize
        number, first = self._at
        while number < len(self._chunks) and first + size > len(self._chunks[number]):
            number, first = number + 1, 0
        if number == len(self._chunks):
            self._chunks.append(torch.empty(max(size, _CHUNK_BYTES), dtype=torch.uint8))
        self._at = number, first + -(-size // _ALIGNMENT) * _ALIGNMENT
        return self._chunks[number][first : first + size].view(dtype).view(shape)

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self._chunks))


class Tape:
    """What was computed, in order."""

    def __init__(self) -> None:
        self._calls: list[Call] = []

    def add(self, call: Call) -> None:
        self._calls.append(call)

    def rewrite(self, by: Callable[[list[Call]], list[Call]]) -> None:
        """Replace the calls by others that do the same."""
        self._calls = by(self._calls)

    def play(self) -> None:
        for call in self._calls:
            call()


def note(run: Callable[..., None], body: object, frame: Any) -> None:
    """Called by whoever runs a kernel; the frame is copied, since its owner fills it in anew."""
    if tape := getattr(_current, "tape", None):
        tape.add(partial(run, body, type(frame)(*frame)))


def record(run: Callable[[], Tensor], arena: Arena, own: Own) -> tuple[Tape, Tensor]:
    """The tape of `run`, and its result, which lies where each play will put it.

    `own` names kernels that do what an operation of torch does to two contiguous tensors of one
    shape, bfloat16 or float32, and write to a third.
    """
    tape = Tape()
    arena.rewind()
    with _Recorder(tape, arena, own):
        _current.tape = tape
        try:
            result = run()
        finally:
            _current.tape = None
    return tape, result


class _Recorder(TorchDispatchMode):
    """Sees every operation of torch: views need no repetition, all others are noted."""

    def __init__(self, tape: Tape, arena: Arena, own: Own) -> None:
        super().__init__()
        self._tape, self._arena, self._own = tape, arena, own

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled, and to skip it imports torch's compiler: 2 s

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        if func is torch.ops.aten.empty.memory_format:
            return self._arena.empty(torch.Size(args[0]), options["dtype"])
        result = func(*args, **options)
        if func.is_view and _is_part(result, args[0]):
            return result
        if not isinstance(result, Tensor):
            raise CannotRecord(str(func))
        call = partial(func, *args, **options)
        if func._schema.is_mutable:
            self._tape.add(call)
            return result
        kept = self._arena.empty(result.shape, result.dtype).copy_(result)
        if (own := self._own.get(func)) and not options and _are_alike(args[0], args[1]):
            own(args[0], args[1], kept)
        else:
            self._tape.add(partial(_compute, call, kept))
        return kept


def _is_part(result: Any, whole: Tensor) -> bool:
    """Whether it lies in the same memory: what may be a view, as a change of dtype, may copy."""
    first = result if isinstance(result, Tensor) else result[0]
    return bool(first.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr())


def _are_alike(x: Any, y: Any) -> bool:
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        return False
    same = x.shape == y.shape and x.dtype == y.dtype and x.dtype in _OWN_TYPES
    return same and x.is_contiguous() and y.is_contiguous()


def _compute(call: Callable[[], Tensor], into: Tensor) -> None:
    into.copy_(call())
