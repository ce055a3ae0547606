"""Tests that samplers keep the same candidates and probabilities as llama.cpp's samplers."""

import ctypes
import math
from array import array
from typing import Any

import numpy as np
import pytest

from headrace_common.sampling import Sampling
from headrace_engine.runner.sampling.chain import candidates
from headrace_engine.runner.sampling.state import SequenceState
from tests.runner.sampling.test_chain import left, softmax

api: Any = pytest.importorskip("llama_cpp")

THEIRS = {
    "typ_p": ({"typical_p": 0.4}, "typical", (0.4, 0)),
    "top_n_sigma": ({"top_n_sigma": 1.5}, "top_n_sigma", (1.5,)),
    "xtc": ({"xtc_probability": 1.0, "xtc_threshold": 0.05}, "xtc", (1.0, 0.05, 0, 1)),
    "temperature": (
        {"temperature": 0.9, "dynatemp_range": 0.5, "dynatemp_exponent": 1.3},
        "temp_ext",
        (0.9, 0.5, 1.3),
    ),
    "top_k": ({"top_k": 9}, "top_k", (9,)),
    "top_p": ({"top_p": 0.7}, "top_p", (0.7, 3)),
    "min_p": ({"min_p": 0.1}, "min_p", (0.1, 3)),
}


@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize("seed", range(20))
def test_samplers_keep_the_same_candidates_as_llama_cpp(name: str, seed: int) -> None:
    asked, theirs, arguments = THEIRS[name]
    row = np.random.default_rng(seed).normal(0, 3, 200).astype(np.float32)
    wanted = applied(getattr(api, f"llama_sampler_init_{theirs}")(*arguments), row)
    min_keep = 3 if name in ("top_p", "min_p") else 0
    found = left(row, name, **asked, min_keep=min_keep)
    assert found.keys() == wanted.keys()
    p = softmax(np.array(list(wanted.values())))
    assert [found[token] for token in wanted] == pytest.approx(p.tolist(), rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("window", [0, 1, 5, 100])
def test_penalties_equal_those_of_llama_cpp(window: int) -> None:
    row = np.random.default_rng(window).normal(0, 3, 20).astype(np.float32)
    tokens = (3, 7, 3, 9, 11, 3, 7, 1)
    sampler = api.llama_sampler_init_penalties(20, window, 1.4, 0.3, 0.2)
    for token in tokens:
        api.llama_sampler_accept(sampler, token)
    wanted = applied(sampler, row)
    asked = {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": 0.2}
    sampling = Sampling(repeat_last_n=window, samplers=("penalties",), **asked)
    found = candidates(row, SequenceState(array("i", tokens), 0, 0, sampling))
    assert dict(zip(found.ids.tolist(), found.logits.tolist(), strict=True)) == pytest.approx(
        wanted, rel=1e-5
    )


def applied(sampler: Any, row: np.ndarray) -> dict[int, float]:
    """Apply and free the sampler; return the finite logits by token."""
    entries = (api.llama_token_data * len(row))(
        *(api.llama_token_data(id=i, logit=float(x), p=0.0) for i, x in enumerate(row))
    )
    given = api.llama_token_data_array(data=entries, size=len(row), selected=-1, sorted=False)
    api.llama_sampler_apply(sampler, ctypes.byref(given))
    found = {given.data[i].id: given.data[i].logit for i in range(given.size)}
    api.llama_sampler_free(sampler)
    return {token: logit for token, logit in found.items() if math.isfinite(logit)}
