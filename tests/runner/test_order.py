import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.runner.order import likeliest

FEW_VALUES = st.sampled_from([-np.inf, -1.5, 0.0, 0.25, 3.0])


@given(st.lists(FEW_VALUES, min_size=1, max_size=40), st.integers(1, 50))
def test_order_is_falling_value_then_rising_id(values: list[float], count: int) -> None:
    expected = sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]
    assert likeliest(np.array(values, dtype=np.float32), count).tolist() == expected
