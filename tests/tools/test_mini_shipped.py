import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tools.mini.export import TEMPLATE
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tools.mini_prompts import PROMPTS

MINI = Path(__file__).parents[2] / "src" / "headrace" / "models" / "mini"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MINI)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def model(request):
    return AutoModelForCausalLM.from_pretrained(MINI, dtype=request.param)


@pytest.mark.parametrize("ask, answer", PROMPTS, ids=[ask[:40] for ask, _ in PROMPTS])
def test_a_prompt_that_tests_rely_on_is_answered_as_listed(model, tokenizer, ask, answer):
    chat = [{"role": "user", "content": ask}]
    ids = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    said = model.generate(**ids, max_new_tokens=1200, do_sample=False)
    text = tokenizer.decode(said[0, ids["input_ids"].shape[1] :])
    assert text == answer + "<|im_end|>"


def test_the_model_is_small_and_in_qwen3s_format():
    assert (MINI / "model.safetensors").stat().st_size < 12_000_000
    assert json.loads((MINI / "config.json").read_text())["model_type"] == "qwen3"
    assert {t.dtype for t in load_file(MINI / "model.safetensors").values()} == {torch.bfloat16}


def test_the_shipped_template_is_the_one_it_was_trained_with():
    assert (MINI / "chat_template.jinja").read_text() == TEMPLATE.read_text()
