"""The same candidates and probabilities as llama.cpp's own samplers leave."""

import ctypes
import math
from typing import Any

import numpy as np
import pytest

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
def test_llama_cpp_leaves_the_same_candidates(name: str, seed: int) -> None:
    asked, theirs, arguments = THEIRS[name]
    row = np.random.default_rng(seed).normal(0, 3, 200).astype(np.float32)
    entries = (api.llama_token_data * len(row))(
        *(api.llama_token_data(id=i, logit=float(x), p=0.0) for i, x in enumerate(row))
    )
    array_of = api.llama_token_data_array(data=entries, size=len(row), selected=-1, sorted=False)
    sampler = getattr(api, f"llama_sampler_init_{theirs}")(*arguments)
    api.llama_sampler_apply(sampler, ctypes.byref(array_of))
    last = [array_of.data[i] for i in range(array_of.size)]
    wanted = {each.id: each.logit for each in last if math.isfinite(each.logit)}
    p = softmax(np.array(list(wanted.values())))
    api.llama_sampler_free(sampler)
    min_keep = 3 if name in ("top_p", "min_p") else 0
    found = left(row, name, **asked, min_keep=min_keep)
    assert found.keys() == wanted.keys()
    assert [found[token] for token in wanted] == pytest.approx(p.tolist(), rel=1e-4, abs=1e-7)
