import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace_common.sampling import Logprobs
from headrace_engine.runner.sampling.logprobs import join, likeliest, pack_logprobs

INF = float("inf")
FEW_VALUES = st.sampled_from([-np.inf, -1.5, 0.0, 0.25, 3.0])


def unpack(packed: Logprobs) -> tuple[list[list[int]], np.ndarray]:
    ids = np.frombuffer(packed.ids, np.int32).reshape(-1, packed.width)
    return ids.tolist(), np.frombuffer(packed.values, np.float32).reshape(-1, packed.width)


def test_a_row_is_the_token_then_the_likeliest_falling_with_ties_by_id() -> None:
    ids, values = unpack(pack_logprobs(torch.tensor([[1.0, 3.0, 0.0, 3.0]]), [2], 3))
    assert ids == [[2, 1, 3, 0]]
    expected = torch.log_softmax(torch.tensor([1.0, 3.0, 0.0, 3.0]), 0)[[2, 1, 3, 0]]
    np.testing.assert_allclose(values[0], expected.numpy(), rtol=1e-6)


def test_nothing_is_below_the_floor() -> None:
    _, values = unpack(pack_logprobs(torch.tensor([[0.0, -INF]]), [1], 0))
    assert values.tolist() == [[-9999.0]]


def test_more_likeliest_than_the_vocabulary_has_are_all_of_it() -> None:
    assert pack_logprobs(torch.zeros(2, 5), [0, 0], 20).width == 6


def test_joined_rows_lie_below_each_other() -> None:
    logits = torch.randn(7, 30)
    whole = pack_logprobs(logits, range(7), 4)
    parts = [pack_logprobs(logits[:3], range(3), 4), pack_logprobs(logits[3:], range(3, 7), 4)]
    assert join(parts) == whole


@given(st.lists(FEW_VALUES, min_size=1, max_size=40), st.integers(1, 50))
def test_order_is_falling_value_then_rising_id(values: list[float], count: int) -> None:
    expected = sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]
    assert likeliest(np.array(values, dtype=np.float32), count).tolist() == expected
