"""DRY against a plain reading of its definition, token by token."""

import zlib
from array import array
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_common.sampling import LLAMA_CPP_ORDER, Breaker, Sampling
from headrace_engine.runner.sampling.chain import candidates
from headrace_engine.runner.sampling.sampler import draw, draw_guessed
from headrace_engine.runner.sampling.state import SequenceState

SIZE = 6  # tokens; so few that much is repeated
BREAKERS = st.lists(st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=3), max_size=2)
TOKENS = st.lists(st.integers(0, SIZE - 1), max_size=40)
SETTINGS = st.fixed_dictionaries(
    {
        "dry_multiplier": st.floats(0.1, 5),
        "dry_base": st.floats(1, 100),
        "dry_allowed_length": st.integers(0, 4),
        "dry_penalty_last_n": st.integers(-1, 20),
    }
)


def packed(*heads: int) -> bytes:
    return zlib.compress(np.diff(sorted(set(heads)), prepend=0).astype(np.int32).tobytes())


def breaker(head: int, *tail: int) -> Breaker:
    return Breaker(tail, packed(head))


def merged(breakers: list[list[int]]) -> tuple[Breaker, ...]:
    """With one entry for each tail, as the gateway makes them."""
    heads: dict[tuple[int, ...], list[int]] = {}
    for head, *tail in breakers:
        heads.setdefault(tuple(tail), []).append(head)
    return tuple(Breaker(tail, packed(*ids)) for tail, ids in heads.items())


def naive(tokens: list[int], breakers: list[list[int]], s: Sampling) -> list[float]:
    """Return by how much the logit of each token is lowered."""
    last_n, least = s.dry_penalty_last_n, s.dry_allowed_length
    lost = [0.0] * SIZE
    window = tokens if last_n < 0 else tokens[len(tokens) - min(last_n, len(tokens)) :]
    if len(window) <= least:
        return lost
    limit = len(window)
    for place in reversed(range(len(window))):
        fitting = [len(b) for b in breakers if window[place : place + len(b)] == b]
        if fitting:
            limit = len(window) - place - max(fitting)
            break
    if limit < least:
        return lost
    longest: dict[int, int] = {}
    for end in range(1, len(window)):  # tokens before `end` are compared with all of them
        length = 0
        while length < end and window[end - 1 - length] == window[-1 - length]:
            length += 1
        if min(length, limit) >= least:
            token = window[end]
            longest[token] = max(longest.get(token, 0), min(length, limit))
    for token, length in longest.items():
        if [token] not in breakers:
            most = int(88.7228391 / np.log(s.dry_base)) if s.dry_base > 1.000001 else length
            lost[token] = s.dry_multiplier * s.dry_base ** min(length - least, most)
    return lost


def sequence(tokens: list[int], breakers: tuple[Breaker, ...], **asked: Any) -> SequenceState:
    sampling = Sampling(samplers=("dry",), dry_breakers=breakers, **asked)
    return SequenceState(array("i", tokens), 0, 0, sampling)


def lost_of(known: SequenceState) -> list[float]:
    found = candidates(np.zeros(SIZE, np.float32), known)
    assert found.ids.tolist() == list(range(SIZE))
    return [-each for each in found.logits.tolist()]


@settings(max_examples=400, deadline=None)
@given(TOKENS, TOKENS, BREAKERS, SETTINGS)
def test_each_token_loses_what_a_plain_reading_says(
    tokens: list[int], more: list[int], breakers: list[list[int]], asked: dict[str, Any]
) -> None:
    known = sequence(tokens, merged(breakers), **asked)
    for token in [*more, 0]:
        wanted = naive(tokens, breakers, known.sampling)
        assert lost_of(known) == pytest.approx(wanted, rel=1e-9)
        tokens = [*tokens, token]
        known.token_ids.append(token)


def test_a_repetition_costs_more_the_longer_it_is() -> None:
    asked = {"dry_multiplier": 0.5, "dry_base": 2.0, "dry_allowed_length": 2}
    for length, cost in ((1, 0.0), (2, 0.5), (3, 1.0), (4, 2.0)):
        past = [0, 1, 2, 3][-length:]
        assert lost_of(sequence([*past, 4, 5, *past], (), **asked))[4] == cost


def test_a_breaker_ends_a_repetition_and_is_never_penalized() -> None:
    asked = {"dry_multiplier": 1.0, "dry_allowed_length": 1}
    tokens = [1, 2, 3, 0, 1, 2]
    assert lost_of(sequence(tokens, (), **asked))[3] == 1.75
    assert lost_of(sequence(tokens, (breaker(1),), **asked))[3] == 1.0
    assert lost_of(sequence(tokens, (breaker(2),), **asked))[3] == 0
    assert lost_of(sequence(tokens, (breaker(3),), **asked))[3] == 0
    assert lost_of(sequence(tokens, (breaker(1, 2),), **asked))[3] == 0
    assert lost_of(sequence(tokens, (breaker(0, 5),), **asked))[3] == 1.75


def test_only_the_last_tokens_are_searched() -> None:
    asked = {"dry_multiplier": 1.0, "dry_allowed_length": 1}
    tokens = [1, 3, 0, 0, 2, 1]
    assert lost_of(sequence(tokens, (), **asked, dry_penalty_last_n=6))[3] == 1
    assert lost_of(sequence(tokens, (), **asked, dry_penalty_last_n=5))[3] == 0
    assert lost_of(sequence(tokens, (), **asked, dry_penalty_last_n=0))[3] == 0


def test_a_long_repetition_costs_no_more_than_a_float_holds() -> None:
    known = sequence([1] * 5000, (), dry_multiplier=100.0, dry_base=100.0)
    (lost,) = {lost for lost in lost_of(known) if lost}
    assert np.isfinite(lost) and lost == pytest.approx(100.0 * 100.0**19)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 1 << 32), st.integers(0, 1 << 60))
def test_guessed_ahead_and_begun_again_it_draws_the_same(rows: int, seed: int) -> None:
    values = np.random.default_rng(rows).normal(0, 1, (8, SIZE)).astype(np.float32)
    logits = torch.from_numpy(values)
    sampling = Sampling(
        seed=seed, samplers=LLAMA_CPP_ORDER, dry_multiplier=2.0, dry_breakers=(breaker(3),)
    )
    whole = SequenceState(array("i", (1, 2, 1)), 3, 0, sampling)
    for number in range(8):
        (each,) = draw(logits[number : number + 1], [whole])
        whole.token_ids.extend(each.token_ids)
        again = SequenceState(whole.token_ids[: 3 + number], 3, 0, sampling)
        assert draw(logits[number : number + 1], [again]) == [each]
        assert each.state == b""  # all that it remembers follows from the tokens
    answer = tuple(whole.token_ids[3:])
    guessing = SequenceState(array("i", (1, 2, 1)), 3, 0, sampling)
    (first,) = draw(logits[:1], [guessing])
    guessing.token_ids.extend(first.token_ids)
    assert draw_guessed(logits, guessing, first, answer[:7]).token_ids == answer


def test_the_choices_of_a_prompt_share_their_first_look_at_it() -> None:
    tokens = list(range(SIZE)) * 7
    first, second = (sequence(tokens, (breaker(3),), dry_multiplier=1.0) for _ in range(2))
    assert lost_of(first) == lost_of(second)
    assert first.repeats and second.repeats
    assert first.repeats.lengths is second.repeats.lengths
    assert first.repeats.breakers is second.repeats.breakers
    first.token_ids.append(2)
    assert lost_of(first) != lost_of(second)


def test_a_token_takes_no_second_look_at_all_that_came_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = sequence(list(range(SIZE)) * 10, (breaker(3),), dry_multiplier=1.0)
    lost_of(known)
    monkeypatch.setattr("headrace_engine.runner.sampling.repeats._matches", None)
    known.token_ids.append(2)
    assert lost_of(known) == naive(known.token_ids.tolist(), [[3]], known.sampling)
