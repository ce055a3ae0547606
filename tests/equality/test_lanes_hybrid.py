"""Hybrids against transformers in float32: any cut, neighbours, slots used before, saved states."""

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_common.ids import SlotId
from headrace_common.plan import SlotCopy, StepPlan
from tests.kernels.own_kernels import needs_own_kernels
from tools.harness.drive import (
    Drive,
    assert_equals_transformers,
    assert_errs_no_more_than_transformers,
    assert_greedy,
    generate,
    random_prompt,
    reference_of,
    row_logits,
    tiny_runner,
)
from tools.harness.tiny_models import make_tiny_model

PROMPT = random_prompt(150)
TEXT, SEES = "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"
CUTS = (1, 4, 16, 63, 64, 65)
TOLERANCE = 5e-4
KINDS = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
SHARED = {"linear_num_key_heads": 1, "linear_num_value_heads": 3}
ODD = {"linear_key_head_dim": 10, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 2}
ROPE = {"rope_theta": 1e6, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": (TEXT, {}),
    "tied": (TEXT, {"tie_word_embeddings": True}),
    "heads that share a key": (TEXT, SHARED),
    "sizes that fit no vector": (TEXT, ODD),
    "a head of keys per head of values": (TEXT, {"linear_num_key_heads": 4}),
    "attention first, and its biases": (
        TEXT,
        {"layer_types": KINDS, "num_hidden_layers": 4, "attention_bias": True},
    ),
    "every fourth layer is attention": (TEXT, {"layer_types": None, "num_hidden_layers": 4}),
    "a quarter of a head turned": (TEXT, {"rope_parameters": None}),
    "the text side of one that sees": (
        SEES,
        {"max_shard_size": "90KB", "rope_parameters": ROPE | {"mrope_interleaved": True}},
    ),
    "the same, tied": (SEES, {"tie_word_embeddings": True}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("hybrid") / "tiny", TEXT)


@pytest.fixture(scope="module", params=["auto", "plain"])
def runner(request: pytest.FixtureRequest, folder: Path) -> Any:
    return tiny_runner(folder, "native-text", kernels=request.param)


def is_slow(runner: Any) -> bool:
    return bool(runner.lane._instructions == "plain")


@pytest.mark.parametrize("name", OPTIONS)
def test_logits_and_greedy_tokens_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    architecture, config = OPTIONS[name]
    folder = make_tiny_model(tmp_path / "tiny", architecture, **config)
    assert_equals_transformers(folder, architecture, PROMPT, 32, TOLERANCE)


def test_256_greedy_tokens_are_those_of_transformers_however_the_prompt_is_cut(
    runner: Any, folder: Path
) -> None:
    whole = generate(runner, PROMPT, 64 if is_slow(runner) else 256)
    assert_greedy(PROMPT + whole, len(PROMPT), reference_of(folder, TEXT))
    for cut in CUTS:
        num = 8 if is_slow(runner) else 64
        assert generate(runner, PROMPT, num, cut) == whole[:num]


def test_any_cut_of_a_prompt_ends_in_the_state_of_the_whole(runner: Any) -> None:
    def states(cut: int) -> list[torch.Tensor]:
        row_logits(runner, PROMPT, cut)
        storage = runner.lane._storage
        return [tensor[0].clone() for tensor in (*storage.states, *storage.inputs)]

    whole = states(len(PROMPT))
    for cut in (63, 64, 65, 37, 149) if is_slow(runner) else (*CUTS, 37, 149):
        for found, expected in zip(states(cut), whole, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_sequences_in_one_batch_get_the_tokens_that_they_get_alone(runner: Any) -> None:
    prompts = [random_prompt(length, seed=length) for length in (1, 15, 16, 17, 40, 90)]
    drive = Drive(runner, room=128)
    for number, prompt in enumerate(prompts):
        drive.begin(number, prompt)
    drive.step(*((number, 0, len(prompt)) for number, prompt in enumerate(prompts[:-1])))
    for start in range(0, 90, 30):  # beside streams that decode, in slots that others had
        drive.step(*((n, len(drive.tokens[n]) - 1, 1) for n in range(5)), (5, start, 30))
    drive.decode(range(6), 20)
    for number, prompt in enumerate(prompts):
        generated = drive.tokens[number][len(prompt) :]
        assert generated == generate(runner, prompt, len(generated))


def test_a_saved_state_goes_on_in_another_slot(runner: Any) -> None:
    whole = generate(runner, PROMPT, 30)
    drive = Drive(runner, room=256)
    drive.begin(0, PROMPT)
    drive.step((0, 0, 64))
    storage = runner.lane._storage
    saved = SlotId(len(storage.states[0]) - 1)  # a snapshot's
    runner.launch(StepPlan(slot_copies=(SlotCopy(SlotId(0), saved),))).result()
    drive.step((0, 64, len(PROMPT) - 64))  # the slot moves on
    runner.launch(StepPlan(restores=(SlotCopy(saved, SlotId(0)),))).result()
    drive.begin(0, PROMPT)
    drive.step((0, 64, len(PROMPT) - 64))
    drive.decode([0], 29)
    assert drive.tokens[0][len(PROMPT) :] == whole


def test_bfloat16_errs_no_more_than_that_of_transformers(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny", TEXT, dtype=torch.bfloat16)
    assert_errs_no_more_than_transformers(folder, TEXT, PROMPT)


@needs_own_kernels
@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_no_cut_changes_a_bit_where_our_own_products_compute(tmp_path: Path, quantize: str) -> None:
    folder = make_tiny_model(tmp_path / "tiny", TEXT, dtype=torch.bfloat16, head_dim=32)
    runner = tiny_runner(folder, "native-text", quantize=quantize, block_size=32)
    whole = row_logits(runner, PROMPT[:40])
    for cut in (1, 7, 33):
        assert torch.equal(row_logits(runner, PROMPT[:40], cut), whole)
