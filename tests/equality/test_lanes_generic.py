"""Models of kinds that we do not implement: any cut of the prompt gives transformers' own answer.

Learned positions, soft caps with alternating windows, convolutions beside attention, experts, and
a recurrent model whose forward goes on from a cache by single tokens only.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headrace.core.ids import SlotId
from headrace.core.plan import SlotCopy, StepPlan
from tests.builders import make_tiny_model
from tests.drive import (
    Drive,
    assert_close,
    assert_greedy,
    generate,
    random_prompt,
    row_logits,
    tiny_runner,
)

PROMPT = random_prompt(60)
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "head_dim": None}
MODELS = {
    "GPT2LMHeadModel": GPT2,
    "Gemma2ForCausalLM": {"sliding_window": 24, "pad_token_id": 0},
    "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention", "conv"]},
    "MixtralForCausalLM": {"num_local_experts": 4},
    "MambaForCausalLM": {"state_size": 8},
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = dict[str, Any](MODELS[request.param])
    return make_tiny_model(tmp_path_factory.mktemp("generic") / "tiny", request.param, **config)


@pytest.fixture(scope="module")
def runner(folder: Path):
    return tiny_runner(folder, max_model_len=256)


@pytest.fixture(scope="module")
def reference(folder: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


@pytest.mark.parametrize("chunk", [60, 7, 1])
@torch.inference_mode()
def test_chunks_give_the_logits_of_transformers(runner, reference, chunk: int):
    assert runner.lane.id == "generic-text"
    assert_close(row_logits(runner, PROMPT, chunk), reference(torch.tensor([PROMPT])).logits[0])


@torch.inference_mode()
def test_a_recurrent_model_forgets_nothing_in_bfloat16(tmp_path: Path):
    folder = make_tiny_model(tmp_path, "MambaForCausalLM", state_size=8, dtype=torch.bfloat16)
    runner = tiny_runner(folder, max_model_len=256)
    assert_close(row_logits(runner, PROMPT, 7), row_logits(runner, PROMPT), 5e-2)


def test_greedy_tokens_equal_those_of_transformers(runner, reference):
    assert_greedy(PROMPT + generate(runner, PROMPT, 64, chunk=16), len(PROMPT), reference)


def test_a_sibling_goes_on_from_a_copied_slot(runner):
    drive = Drive(runner)
    drive.begin(0, PROMPT)
    drive.prefill(0)
    drive.begin(1, drive.tokens[0], generated=1)
    runner.launch(StepPlan(slot_copies=(SlotCopy(SlotId(0), SlotId(1)),))).result()
    drive.decode([0, 1], 10)
    assert drive.tokens[0] == drive.tokens[1]
