from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headrace_kernels.capture import Arena, CannotCapture, Graph, capture
from headrace_kernels.pointwise import add, gated, norm

OWN = {torch.ops.aten.add.Tensor: add}
WEIGHT = torch.linspace(0.5, 2, 64)


def work(x: Tensor) -> Tensor:
    """Use our kernels, views and torch operations, one of them in place."""
    left, right = norm(x, WEIGHT, 1e-6).split(x.shape[1] // 2, dim=1)
    y = gated(torch.cat((left + right, right.sin()), dim=1))
    return ((y * 2).mul_(3) + y).to(torch.float64)


def play(graph: Graph, num_rows: int) -> None:
    for call in graph.first_rows(num_rows):
        call()


def test_replaying_a_graph_uses_the_current_inputs() -> None:
    x = torch.randn(3, 64)
    graph, result = capture(lambda: work(x), (x,), OWN)
    play(graph, 3)
    assert torch.equal(result, work(x))
    x.copy_(torch.randn(3, 64))
    assert not torch.equal(result, work(x))
    play(graph, 3)
    assert torch.equal(result, work(x))


def test_a_graph_can_replay_only_the_first_rows() -> None:
    x = torch.randn(64, 64)
    graph, result = capture(lambda: work(x), (x,), OWN)
    for num_rows in (1, 7, 64, 2):
        x.copy_(torch.randn(64, 64))
        before = result[num_rows:].clone()
        play(graph, num_rows)
        assert torch.equal(result[:num_rows], work(x[:num_rows]))
        assert torch.equal(result[num_rows:], before)


def test_memory_is_reused_when_no_tensor_needs_it() -> None:
    arena, shape = Arena(), torch.Size((4, 16))
    first = arena.empty(shape, torch.float32)
    address, view = first.data_ptr(), first[1:]
    assert arena.empty(shape, torch.float32).data_ptr() != address
    del first
    assert arena.empty(shape, torch.float32).data_ptr() != address
    del view
    assert arena.empty(shape, torch.bfloat16).data_ptr() != address
    assert arena.empty(shape, torch.float32).data_ptr() == address


def test_a_function_that_reads_a_value_cannot_be_captured() -> None:
    x = torch.randn(3, 64)
    with pytest.raises(CannotCapture):
        capture(lambda: x if x.sum().item() > 0 else -x, (x,), OWN)


@pytest.mark.parametrize("mix", [lambda x: x.t().sin(), lambda x: gated(x[1:]), lambda x: x.sum(0)])
def test_a_function_that_mixes_rows_cannot_be_captured(mix: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(3, 64)
    with pytest.raises(CannotCapture):
        capture(lambda: mix(x), (x,), OWN)


def test_kernels_run_normally_after_a_failed_capture() -> None:
    x = torch.randn(3, 64)
    with pytest.raises(CannotCapture):
        capture(lambda: x[x.argmax().item() :], (x,), OWN)
    graph, result = capture(lambda: work(x), (x,), OWN)
    play(graph, 3)
    assert torch.equal(result, work(x))
