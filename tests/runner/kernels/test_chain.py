from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from headrace.runner.kernels import pool
from headrace.runner.kernels.chain import chained
from headrace.runner.kernels.pointwise import add, norm
from headrace.runner.kernels.pool import Kernel, frame_of, spread
from headrace.runner.kernels.tape import Call, Tape, record

OWN = {torch.ops.aten.add.Tensor: add}
WEIGHT = torch.ones(64).bfloat16()  # a tape holds no weights: what it reads must stay


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def recorded(x: Tensor, num_layers: int) -> tuple[Tape, Tensor]:
    """Kernels of which each reads all that the one before it wrote; a sine, torch's, between."""

    def run() -> Tensor:
        y = x
        for layer in range(num_layers):
            y = norm(y + x, WEIGHT, 1e-6)
            y = y.sin() if layer == num_layers // 2 else y
        return y

    return record(run, (x,), OWN)


def play(calls: list[Call]) -> None:
    for call in calls:
        call()


def test_a_chain_computes_what_single_calls_do() -> None:
    x = torch.randn(300, 64).bfloat16()
    tape, result = recorded(x, 12)
    for _ in range(20):
        x.copy_(torch.randn(300, 64))
        play(tape.first(300))
        expected = result.clone()
        result.zero_()
        calls = chained(tape.first(300))
        play(calls)
        assert torch.equal(result, expected)
        result.zero_()
        play(calls)  # the counters were set back
        assert torch.equal(result, expected)


def test_kernels_in_a_row_become_one_call_and_others_stay() -> None:
    if pool.barrier_address() is None:
        pytest.skip("threads cannot meet here")
    tape, _ = recorded(torch.randn(3, 64).bfloat16(), 12)
    assert len(tape.first(3)) == 25
    assert len(chained(tape.first(3))) == 3


def test_where_threads_cannot_meet_calls_stay_single(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_openmp_fork", lambda: None)
    calls = [partial(spread, Kernel(lambda a: None), frame_of())] * 3
    assert chained(calls) == calls
