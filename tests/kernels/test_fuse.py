from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from headrace_kernels import launch
from headrace_kernels.arguments import arguments_of
from headrace_kernels.capture import Call, Graph, capture
from headrace_kernels.fuse import fuse
from headrace_kernels.launch import Kernel, parallel
from headrace_kernels.pointwise import add, norm

OWN = {torch.ops.aten.add.Tensor: add}
WEIGHT = torch.ones(64).bfloat16()  # a graph does not own its weights, so they must stay alive


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def captured(x: Tensor, num_layers: int) -> tuple[Graph, Tensor]:
    """Capture layers in which each kernel reads what the previous one wrote. One calls torch."""

    def run() -> Tensor:
        y = x
        for layer in range(num_layers):
            y = norm(y + x, WEIGHT, 1e-6)
            y = y.sin() if layer == num_layers // 2 else y
        return y

    return capture(run, (x,), OWN)


def play(calls: list[Call]) -> None:
    for call in calls:
        call()


def test_fused_kernels_compute_what_single_calls_do() -> None:
    x = torch.randn(300, 64).bfloat16()
    graph, result = captured(x, 12)
    for _ in range(20):
        x.copy_(torch.randn(300, 64))
        play(graph.first_rows(300))
        expected = result.clone()
        result.zero_()
        calls = fuse(graph.first_rows(300))
        play(calls)
        assert torch.equal(result, expected)
        result.zero_()
        play(calls)  # needs counters that were reset
        assert torch.equal(result, expected)


def test_only_consecutive_kernels_become_one_call() -> None:
    if launch.barrier_address() is None:
        pytest.skip("threads cannot meet here")
    graph, _ = captured(torch.randn(3, 64).bfloat16(), 12)
    assert len(graph.first_rows(3)) == 25
    assert len(fuse(graph.first_rows(3))) == 3


def test_calls_are_not_fused_if_threads_cannot_synchronize(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_openmp_fork", lambda: None)
    calls = [partial(parallel, Kernel(lambda a: None), arguments_of())] * 3
    assert fuse(calls) == calls
