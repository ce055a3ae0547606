"""Samplers in a chosen order, against their definitions."""

import math
from array import array
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.protocols.fields import samplers
from headrace.protocols.fields.common import COMMON
from headrace_common.plan import Drawn
from headrace_common.sampling import LLAMA_CPP_ORDER, PLAIN_ORDER, SETTINGS, Sampling
from headrace_engine.runner.sampling import chain
from headrace_engine.runner.sampling.chain import candidates
from headrace_engine.runner.sampling.sampler import draw, draw_guessed
from headrace_engine.runner.sampling.state import SequenceState

ROWS = st.integers(0, 1 << 32).map(
    lambda seed: np.random.default_rng(seed).normal(0, 3, 60).astype(np.float32)
)


def test_each_sampler_has_its_step_its_settings_and_their_ranges() -> None:
    steps = chain.SAMPLERS.keys() - {"mirostat"}  # which no order may name
    assert steps == SETTINGS.keys() == {*PLAIN_ORDER, *LLAMA_CPP_ORDER}
    assert chain.LEARNERS.keys() <= chain.SAMPLERS.keys()
    settings_of_all = {name for names in SETTINGS.values() for name in names} - {"dry_breakers"}
    assert settings_of_all <= COMMON.keys()
    fields = {field.name for field in msgspec.structs.fields(Sampling)}
    assert samplers.SETTINGS.keys() <= fields and settings_of_all <= fields


def known(tokens: tuple[int, ...] = (1, 2, 3), choice: int = 0, **sampling: Any) -> SequenceState:
    return SequenceState(array("i", tokens), len(tokens), choice, Sampling(**sampling))


def left(row: np.ndarray, name: str, **sampling: Any) -> dict[int, float]:
    """The probabilities of the tokens that one sampler leaves."""
    found = candidates(row, known(samplers=(name,), **sampling))
    return dict(zip(found.ids.tolist(), found.probabilities().tolist(), strict=True))


def softmax(row: np.ndarray) -> np.ndarray:
    weights = np.exp(row.astype(np.float64) - row.max())
    return weights / weights.sum()


@given(ROWS, st.floats(0.05, 0.95))
def test_typical_keeps_the_smallest_set_of_usual_surprise(row: np.ndarray, share: float) -> None:
    p = softmax(row)
    entropy = -sum(each * math.log(each) for each in p)
    nearest = sorted(range(len(p)), key=lambda token: abs(-math.log(p[token]) - entropy))
    count = next(n for n in range(1, 61) if n == 60 or sum(p[nearest[:n]]) > share)
    assert left(row, "typ_p", typical_p=share).keys() == set(nearest[:count])


@given(ROWS, st.floats(0.1, 4))
def test_top_n_sigma_keeps_logits_near_the_largest(row: np.ndarray, n: float) -> None:
    values = row.astype(np.float64)
    kept = {token for token in range(60) if values[token] >= values.max() - n * values.std()}
    assert left(row, "top_n_sigma", top_n_sigma=n).keys() == kept


@given(ROWS, st.floats(0.01, 0.5))
def test_xtc_leaves_the_least_likely_of_the_top_choices(row: np.ndarray, threshold: float) -> None:
    p = softmax(row)
    above = sorted((token for token in range(60) if p[token] >= threshold), key=lambda t: p[t])
    kept = set(range(60)) - set(above[1:])
    assert left(row, "xtc", xtc_probability=1.0, xtc_threshold=threshold).keys() == kept
    assert len(left(row, "xtc", xtc_probability=1.0, xtc_threshold=0.51)) == 60


def test_xtc_acts_as_often_as_its_probability_says_and_always_for_the_same_tokens() -> None:
    row = np.array([2, 2, 0], np.float32)
    asked = {"samplers": ("xtc",), "xtc_probability": 0.3, "xtc_threshold": 0.2, "seed": 5}

    def acts(number: int) -> bool:
        sequence = known(**asked)
        sequence.token_ids.extend([0] * number)
        return len(candidates(row, sequence).ids) < 3

    first = [acts(number) for number in range(2000)]
    assert 0.26 < sum(first) / 2000 < 0.34
    assert first == [acts(number) for number in range(2000)]


@given(ROWS, st.floats(0.2, 2), st.floats(0.1, 3), st.floats(0, 3))
def test_the_dynamic_temperature_follows_the_entropy(
    row: np.ndarray, temperature: float, spread: float, exponent: float
) -> None:
    p = softmax(row)
    entropy = -sum(each * math.log(each) for each in p) / math.log(60)
    low, high = max(0.0, temperature - spread), temperature + spread
    dynamic = low + (high - low) * entropy**exponent
    asked = {"temperature": temperature, "dynatemp_range": spread, "dynatemp_exponent": exponent}
    found = left(row, "temperature", **asked)
    wanted = softmax(row.astype(np.float64) / dynamic)
    assert list(found.values()) == pytest.approx(wanted.tolist(), abs=1e-9)


@pytest.mark.parametrize(
    ("name", "asked"),
    [("top_p", {"top_p": 0.0}), ("min_p", {"min_p": 1.0}), ("typ_p", {"typical_p": 0.0})],
)
def test_min_keep_candidates_stay(name: str, asked: dict[str, float]) -> None:
    row = np.arange(10, dtype=np.float32)
    assert len(left(row, name, **asked)) == 1
    assert len(left(row, name, **asked, min_keep=4)) == 4
    xtc = {"xtc_probability": 1.0, "xtc_threshold": 0.0}
    assert len(left(row, "xtc", **xtc)) == 1
    assert len(left(row, "xtc", **xtc, min_keep=2)) == 10


def test_the_window_bounds_what_is_penalized() -> None:
    row = np.ones(6, np.float32)
    for window, lower in ((-1, {1, 2, 3}), (0, set()), (2, {2, 3}), (9, {1, 2, 3})):
        asked = {"repetition_penalty": 2.0, "repeat_last_n": window, "temperature": 0.0}
        found = candidates(row, known(samplers=("penalties",), **asked))
        assert {int(i) for i, x in zip(found.ids, found.logits, strict=True) if x < 1} == lower
        sequence = known(**asked)
        first = draw(torch.from_numpy(row[None].copy()), [sequence])[0].token_ids
        assert first == (min(set(range(6)) - lower),)


SETS = st.fixed_dictionaries(
    {
        "samplers": st.lists(st.sampled_from(list(SETTINGS)), max_size=12).map(tuple),
        "temperature": st.floats(0, 100),
        "top_k": st.integers(0, 70),
        "top_p": st.floats(0, 1),
        "min_p": st.floats(0, 1),
        "typical_p": st.floats(-1, 2),
        "top_n_sigma": st.floats(-2, 1e30),
        "xtc_probability": st.floats(-1, 2),
        "xtc_threshold": st.floats(-1, 1),
        "dynatemp_range": st.floats(-1, 1e30),
        "dynatemp_exponent": st.floats(-1e30, 1e30),
        "repetition_penalty": st.floats(1e-38, 10),
        "frequency_penalty": st.floats(-2, 2),
        "repeat_last_n": st.integers(-1, 5),
        "min_keep": st.integers(-1, 70),
        "seed": st.integers(0, 1 << 62),
    }
)
EXTREME = st.lists(
    st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20
).map(lambda values: np.array(values, np.float32))


@settings(max_examples=300)
@given(ROWS | EXTREME, SETS)
def test_any_order_leaves_a_distribution_and_the_seed_decides(
    row: np.ndarray, asked: dict[str, Any]
) -> None:
    found = candidates(row, known(**asked))
    assert 1 <= len(found.ids) == len(set(found.ids.tolist())) <= len(row)
    p = found.probabilities()
    assert np.isfinite(p).all() and p.sum() == pytest.approx(1)
    token = chain.draw_in_order(row, known(**asked), 0.7)
    assert token in found.ids and token == chain.draw_in_order(row, known(**asked), 0.7)


@given(ROWS, st.floats(0.1, 3), st.integers(0, 70), st.floats(0, 1), st.floats(0, 1), st.integers())
def test_the_plain_order_draws_the_same_either_way(
    row: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    asked = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    asked |= {"seed": seed, "repetition_penalty": 1.3, "presence_penalty": 0.5}
    logits = torch.from_numpy(row[None].copy())
    (plain,) = draw(logits, [known(**asked)])
    assert draw(logits, [known(**asked, samplers=PLAIN_ORDER)]) == [plain]


@settings(deadline=None)
@given(st.integers(0, 1 << 32), st.integers(0, 1 << 60))
def test_guessed_ahead_tokens_are_those_drawn_one_by_one(rows: int, seed: int) -> None:
    logits = torch.from_numpy(np.random.default_rng(rows).normal(0, 2, (6, 40)).astype(np.float32))
    asked = {"xtc_probability": 0.5, "xtc_threshold": 0.05, "typical_p": 0.9, "temperature": 1.3}
    asked |= {"seed": seed, "samplers": LLAMA_CPP_ORDER, "num_logprobs": 2, "repeat_last_n": 3}
    asked["repetition_penalty"] = 1.5
    one_by_one = known(**asked)
    for row in range(6):
        (each,) = draw(logits[row : row + 1], [one_by_one])
        one_by_one.token_ids.extend(each.token_ids)
    answer = tuple(one_by_one.token_ids[3:])
    guessing = known(**asked)
    (first,) = draw(logits[:1], [guessing])
    guessing.token_ids.extend(first.token_ids)
    ahead: Drawn = draw_guessed(logits, guessing, first, answer[:5])
    assert ahead.token_ids == answer


def test_a_temperature_of_zero_takes_the_likeliest_token_that_is_left() -> None:
    row = torch.tensor([[3.0, 2.9, 0.0]])
    asked = {"temperature": 0.0, "xtc_probability": 1.0, "xtc_threshold": 0.1}
    assert draw(row, [known(**asked, samplers=LLAMA_CPP_ORDER)])[0].token_ids == (1,)
    assert draw(row, [known(temperature=0.0, samplers=LLAMA_CPP_ORDER)])[0].token_ids == (0,)
