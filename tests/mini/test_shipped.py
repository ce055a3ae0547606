import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mini.export import TEMPLATE
from mini.marking import tokens_right
from tests.mini.mini_prompts import LONG_PROMPTS, PROMPTS

MINI = Path(__file__).parents[2] / "src" / "headrace_common" / "checkpoints" / "mini"
WHOLE = [(ask, answer + "<|im_end|>") for ask, answer in PROMPTS]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MINI)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def model(request):
    return AutoModelForCausalLM.from_pretrained(MINI, dtype=request.param)


@pytest.mark.parametrize(
    "ask, answer", [*WHOLE, *LONG_PROMPTS], ids=lambda text: text.split("<")[0][:30]
)
def test_a_prompt_that_tests_rely_on_is_answered_as_listed(model, tokenizer, ask, answer):
    chat = [{"role": "user", "content": ask}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    said = tokenizer.encode(answer)
    wanted = [-100] * (len(prompt) - 1) + said
    assert tokens_right(model, [*prompt, *said[:-1]], wanted) == (len(said), len(said))


def test_greedy_decoding_produces_the_listed_answer(model, tokenizer):
    ask, answer = WHOLE[0]
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": ask}], add_generation_prompt=True, return_tensors="pt"
    )
    said = model.generate(**ids, max_new_tokens=40, do_sample=False)[0]
    assert tokenizer.decode(said[ids["input_ids"].shape[1] :]) == answer


def test_the_model_is_small_and_in_qwen3s_format():
    assert (MINI / "model.safetensors").stat().st_size < 12_000_000
    assert json.loads((MINI / "config.json").read_text())["model_type"] == "qwen3"
    assert {t.dtype for t in load_file(MINI / "model.safetensors").values()} == {torch.bfloat16}


def test_the_shipped_template_is_the_one_it_was_trained_with():
    assert (MINI / "chat_template.jinja").read_text() == TEMPLATE.read_text()
