import pytest
import torch
from torch import Tensor

from headrace.runner.kernels.pointwise import add, gated, norm
from headrace.runner.kernels.tape import Arena, CannotRecord, record

OWN = {torch.ops.aten.add.Tensor: add}


def work(x: Tensor) -> Tensor:
    """Kernels of ours, views, and operations of torch, one of them in place."""
    left, right = norm(x, torch.ones(x.shape[1]), 1e-6).split(x.shape[1] // 2, dim=1)
    y = gated(torch.cat((left + right, right.sin()), dim=1))
    return ((y * 2).mul_(3) + y).to(torch.float64).t().contiguous()


def test_playing_a_tape_computes_anew_from_what_its_inputs_hold() -> None:
    x = torch.randn(3, 64)
    tape, result = record(lambda: work(x), Arena(), OWN)
    assert torch.equal(result, work(x))
    x.copy_(torch.randn(3, 64))
    assert not torch.equal(result, work(x))
    tape.play()
    assert torch.equal(result, work(x))


def test_recordings_share_memory_and_do_not_spoil_each_other() -> None:
    arena, first, second = Arena(), torch.randn(4, 64), torch.randn(2, 64)
    tape, result = record(lambda: work(first), arena, OWN)
    size = arena.num_bytes
    record(lambda: work(second), arena, OWN)
    assert arena.num_bytes == size
    tape.play()
    assert torch.equal(result, work(first))


def test_a_function_that_looks_at_a_number_cannot_be_recorded() -> None:
    x = torch.randn(3, 64)
    with pytest.raises(CannotRecord):
        record(lambda: x if x.sum().item() > 0 else -x, Arena(), OWN)


def test_after_a_failed_recording_kernels_run_as_ever() -> None:
    x = torch.randn(3, 64)
    with pytest.raises(CannotRecord):
        record(lambda: x[x.argmax().item() :], Arena(), OWN)
    tape, result = record(lambda: work(x), Arena(), OWN)
    tape.play()
    assert torch.equal(result, work(x))
