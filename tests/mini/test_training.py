import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from mini.export import export
from mini.marking import tokens_right
from mini.model import Mini, Shape, rotation
from mini.training import Plan, Training
from mini.vocabulary import train_tokenizer

PLAN = Plan(seed=3, num_steps=4, num_decay_steps=2, save_every=2)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(seed=1, vocab_size=400, num_conversations=20)


def test_a_resumed_training_ends_where_an_uninterrupted_one_does(tokenizer, tmp_path):
    whole = Training(PLAN, tokenizer)
    for _ in range(4):
        whole.advance()
        if whole.step == 2:
            whole.save(tmp_path)
    resumed = Training(PLAN, tokenizer)
    resumed.load(tmp_path)
    resumed.run(tmp_path)
    assert resumed.step == 4
    assert all(torch.equal(whole.mean[name], resumed.mean[name]) for name in whole.mean)


def test_the_learning_rate_warms_up_stays_constant_and_decays_to_zero():
    plan = Plan(seed=1, num_steps=1000, num_decay_steps=100, save_every=10)
    assert plan.rate(0) < plan.rate(20) < plan.rate(60) == plan.rate(900) == 1.0
    assert plan.rate(950) == 0.5 and plan.rate(1000) == 0.0


def test_the_reference_loads_exported_weights_as_qwen3(tokenizer, tmp_path):
    torch.manual_seed(0)
    shape = Shape(vocab_size=tokenizer.get_vocab_size())
    mini = Mini(shape).bfloat16().float()
    export(shape, mini.state_dict(), tokenizer, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(0, shape.vocab_size, (1, 50))
    with torch.no_grad():
        ours = mini(ids, rotation(shape, 50)) @ mini.embed.weight.T
        torch.testing.assert_close(reference(ids).logits, ours, rtol=1e-3, atol=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token == "<|im_end|>"


def test_tokens_are_right_exactly_if_greedy_decoding_produces_them(tokenizer, tmp_path):
    torch.manual_seed(0)
    shape = Shape(vocab_size=tokenizer.get_vocab_size())
    export(shape, Mini(shape).state_dict(), tokenizer, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    prompt = [20, 21, 22]
    said = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0].tolist()
    ids, wanted = said[:-1], [-100, -100, *said[3:]]
    assert tokens_right(model, ids, wanted) == (8, 8)
    wrong = [*wanted[:-1], (wanted[-1] + 1) % shape.vocab_size]
    assert tokens_right(model, ids, wrong) == (7, 8)
