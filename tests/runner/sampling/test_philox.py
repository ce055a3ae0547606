from hypothesis import given
from hypothesis import strategies as st

from headrace_engine.runner.sampling.philox import philox, uniform

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)


def test_the_published_vectors_come_out() -> None:
    ones = 0xFFFFFFFF
    assert philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox((ones,) * 4, (ones, ones)) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox(pi, (0xA4093822, 0x299F31D0)) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


def test_the_number_of_a_seed_token_and_choice_never_changes() -> None:
    # 0xe169c58d6627e8d5 >> 11, over 2 ** 53: the first vector above.
    assert uniform(0, 0, 0) == (0xE169C58D6627E8D5 >> 11) / 2**53


@given(INT64, st.integers(0, 1 << 40), st.integers(0, 1 << 20))
def test_numbers_lie_from_zero_to_below_one(seed: int, token: int, choice: int) -> None:
    assert 0 <= uniform(seed, token, choice) < 1


@given(INT64, INT64)
def test_seeds_of_either_sign_are_told_apart(one: int, other: int) -> None:
    assert (uniform(one, 3, 1) == uniform(other, 3, 1)) == (one == other)


def test_token_and_choice_are_told_apart() -> None:
    numbers = {uniform(7, token, choice) for token in range(50) for choice in range(50)}
    assert len(numbers) == 2500


def test_numbers_are_spread_evenly() -> None:
    numbers = [uniform(1, token, 0) for token in range(10_000)]
    tenths = [sum(int(number * 10) == tenth for number in numbers) for tenth in range(10)]
    assert min(tenths) > 900 and max(tenths) < 1100
