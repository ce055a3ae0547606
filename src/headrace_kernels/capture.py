"""Captures the kernel calls of a step, so that later steps repeat the calls without Python code.

Every step calls the same several hundred kernels with the same addresses. For a small model these
calls take as long as the computation. `capture` runs a function once with many rows and records
the calls. The memory of all results is kept. `Graph.first_rows` returns calls that compute only
the first rows. A returned call uses the values that the inputs have when it runs.
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
_ROWS = 1  # index of the word with the number of rows

_current = threading.local()

Call = Callable[[], object]
Own = Mapping[Any, Callable[[Tensor, Tensor, Tensor], None]]


class CannotCapture(Exception):
    """Raised when a function cannot be captured.

    For example, the function reads a number to branch on it, calls an operation that returns
    several tensors, or mixes rows.
    """


class Arena:
    """Memory for the results of captured calls. Memory is reused once no tensor refers to it.

    Kernels are replayed in the order of capture. So a call needs only the addresses of its tensors,
    and the tensors themselves need not be kept.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, list[Any]] = defaultdict(list)
        self._addresses: set[int] = set()

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        size = shape.numel() * dtype.itemsize
        free = self._free[size]
        memory = free.pop() if free else torch.empty(size, dtype=torch.uint8).numpy()
        # The view is freed with the last tensor that uses it.
        lent = memory[:]
        finalize(lent, free.append, memory).atexit = False
        self._addresses.add(memory.ctypes.data)
        return torch.from_numpy(lent).view(dtype).view(shape)

    def owns(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._addresses


class _Operation(NamedTuple):
    """A torch operation, and the tensor that receives the result.

    The tensor is None if the operation writes to an argument.
    """

    function: Any
    args: tuple[Any, ...]
    options: dict[str, Any]
    into: Tensor | None

    def call(self, cut: Callable[[Any], Any]) -> Call:
        args, options = tree_map(cut, self.args), tree_map(cut, self.options)
        compute = partial(self.function, *args, **options)
        return compute if self.into is None else partial(_compute, compute, cut(self.into))


class _Launch(NamedTuple):
    """A kernel of this package, with the function that runs it."""

    run: Callable[..., None]
    body: object
    arguments: Any

    def call(self, num_rows: int) -> Call:
        arguments = type(self.arguments)(*self.arguments)
        arguments[_ROWS] = num_rows
        return partial(self.run, self.body, arguments)


class Graph:
    """The recorded calls in order. All inputs have the same number of rows."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self.arena = Arena()
        self._num_rows = len(inputs[0])
        self._inputs = {x.untyped_storage().data_ptr() for x in inputs}
        self._steps: list[_Operation | _Launch] = []

    def first_rows(self, num_rows: int) -> list[Call]:
        """Return the calls that compute only the first `num_rows` rows."""

        def cut(value: Any) -> Any:
            return value[:num_rows] if self._has_rows(value) else value

        return [s.call(num_rows) if isinstance(s, _Launch) else s.call(cut) for s in self._steps]

    def launched(self, run: Callable[..., None], body: object, arguments: Any) -> None:
        """Record a kernel call with a copy of the arguments, which the caller reuses.

        Raises CannotCapture if the kernel does not work on all rows.
        """
        if arguments[_ROWS] != self._num_rows:
            raise CannotCapture(str(body))
        self._steps.append(_Launch(run, body, type(arguments)(*arguments)))

    def computed(self, function: Any, args: Any, options: Any, into: Tensor | None) -> None:
        """Record a torch operation.

        Raises CannotCapture if a tensor of the graph does not have all rows in its first dimension.
        """
        for value in tree_leaves((args, options, into)):
            if self._has_rows(value) and value.shape[:1] != (self._num_rows,):
                raise CannotCapture(str(function))
        self._steps.append(_Operation(function, args, options, into))

    def _has_rows(self, value: Any) -> bool:
        # MKL-DNN weights have no address.
        if not isinstance(value, Tensor) or value.is_mkldnn:
            return False
        return self.arena.owns(value) or value.untyped_storage().data_ptr() in self._inputs


def note(run: Callable[..., None], body: object, arguments: Any) -> None:
    """Record a kernel call if this thread is capturing a graph. Each launch calls this first."""
    if graph := getattr(_current, "graph", None):
        graph.launched(run, body, arguments)


def capture(run: Callable[[], Tensor], inputs: Sequence[Tensor], own: Own) -> tuple[Graph, Tensor]:
    """Run `run` once; return the graph, and the tensor into which replays write the result.

    Each row of the result must depend only on the same row of the inputs. `own` maps a torch
    operation on two tensors to a function that uses a kernel and writes to a third tensor. The
    function replaces the operation if both tensors are contiguous and have the same shape and
    dtype, which must be bfloat16 or float32.
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
    """Records every torch operation that runs, except views, which replays do not repeat."""

    def __init__(self, graph: Graph, own: Own) -> None:
        super().__init__()
        self._graph, self._own = graph, own

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Torch compiles nothing here. If this method returned True, torch would import its
        # compiler, which takes 2 s.
        return False

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
    """Return whether a result shares memory with `whole`.

    An operation such as a change of dtype may return a view or a copy.
    """
    first = result if isinstance(result, Tensor) else result[0]
    return bool(first.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr())


def _are_alike(x: Any, y: Any) -> bool:
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        return False
    same = x.shape == y.shape and x.dtype == y.dtype and x.dtype in _OWN_TYPES
    return same and x.is_contiguous() and y.is_contiguous()


def _compute(call: Callable[[], Tensor], into: Tensor) -> None:
    into.copy_(call()[: len(into)])
