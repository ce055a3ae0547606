import pytest
import torch

from headrace_kernels.attention import CpuAttention
from headrace_kernels.instruction_sets import InstructionSet
from tests.kernels.attention_case import Case, make_case, places, plain, reference
from tests.kernels.own_kernels import OWN_SETS

DECODES = [(0, 1), (5, 1), (8, 1), (100, 1)]
MIXED = [(30, 1), (0, 72), (17, 102), (63, 1), (16, 3)]


def largest_error(case: Case, instructions: InstructionSet | None = None) -> float:
    sinks = () if case.sinks is None else [case.sinks]
    keys, values = plain(case)
    attention = CpuAttention(case.memory, (case.window,), sinks, instructions)
    found = attention.step(case.step).attend(0, case.q, case.k, case.v, case.cap)
    expected = reference(case, keys, values)
    for mine, theirs in zip(plain(case), (keys, values), strict=True):
        for block, offset in places(case):
            assert torch.equal(mine[block, :, offset], theirs[block, :, offset])
    return float((found.double() - expected).abs().max())


@pytest.mark.parametrize("dim", [16, 64, 128])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (7, 1)])
def test_decode_over_scattered_blocks_equals_the_definition(
    heads: tuple[int, int], dim: int
) -> None:
    assert largest_error(make_case(DECODES, heads, dim)) < 1e-5


@pytest.mark.parametrize("size", [2, 16, 48])
def test_a_window_may_span_blocks_of_any_size(size: int) -> None:
    chunks = [(600, 1), (255, 1), (256, 1), (240, 64), (600, 5), (5, 65)]
    case = make_case(chunks, dim=32, window=300, size=size)
    assert largest_error(case) < 1e-5


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
def test_prompt_and_decode_chunks_of_one_step_equal_the_definition(heads: tuple[int, int]) -> None:
    assert largest_error(make_case(MIXED, heads)) < 1e-5


@pytest.mark.parametrize("window", [1, 7, 8, 33])
def test_a_sliding_window_hides_earlier_positions(window: int) -> None:
    assert largest_error(make_case(MIXED, window=window)) < 1e-5


@pytest.mark.parametrize("window", [None, 9])
def test_sinks_take_a_share_of_the_attention_weights(window: int | None) -> None:
    case = make_case(MIXED, window=window)
    case.sinks = torch.tensor([3.0, -2.0, 0.5, 9.0])
    assert largest_error(case) < 1e-5


@pytest.mark.parametrize("instructions", OWN_SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cap", [0.5, 50.0])
def test_a_soft_cap_limits_scores(
    cap: float, dtype: torch.dtype, instructions: InstructionSet
) -> None:
    case = make_case(MIXED, dim=32, window=20, dtype=dtype, size=32)
    case.q.mul_(20)
    case.cap, case.sinks = cap, torch.tensor([0.3, -0.2, 0.5, 0.1])
    tolerance = 2e-5 if dtype == torch.float32 else 0.06
    assert largest_error(case, instructions if dtype == torch.bfloat16 else None) < tolerance


def test_nan_only_affects_its_own_sequence(
    capfd: pytest.CaptureFixture[str],
) -> None:
    case = make_case([(5, 1), (8, 1), (100, 1)])
    case.q[0] = float("nan")
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # a single thread computes all of them
    try:
        found = CpuAttention(case.memory, (None,)).step(case.step).attend(0, case.q, case.k, case.v)
    finally:
        torch.set_num_threads(before)
    assert found[0].isnan().all()
    assert torch.allclose(found[1:].double(), reference(case, *plain(case))[1:], atol=1e-5)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("instructions", OWN_SETS)
@pytest.mark.parametrize("size", [16, 32, 48])
@pytest.mark.parametrize("window", [None, 20, 300])
@pytest.mark.parametrize("heads", [(4, 2), (8, 1), (7, 7)])
def test_many_queries_read_the_past_in_tiles(
    heads: tuple[int, int], window: int | None, size: int, instructions: InstructionSet
) -> None:
    chunks = [(0, 33), (600, 5), (40, 1), (255, 17), (256, 150), (17, 41)]
    case = make_case(chunks, heads, 64, window, torch.bfloat16, size)
    case.sinks = torch.linspace(-2, 3, heads[0])
    assert largest_error(case, instructions) < 0.02


@pytest.mark.parametrize("instructions", OWN_SETS)
@pytest.mark.parametrize("dim", [24, 64])
def test_bfloat16_stays_close_to_the_definition(dim: int, instructions: InstructionSet) -> None:
    assert (
        largest_error(make_case(MIXED, dim=dim, dtype=torch.bfloat16, size=32), instructions) < 0.03
    )


@pytest.mark.parametrize("instructions", OWN_SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [3, 8, 16, 32])
def test_unwritten_positions_of_a_block_have_no_influence(
    size: int, dtype: torch.dtype, instructions: InstructionSet
) -> None:
    case = make_case([(0, 1), (0, 5), (0, 33), (0, 6)], dim=32, dtype=dtype, size=size)
    for tensor in (case.memory.keys[0], case.memory.values[0]):
        tensor.fill_(float("nan"))
    assert largest_error(case, instructions) < 0.03


@pytest.mark.parametrize("chunks", [DECODES, MIXED])
def test_very_different_scores_neither_overflow_nor_vanish(chunks: list[tuple[int, int]]) -> None:
    case = make_case(chunks)
    case.q.mul_(300)
    assert largest_error(case) < 1e-3
