"""Keys and values in 8 bits, for every family with attention of its own kind."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.own_kernels import needs_own_kernels
from tools.harness.drive import generate, random_prompt, row_logits, tiny_runner
from tools.harness.tiny_models import make_tiny_model

PROMPT = random_prompt(150)
WINDOW = {"sliding_window": 24, "pad_token_id": 0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "a head size without vectors": ("LlamaForCausalLM", {"head_dim": 24}),
    "windows": ("MistralForCausalLM", {"sliding_window": 24}),
    "soft caps": ("Gemma2ForCausalLM", WINDOW),
    "windows on some layers": ("Gemma3ForCausalLM", WINDOW),
    "shared keys": ("Gemma4ForCausalLM", {}),
    "keys as values": ("Gemma4UnifiedForCausalLM", {"attention_k_eq_v": True}),
    "sinks": ("GptOssForCausalLM", {}),
    "states": ("Qwen3_5ForCausalLM", {}),
}


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The length of the error, relative to the length of what is expected."""
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_close_to_those_of_an_exact_cache(name: str, tmp_path: Path) -> None:
    """Rounding a cache to 8 bits errs about as much as computing in bfloat16.

    That is much in models of random weights, with experts in particular.
    """
    architecture, config = MODELS[name]
    folder = make_tiny_model(tmp_path / "tiny", architecture, **config)
    exact, plain, own = (
        row_logits(tiny_runner(folder, kernels=kernels, kv_cache_dtype=kind), PROMPT)
        for kernels, kind in (("plain", "auto"), ("plain", "int8"), ("auto", "int8"))
    )
    assert 1e-4 < difference(plain, exact) < (0.3 if name == "sinks" else 0.1)
    # With another rounding, a number of a key sometimes goes to the next of 255 steps.
    assert difference(own, plain) < 5e-3


@needs_own_kernels
@pytest.mark.parametrize("name", MODELS)
def test_chunked_is_whole_to_the_bit(name: str, tmp_path: Path) -> None:
    architecture, config = MODELS[name]
    folder = make_tiny_model(tmp_path / "tiny", architecture, **config)
    runner = tiny_runner(folder, kv_cache_dtype="int8", dtype="bfloat16", block_size=16)
    whole = row_logits(runner, PROMPT)
    for chunk in (7, 64):
        assert row_logits(runner, PROMPT, chunk).equal(whole)
    assert generate(runner, PROMPT, 8, chunk=7) == generate(runner, PROMPT, 8)


def test_plain_gives_the_same_tokens_in_chunks(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    runner = tiny_runner(folder, kernels="plain", kv_cache_dtype="int8")
    assert generate(runner, PROMPT, 20, chunk=7) == generate(runner, PROMPT, 20)
