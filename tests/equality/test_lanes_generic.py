"""Models of kinds that we do not implement: any cut of the prompt gives transformers' own answer.

On blocks: learned positions, partial rotary, soft caps with alternating windows, sinks, experts,
layers that share keys and values, keys and values of unequal size. On slots: convolutions beside
attention, and a recurrent model whose forward goes on from a cache by single tokens only.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headrace_common.ids import BlockId, SlotId
from headrace_common.plan import BlockCopy, SlotCopy, StepPlan
from tools.harness.drive import (
    Drive,
    assert_close,
    assert_greedy,
    generate,
    random_prompt,
    row_logits,
    tiny_runner,
)
from tools.harness.tiny_models import make_tiny_model

PROMPT = random_prompt(60)
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "head_dim": None}
WINDOW = {"sliding_window": 24, "pad_token_id": 0}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SHARING = {
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "num_kv_shared_layers": 1,
    "vocab_size_per_layer_input": 320,
    "hidden_size_per_layer_input": 8,
    "altup_num_inputs": 2,
    "laurel_rank": 8,
    "activation_sparsity_pattern": [0.0, 0.0, 0.0],
}
LATENT = {
    "head_dim": None,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 3,
}
ON_BLOCKS = {
    "GPT2LMHeadModel": GPT2,
    "GPTNeoXForCausalLM": {"head_dim": None},
    "PhiForCausalLM": {"head_dim": None},
    "Gemma2ForCausalLM": WINDOW,
    "Gemma3ForCausalLM": WINDOW,
    "GptOssForCausalLM": WINDOW | EXPERTS,
    "MixtralForCausalLM": EXPERTS,
    "Gemma3nForCausalLM": WINDOW | SHARING,
    "DeepseekV3ForCausalLM": LATENT,
}
ON_SLOTS = {
    "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention", "conv"]},
    "MambaForCausalLM": {"state_size": 8},
}
MODELS: dict[str, dict[str, Any]] = ON_BLOCKS | ON_SLOTS


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = dict[str, Any](MODELS[request.param])
    return make_tiny_model(tmp_path_factory.mktemp("generic") / "tiny", request.param, **config)


@pytest.fixture(scope="module")
def runner(folder: Path):
    return tiny_runner(folder, "generic-text", max_model_len=256, block_size=16)


@pytest.fixture(scope="module")
def reference(folder: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


@torch.inference_mode()
def test_chunks_give_the_logits_of_transformers(runner, reference):
    assert runner.lane.traits.id == "generic-text"
    expected = reference(torch.tensor([PROMPT])).logits[0]
    for chunk in (60, 7, 1):
        assert_close(row_logits(runner, PROMPT, chunk), expected)


def test_blocks_are_used_wherever_all_state_is_attention(runner, reference):
    name = type(reference).__name__
    layout = runner.lane.layout(1 << 24, 4, 100, 16)
    assert (
        bool(layout.num_blocks)
        == (name in ON_BLOCKS)
        == (runner.lane.traits.facts.memory == "blocks")
    )
    assert layout.forward_per_chunk == (name in ON_SLOTS)


def test_sequences_in_one_step_get_the_tokens_that_they_get_alone(runner):
    prompts = [random_prompt(length, seed=length) for length in (1, 30, 17)]
    drive = Drive(runner, room=128)
    for number, prompt in enumerate(prompts):
        drive.begin(number, prompt)
    drive.step((0, 0, 1), (1, 0, 9))
    drive.step((0, 1, 1), (1, 9, 21), (2, 0, 17))
    drive.decode(range(3), 8)
    for number, prompt in enumerate(prompts):
        found = drive.tokens[number][len(prompt) :]
        assert found == generate(runner, prompt, len(found))


@torch.inference_mode()
def test_a_recurrent_model_forgets_nothing_in_bfloat16(tmp_path: Path):
    folder = make_tiny_model(tmp_path, "MambaForCausalLM", state_size=8, dtype=torch.bfloat16)
    runner = tiny_runner(folder, max_model_len=256)
    assert_close(row_logits(runner, PROMPT, 7), row_logits(runner, PROMPT), 5e-2)


def test_greedy_tokens_equal_those_of_transformers(runner, reference):
    assert_greedy(PROMPT + generate(runner, PROMPT, 64, chunk=16), len(PROMPT), reference)


def test_a_sibling_goes_on_from_copied_memory(runner):
    drive = Drive(runner, room=128)
    drive.begin(0, PROMPT)
    drive.prefill(0)
    drive.begin(1, drive.tokens[0], generated=1)
    if runner.lane.traits.facts.memory == "slot":
        plan = StepPlan(slot_copies=(SlotCopy(SlotId(0), SlotId(1)),))
    else:  # 61 tokens lie in 4 blocks of the 8 that each has here
        copies = [BlockCopy(BlockId(n), BlockId(8 + n)) for n in range(4)]
        plan = StepPlan(block_copies=tuple(copies))
    runner.launch(plan).result()
    drive.decode([0, 1], 10)
    assert drive.tokens[0] == drive.tokens[1]
