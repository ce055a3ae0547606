from array import array
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace_common.sampling import Sampling
from headrace_engine.runner.sampling import occurrences
from headrace_engine.runner.sampling.occurrences import Occurrences
from headrace_engine.runner.sampling.sampler import draw
from headrace_engine.runner.sampling.state import SequenceState

PARTS = st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=6)


@given(PARTS, st.integers(0, 3))
def test_counts_are_those_of_the_whole_sequence_however_it_grew(parts, start):
    token_ids = array("i", [0] * start)
    counted = Occurrences(start)
    for part in parts:
        token_ids.extend(part)
        counted.update(token_ids)
    naive = sorted(Counter(token_ids[start:]).items())
    assert list(zip(counted.token_ids, counted.counts, strict=True)) == naive


@pytest.mark.parametrize("penalty", ["repetition_penalty", "frequency_penalty"])
def test_a_penalized_draw_behind_a_long_prompt_counts_no_token_twice(penalty, monkeypatch):
    sorted_sizes = []
    unique = np.unique
    monkeypatch.setattr(
        occurrences.np, "unique", lambda x, **k: sorted_sizes.append(len(x)) or unique(x, **k)
    )
    prompt = array("i", np.random.default_rng(0).integers(0, 50, 20_000).astype(np.int32))
    known = SequenceState(prompt, len(prompt), 0, Sampling(temperature=0.0, **{penalty: 1.5}))
    for _ in range(5):
        (drawn,) = draw(torch.zeros(1, 50), [known])
        known.token_ids.extend(drawn.token_ids)
    first = [20_000] if penalty == "repetition_penalty" else []
    assert sorted_sizes == [*first, 1, 1, 1, 1]
