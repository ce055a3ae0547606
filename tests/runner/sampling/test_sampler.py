from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace_common.plan import Drawn
from headrace_common.sampling import Sampling
from headrace_engine.runner.sampling.sampler import draw, sample
from headrace_engine.runner.sampling.state import SequenceState

INF = float("inf")
LOGITS = st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=600)
DICE = st.floats(0, 1, exclude_max=True)


def known(
    prompt: Sequence[int] = (1,), generated: Sequence[int] = (), **sampling: Any
) -> SequenceState:
    tokens = array("i", [*prompt, *generated])
    return SequenceState(tokens, len(prompt), 0, Sampling(**sampling))


def drawn_token(logits: list[float], sequence: SequenceState) -> int:
    (drawn,) = draw(torch.tensor([logits], dtype=torch.float32), [sequence])
    assert drawn.error is None
    return drawn.token_ids[0]


def naive_sample(logits: np.ndarray, s: Sampling, dice: float) -> int:
    """All candidates in order, each filter in turn, no short cuts."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    weights = np.exp((logits - logits.max()) / np.float32(s.temperature)).astype(np.float64)
    order = order[: s.top_k or None]
    if s.top_p < 1:
        total, mass, kept = sum(weights[order]), 0.0, []
        for i in order:
            if kept and mass >= s.top_p * total:
                break
            kept.append(i)
            mass += weights[i]
        order = kept
    order = [i for i in order if weights[i] >= s.min_p * weights[order[0]]]
    mass, total = 0.0, sum(weights[order])
    for i in order:
        mass += weights[i]
        if mass > dice * total:
            return i
    return order[-1]


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    assert drawn_token([0, 5, 5, 1, 5], known(temperature=0)) == 1


def test_a_temperature_below_the_bound_is_greedy() -> None:
    assert drawn_token([0, 5, 5], known(temperature=9e-6)) == 1


def test_bias_is_added_before_all_else() -> None:
    assert drawn_token([3, 2, 1], known(temperature=0, logit_bias={2: 2.5})) == 2


def test_repetition_weakens_tokens_of_prompt_and_answer_of_either_sign() -> None:
    sequence = known([0], [1], temperature=0, repetition_penalty=2.0)
    assert drawn_token([6, 5, 4], sequence) == 2
    assert drawn_token([-3, -3, -5], sequence) == 2


@pytest.mark.parametrize("penalty", [5e-324, 1e-45, 1e-38, 1e-30])
@pytest.mark.parametrize("temperature", [0, 1e-5, 1])
def test_a_penalty_next_to_zero_makes_what_was_seen_certain(
    penalty: float, temperature: float
) -> None:
    sequence = known([0, 1, 2], temperature=temperature, repetition_penalty=penalty)
    assert drawn_token([0, -5, 30, 29], sequence) == 2


def test_frequency_counts_generated_tokens_and_leaves_the_prompt_alone() -> None:
    sequence = known([0, 0, 0], [1, 1], temperature=0, frequency_penalty=1.0)
    assert drawn_token([4, 5.5, 3.6], sequence) == 0
    assert drawn_token([3, 5.5, 3.6], sequence) == 2


def test_presence_counts_a_generated_token_once() -> None:
    sequence = known([0], [1, 1, 1], temperature=0, presence_penalty=1.0)
    assert drawn_token([4, 5.5, 0], sequence) == 1
    assert drawn_token([4.6, 5.5, 0], sequence) == 0


def test_repetition_comes_before_frequency() -> None:
    # (4 / 2) - 1 = 1, not (4 - 1) / 2 = 1.5
    sequence = known([9], [0], temperature=0, repetition_penalty=2.0, frequency_penalty=1.0)
    assert drawn_token([4, 1.2] + [0] * 8, sequence) == 1


@pytest.mark.parametrize(
    "sampling",
    [
        {"repetition_penalty": 2.0},
        {"repetition_penalty": 2.0, "repeat_last_n": 3},
        {"repetition_penalty": 2.0, "samplers": ("penalties", "top_k")},
        {"logit_bias": {9: 100.0, 1: -100.0}},
        {"ignore_eos": True, "end_token_ids": (1, 9)},
    ],
)
def test_a_token_id_without_a_logit_has_no_effect(sampling: dict[str, Any]) -> None:
    assert drawn_token([1, 5, 4, 0], known([1, 9], temperature=0, top_k=1, **sampling)) == 2


def test_end_tokens_are_masked_until_min_tokens_and_stop_tokens_never() -> None:
    ends = {"temperature": 0, "min_tokens": 2, "end_token_ids": (0,), "stop_token_ids": (1,)}
    assert drawn_token([9, 8, 7], known(generated=[2], **ends)) == 1
    assert drawn_token([9, 8, 7], known(generated=[2, 2], **ends)) == 0


def test_a_bias_cannot_bring_a_masked_end_back() -> None:
    sequence = known(temperature=0, ignore_eos=True, end_token_ids=(0,), logit_bias={0: 100.0})
    assert drawn_token([9, 8, 7], sequence) == 1


@given(
    LOGITS,
    DICE,
    st.floats(0.05, 5),
    st.sampled_from([0, 1, 2, 40, 300, 10_000]),
    st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)
def test_a_draw_equals_that_of_the_definition(
    logits: list[float], dice: float, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    row = np.array(logits, dtype=np.float32)
    ours, theirs = sample(row, sampling, dice), naive_sample(row, sampling, dice)
    if ours != theirs:  # sums in another order may differ in the last bit at a border
        assert sample(row, sampling, min(dice + 1e-9, 1 - 1e-9)) == theirs or (
            sample(row, sampling, max(dice - 1e-9, 0)) == theirs
        )


def test_a_long_flat_row_is_searched_to_its_end() -> None:
    row = np.zeros(5000, dtype=np.float32)
    assert sample(row, Sampling(), 0.9999) == 4999
    assert sample(row, Sampling(top_p=0.5), 0.9999) == 2499


def test_frequencies_follow_the_probabilities() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.6, 0.3]])).expand(20_000, -1)
    sequences = [known(generated=[0] * token, seed=5) for token in range(200)]
    counts: Counter[int] = Counter()
    for choice in range(20):
        for sequence in sequences:
            sequence.choice = choice
        counts.update(d.token_ids[0] for d in draw(logits[:200], sequences))
    shares = [counts[i] / 4000 for i in range(3)]
    assert shares == pytest.approx([0.1, 0.6, 0.3], abs=0.03)


def test_neighbours_do_not_move_the_dice() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    sequences = [known(generated=[1] * i, seed=i, top_p=0.9) for i in range(6)]
    together = draw(logits, sequences)
    alone = [draw(logits[i : i + 1], [sequences[i]])[0] for i in range(6)]
    assert together == alone


def test_one_row_that_is_not_a_number_ends_its_own_sequence_only() -> None:
    logits = torch.tensor([[1.0, 2.0], [float("nan"), 1.0], [INF, 1.0], [-INF, 1.0]])
    drawn = draw(logits, [known(temperature=0)] * 4)
    assert [d.token_ids for d in drawn] == [(1,), (), (), (1,)]
    assert [bool(d.error) for d in drawn] == [False, True, True, False]


def test_a_row_that_is_not_a_number_is_an_error_under_a_penalty_too() -> None:
    logits = torch.tensor([[float("nan"), 1.0], [INF, 1.0], [1.0, -INF]])
    drawn = draw(logits, [known([0, 1], temperature=0, repetition_penalty=1e-38)] * 3)
    assert [bool(d.error) for d in drawn] == [True, True, False]


def test_a_row_in_which_everything_is_masked_is_an_error() -> None:
    (drawn,) = draw(torch.full((1, 4), -INF), [known()])
    assert drawn == Drawn(error="The model's output contains NaN or infinity.")


def test_sampling_leaves_torchs_generator_and_the_logits_alone() -> None:
    logits = torch.randn(3, 40)
    state, before = torch.random.get_rng_state(), logits.clone()
    draw(logits, [known(logit_bias={1: 4.0}), known(), known(temperature=0)])
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(logits, before)
