"""Mirostat against a plain reading of its two versions, token by token."""

import math
from array import array
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_common.ids import SequenceId
from headrace_common.plan import Begin
from headrace_common.sampling import Sampling
from headrace_engine.runner.sampling.philox import uniform
from headrace_engine.runner.sampling.sampler import draw, draw_guessed
from headrace_engine.runner.sampling.state import SequenceState
from tests.runner.sampling.test_chain import EXTREME, known

SEED, NUM_TOKENS = 11, 12
ORDER = ("temperature", "mirostat")
TARGETS = st.floats(0.5, 9), st.floats(0.01, 1)


def rows_of(seed: int, spread: float = 2.5) -> np.ndarray:
    values = np.random.default_rng(seed).normal(0, spread, (NUM_TOKENS, 300))
    return values.astype(np.float32)


def naive(
    rows: np.ndarray, version: int, tau: float, eta: float, temperature: float
) -> tuple[list[int], float]:
    """The tokens that the rows give, and mu after the last one."""
    mu, drawn = 2 * tau, []
    for number, row in enumerate(rows):
        logits = row.astype(np.float64) / temperature
        order = sorted(range(len(row)), key=lambda token: (-logits[token], token))
        weights = np.exp(logits[order] - logits.max())
        p = weights / weights.sum()
        if version == 2:
            num = next((i for i, each in enumerate(p) if -math.log2(each) > mu), len(p))
        else:
            t = [math.log((i + 2) / (i + 1)) for i in range(99)]
            b = [math.log(p[i] / p[i + 1]) for i in range(99)]
            s = sum(x * y for x, y in zip(t, b, strict=True)) / sum(x * x for x in t)
            e = s - 1
            num = int((e * 2**mu / (1 - len(row) ** -e)) ** (1 / s))
        num = min(max(num, 1), len(p))
        p = p[:num] / p[:num].sum()
        dice = uniform(SEED, number, 0)
        place = min(int(np.searchsorted(np.cumsum(p), dice, side="right")), num - 1)
        mu -= eta * (-math.log2(p[place]) - tau)
        drawn.append(order[place])
    return drawn, mu


def one_by_one(rows: np.ndarray, sequence: SequenceState) -> list[int]:
    for row in rows:
        (drawn,) = draw(torch.from_numpy(row[None].copy()), [sequence])
        assert drawn.error is None and drawn.state == sequence.state
        sequence.token_ids.extend(drawn.token_ids)
    return sequence.token_ids[sequence.num_prompt :].tolist()


def sequence(version: int, tau: float = 4.0, eta: float = 0.3, **more: Any) -> SequenceState:
    asked = {"mirostat": version, "mirostat_tau": tau, "mirostat_eta": eta, "seed": SEED}
    return known(**asked, samplers=ORDER, **more)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 1 << 32), st.sampled_from([1, 2]), *TARGETS, st.floats(0.3, 2))
def test_each_token_and_mu_are_those_of_a_plain_reading(
    seed: int, version: int, tau: float, eta: float, temperature: float
) -> None:
    rows = rows_of(seed)
    ours = sequence(version, tau, eta, temperature=temperature)
    tokens, mu = naive(rows, version, tau, eta, temperature)
    assert one_by_one(rows, ours) == tokens
    assert ours.remembered == {"mu": pytest.approx(mu, rel=1e-9)}


@pytest.mark.parametrize("version", [1, 2])
def test_a_sequence_that_begins_again_with_its_state_draws_the_same(version: int) -> None:
    rows = rows_of(7)
    whole = sequence(version)
    answer = one_by_one(rows, whole)
    for cut in range(1, NUM_TOKENS):
        before = sequence(version)
        one_by_one(rows[:cut], before)
        begin = Begin(SequenceId(0), before.token_ids, 3, 0, before.sampling, state=before.state)
        again = SequenceState.from_begin(begin)
        assert one_by_one(rows[cut:], again) == answer and again.state == whole.state


@pytest.mark.parametrize("version", [1, 2])
def test_guessed_ahead_tokens_leave_the_state_of_those_drawn_one_by_one(version: int) -> None:
    rows = rows_of(8)
    plain, guessing = sequence(version), sequence(version)
    answer = tuple(one_by_one(rows[:6], plain))
    logits = torch.from_numpy(rows)
    (first,) = draw(logits[:1], [guessing])
    guessing.token_ids.extend(first.token_ids)
    ahead = draw_guessed(logits, guessing, first, answer[:5])
    assert (ahead.token_ids, ahead.state) == (answer, plain.state)


@settings(deadline=None)
@given(EXTREME, st.sampled_from([1, 2]), st.floats(0, 100), st.floats(0, 100))
def test_extreme_rows_and_settings_always_draw_a_token(
    row: np.ndarray, version: int, tau: float, eta: float
) -> None:
    ours = sequence(version, tau, eta, temperature=0.7)
    tokens = one_by_one(np.tile(row, (4, 1)), ours)
    assert len(tokens) == 4 and math.isfinite(ours.remembered["mu"])


def test_equally_likely_tokens_are_all_left_or_all_but_one() -> None:
    row = np.zeros((1, 16), np.float32)
    assert {one_by_one(row, sequence(1, tau))[0] for tau in (0.0, 0.5)} == {0}
    ours = SequenceState(array("i", (1,)), 1, 0, Sampling(mirostat=1, samplers=ORDER, seed=3))
    assert one_by_one(row, ours) == [int(uniform(3, 0, 0) * 16)]


def test_a_request_without_them_carries_no_state() -> None:
    (drawn,) = draw(torch.zeros(1, 8), [known(temperature=1.0, seed=1)])
    assert drawn.state == b""
