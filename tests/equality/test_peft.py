"""Adapters that PEFT made against PEFT itself, in float32; `make test-peft` installs it."""

from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headrace_common.checkpoints.adapters import name_adapter
from headrace_common.checkpoints.spec import read_spec
from headrace_common.sampling import Sampling
from headrace_engine.weights.merge import merge
from tools.harness.drive import Drive, assert_close, random_prompt, row_logits, tiny_runner
from tools.harness.tiny_models import make_tiny_model

peft: Any = pytest.importorskip("peft")

ADAPTERS: dict[str, dict[str, Any]] = {
    "attention": {"r": 4, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    "mlp": {"r": 8, "lora_alpha": 20, "target_modules": r".*\.mlp\.(gate|up|down)_proj"},
    "all": {"r": 16, "use_rslora": True, "target_modules": "all-linear"},
    "patterns": {
        "r": 2,
        "target_modules": ["v_proj", "down_proj"],
        "rank_pattern": {"v_proj": 12},
        "alpha_pattern": {r"layers\.[01]\.mlp\.down_proj": 30},
    },
}
FAMILIES = ("LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM", "Qwen3_5ForCausalLM")
PROMPTS = [random_prompt(length, seed=length) for length in (21, 60, 5, 33, 48)]
NUM = 24
WITH_LOGPROBS = Sampling(temperature=0, ignore_eos=True, num_logprobs=0)


def make(base: Path, folder: Path, seed: int, **config: Any) -> Any:
    """An adapter that changes much, saved; returns PEFT's model of it."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **config))
    for name, values in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(values, std=0.3)
    adapted.save_pretrained(folder)
    return adapted.eval()


@torch.inference_mode()
def expected(model: Any, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens, and the log probability of each."""
    tokens = list(prompt)
    for _ in range(NUM):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    logits = model(torch.tensor([tokens[:-1]])).logits[0, len(prompt) - 1 :]
    drawn = torch.tensor(tokens[len(prompt) :])
    return tokens[len(prompt) :], logits.float().log_softmax(-1).gather(1, drawn[:, None])[:, 0]


@pytest.mark.parametrize("architecture", FAMILIES)
def test_texts_and_log_probabilities_equal_those_of_peft(architecture: str, tmp_path: Path) -> None:
    base = make_tiny_model(tmp_path / "base", architecture)
    spec, runner = read_spec(base), tiny_runner(base, dtype="float32")
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    sides, fingerprints = [expected(plain, PROMPTS[0])], [""]
    for seed, (name, config) in enumerate(ADAPTERS.items(), 1):
        model = make(base, tmp_path / name, seed, **config)
        sides.append(expected(model, PROMPTS[seed]))
        adapter = name_adapter(name, tmp_path / name, spec.architecture)
        runner.put_adapter(runner.read_adapter(adapter))
        fingerprints.append(adapter.fingerprint)
        with torch.inference_mode():
            theirs = model(torch.tensor([PROMPTS[1]])).logits[0]
        assert_close(row_logits(runner, PROMPTS[1], adapter=adapter.fingerprint), theirs)
        merge(spec, tmp_path / name, tmp_path / f"{name} merged")
        merged = tiny_runner(tmp_path / f"{name} merged", dtype="float32")
        assert_close(row_logits(merged, PROMPTS[1]), theirs)
    for numbers in ([n] for n in range(len(sides))):
        _compare(runner, numbers, fingerprints, sides)
    _compare(runner, list(range(len(sides))), fingerprints, sides)


def _compare(
    runner: Any,
    numbers: list[int],
    fingerprints: list[str],
    sides: list[tuple[list[int], torch.Tensor]],
) -> None:
    """These in one batch: the same texts, and log probabilities within rounding."""
    drive = Drive(runner, block_size=32)
    for number in numbers:
        drive.adapters[number] = fingerprints[number]
        drive.begin(number, PROMPTS[number], WITH_LOGPROBS)
    drive.step(*((n, 0, len(PROMPTS[n])) for n in numbers))
    drive.decode(numbers, NUM - 1)
    for number in numbers:
        tokens, logprobs = sides[number]
        assert drive.tokens[number][len(PROMPTS[number]) :] == tokens
        values = b"".join(one.logprobs.values for one in drive.drawn[number] if one.logprobs)
        found = torch.tensor(array("f", values))
        assert (found - logprobs).abs().max() < 1e-3
