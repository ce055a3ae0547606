"""Groups read out of GGUF files hold the files' values."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from headrace_engine.weights.gguf_groups import (
    GROUP_SCHEMES,
    GroupScheme,
    common_scheme,
    read_groups,
)
from tools.harness.gguf_files import encoded


@pytest.mark.parametrize("kind", [kind for kind, it in GROUP_SCHEMES.items() if not it.is_float])
def test_groups_of_a_file_are_its_values(kind: str) -> None:
    given = np.random.default_rng(0).normal(size=(8, 512)).astype(np.float32)
    raw = encoded(given, kind, "any")
    q, scale, minimum = read_groups(raw, kind)
    size, bits = GROUP_SCHEMES[kind].size, GROUP_SCHEMES[kind].bits
    exact = dequantize(raw, GGMLQuantizationType[kind])
    assert (q == np.rint(q)).all() and q.min() >= (0 if bits == 4 else -128) and q.max() <= 127
    assert bits == 8 or q.max() <= 15
    assert GROUP_SCHEMES[kind].has_minimum or not minimum.any()
    assert np.array_equal(scale.repeat(size, 1) * q + minimum.repeat(size, 1), exact)
    scale, minimum = (part.astype(np.float16).astype(np.float32) for part in (scale, minimum))
    kept = scale.repeat(size, 1) * q + minimum.repeat(size, 1)
    in_bfloat16 = torch.from_numpy(exact).bfloat16().float().numpy()
    assert np.linalg.norm(kept - exact) <= 0.2 * np.linalg.norm(in_bfloat16 - exact)


def test_mxfp4_keeps_its_codes_and_the_bytes_of_its_scales() -> None:
    given = np.random.default_rng(0).normal(size=(8, 512)).astype(np.float32)
    raw = encoded(given, "MXFP4", "any")
    codes, scale, minimum = read_groups(raw, "MXFP4")
    assert codes.dtype == np.int8 and scale.dtype == np.uint8 and not minimum.size
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    found = numbers[codes] * np.exp2(scale.astype(np.float32) - 127).repeat(32, 1)
    assert np.array_equal(found, dequantize(raw, GGMLQuantizationType.MXFP4))


def test_a_stack_takes_what_holds_all_its_types() -> None:
    assert common_scheme(["Q4_K", "Q4_0"]) == GroupScheme(4, 32, True)
    assert common_scheme(["Q4_K", "Q6_K"]) == GroupScheme(8, 16, True)
    assert common_scheme(["Q8_0", "Q6_K"]) == GroupScheme(8, 16, False)
    assert common_scheme(["MXFP4", "MXFP4"]) == GROUP_SCHEMES["MXFP4"]
    assert common_scheme(["MXFP4", "Q8_0"]) is None  # bfloat16 holds both, but no groups do
    assert common_scheme(["Q8_0", "BF16"]) is None and common_scheme([]) is None
