"""Owns the capture of a step's kernels, so that other steps run them without the Python between.

A step calls the same kernels with the same addresses every time, hundreds of them, and for a small
model the calls cost as much as the work. `capture` runs a function of many rows once and notes what
it computed with, in memory that stays. `Graph.first_rows` gives the calls that compute the first
rows again, from whatever the inputs then hold.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import finalize

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_OWN_TYPES = (torch.bfloat16, torch.float32)
_ROWS = 1  # the word that holds how many rows are computed

_current = threading.local()

Call = Callable[[], object]
Own = Mapping[Any, Callable[[Tensor, Tensor, Tensor], None]]


class CannotCapture(Exception):
    """The function branched on a number, made several tensors at once, or mixed rows."""


class Arena:
    """Memory for the results of captured calls; it is reused once no tensor needs it.

    Kernels are replayed in the order in which they were captured, so addresses are enough.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, list[Any]] = defaultdict(list)
        self._addresses: set[int] = set()

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        size = shape.numel() * dtype.itemsize
        free = self._free[size]
        memory = free.pop() if free else torch.empty(size, dtype=torch.uint8).numpy()
        lent = memory[:]  # dies with the last tensor over it
        finalize(lent, free.append, memory).atexit = False
        self._addresses.add(memory.ctypes.data)
        return torch.from_numpy(lent).view(dtype).view(shape)

    def owns(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._addresses


class _Operation(NamedTuple):
    """An operation of torch, and where its result goes; None: it writes to an argument."""

    function: Any
    args: tuple[Any, ...]
    options: dict[str, Any]
    into: Tensor | None

    def call(self, cut: Callable[[Any], Any]) -> Call:
        args, options = tree_map(cut, self.args), tree_map(cut, self.options)
        compute = partial(self.function, *args, **options)
        return compute if self.into is None else partial(_compute, compute, cut(self.into))


class _Launch(NamedTuple):
    """A kernel of ours, with the function that runs it."""

    run: Callable[..., None]
    body: object
    arguments: Any

    def call(self, num_rows: int) -> Call:
        arguments = type(self.arguments)(*self.arguments)
        arguments[_ROWS] = num_rows
        return partial(self.run, self.body, arguments)


class Graph:
    """The recorded operations, in order; each of the inputs has the same number of rows."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self.arena = Arena()
        self._num_rows = len(inputs[0])
        self._inputs = {x.untyped_storage().data_ptr() for x in inputs}
        self._steps: list[_Operation | _Launch] = []

    def first_rows(self, num_rows: int) -> list[Call]:
        """The calls that compute that many rows."""

        def cut(value: Any) -> Any:
            return value[:num_rows] if self._has_rows(value) else value

        return [s.call(num_rows) if isinstance(s, _Launch) else s.call(cut) for s in self._steps]

    def launched(self, run: Callable[..., None], body: object, arguments: Any) -> None:
        """Note a kernel; its arguments are copied, since their owner fills them in anew."""
        if arguments[_ROWS] != self._num_rows:
            raise CannotCapture(str(body))
        self._steps.append(_Launch(run, body, type(arguments)(*arguments)))

    def computed(self, function: Any, args: Any, options: Any, into: Tensor | None) -> None:
        """Note an operation of torch."""
        for value in tree_leaves((args, options, into)):
            if self._has_rows(value) and value.shape[:1] != (self._num_rows,):
                raise CannotCapture(str(function))
        self._steps.append(_Operation(function, args, options, into))

    def _has_rows(self, value: Any) -> bool:
        if not isinstance(value, Tensor) or value.is_mkldnn:  # such weights have no address
            return False
        return self.arena.owns(value) or value.untyped_storage().data_ptr() in self._inputs


def note(run: Callable[..., None], body: object, arguments: Any) -> None:
    """Records a kernel, if a graph is captured; call it before each run."""
    if graph := getattr(_current, "graph", None):
        graph.launched(run, body, arguments)


def capture(run: Callable[[], Tensor], inputs: Sequence[Tensor], own: Own) -> tuple[Graph, Tensor]:
    """The graph of `run`, and its result, which lies where each play will put it.

    Each row of the result is made of the same row of the inputs. `own` names kernels that do what
    an operation of torch does to two contiguous tensors of one shape, bfloat16 or float32, and
    write to a third.
    """
    graph = Graph(inputs)
    with _Capturing(graph, own):
        _current.graph = graph
        try:
            result = run()
        finally:
            _current.graph = None
    return graph, result


class _Capturing(TorchDispatchMode):
    """Sees every operation of torch: views need no repetition, all others are noted."""

    def __init__(self, graph: Graph, own: Own) -> None:
        super().__init__()
        self._graph, self._own = graph, own

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled, and to skip it imports torch's compiler: 2 s

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        if func is torch.ops.aten.empty.memory_format:
            return self._graph.arena.empty(torch.Size(args[0]), options["dtype"])
        result = func(*args, **options)
        if func.is_view and _is_part(result, args[0]):
            return result
        if not isinstance(result, Tensor):
            raise CannotCapture(str(func))
        if func._schema.is_mutable:
            self._graph.computed(func, args, options, None)
            return result
        kept = self._graph.arena.empty(result.shape, result.dtype).copy_(result)
        if (own := self._own.get(func)) and not options and _are_alike(args[0], args[1]):
            own(args[0], args[1], kept)
        else:
            self._graph.computed(func, args, options, kept)
        return kept


def _is_part(result: Any, whole: Tensor) -> bool:
    """Whether a result shares memory with `whole`: a change of dtype, say, may view or copy."""
    first = result if isinstance(result, Tensor) else result[0]
    return bool(first.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr())


def _are_alike(x: Any, y: Any) -> bool:
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        return False
    same = x.shape == y.shape and x.dtype == y.dtype and x.dtype in _OWN_TYPES
    return same and x.is_contiguous() and y.is_contiguous()


def _compute(call: Callable[[], Tensor], into: Tensor) -> None:
    into.copy_(call()[: len(into)])
