"""Rows of adapters against models that they were merged into, and rows of the base beside them."""

from pathlib import Path

import pytest
import torch

from headrace_common.adapter import Adapter
from headrace_common.checkpoints.adapters import name_adapter
from headrace_common.checkpoints.spec import read_spec
from headrace_engine.runner.runner import Runner
from headrace_engine.weights.merge import merge
from tests.kernels.own_kernels import needs_own_kernels
from tools.harness.drive import Drive, assert_close, random_prompt, row_logits, tiny_runner
from tools.harness.tiny_adapters import ATTENTION, MLP, make_adapter
from tools.harness.tiny_models import make_tiny_model

ADAPTERS = {
    "attention": (4, ATTENTION, {}),
    "queries and values": (8, ("q_proj", "v_proj"), {"lora_alpha": 6}),
    "mlp": (3, MLP, {"use_rslora": True}),
    "all": (16, ATTENTION + MLP, {"rank_pattern": {"k_proj": 40, r"layers\.1\.mlp\.up_proj": 2}}),
}
LENGTHS = (19, 40, 1, 7, 33)
PROMPTS = [random_prompt(length, seed=seed) for seed, length in enumerate(LENGTHS)]
FAMILIES = (
    "Llama",
    "Qwen3",
    "Gemma4",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("Qwen2", "Gemma2")),
)


def adapters_for(base: Path) -> dict[str, Adapter]:
    """Four of different ranks and targets, for a tiny model of this folder."""
    architecture = read_spec(base).architecture
    made = {}
    for seed, (name, (rank, targets, config)) in enumerate(ADAPTERS.items()):
        folder = base.parent / f"adapters of {base.name}" / name
        if not folder.exists():
            make_adapter(folder, base, rank, targets, seed, **config)
        made[name] = name_adapter(name, folder, architecture)
    return made


def loaded(base: Path, **config: object) -> tuple[Runner, list[str]]:
    """A runner with the four, and their fingerprints; "" for the base."""
    runner = tiny_runner(base, **config)  # type: ignore[arg-type]
    found = adapters_for(base).values()
    for adapter in found:
        runner.put_adapter(runner.read_adapter(adapter))
    return runner, ["", *(it.fingerprint for it in found)]


def together(runner: Runner, adapters: list[str], num: int) -> list[list[int]]:
    """Greedy tokens of each prompt with its adapter, all of them in one batch."""
    drive = Drive(runner, block_size=32)
    for number, (prompt, adapter) in enumerate(zip(PROMPTS, adapters, strict=True)):
        drive.adapters[number] = adapter
        drive.begin(number, prompt)
    drive.step(*((n, 0, len(prompt)) for n, prompt in enumerate(PROMPTS)))
    drive.decode(range(len(PROMPTS)), num - 1)
    return [drive.tokens[n][len(prompt) :] for n, prompt in enumerate(PROMPTS)]


def alone(runner: Runner, number: int, adapter: str, num: int) -> list[int]:
    drive = Drive(runner, block_size=32)
    drive.adapters[0] = adapter
    drive.begin(0, PROMPTS[number])
    drive.prefill(0, 9)
    drive.decode([0], num - 1)
    return drive.tokens[0][len(PROMPTS[number]) :]


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_is_unmerged(family: str, tmp_path: Path) -> None:
    base = make_tiny_model(tmp_path / "base", f"{family}ForCausalLM")
    runner, fingerprints = loaded(base, dtype="float32")
    for (name, adapter), own in zip(adapters_for(base).items(), fingerprints[1:], strict=True):
        merge(read_spec(base), Path(adapter.path), tmp_path / name)
        expected = row_logits(tiny_runner(tmp_path / name, dtype="float32"), PROMPTS[1])
        assert_close(row_logits(runner, PROMPTS[1], adapter=own), expected)
        apart = row_logits(runner, PROMPTS[1]) - expected
        assert apart.abs().max() > 0.05 * expected.abs().max(), "the adapter changes much"


@needs_own_kernels
@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
def test_a_row_does_not_depend_on_its_neighbours(quantize: str, tmp_path: Path) -> None:
    base = make_tiny_model(tmp_path / "base", "Qwen3ForCausalLM", hidden_size=128)
    runner, adapters = loaded(base, dtype="bfloat16", quantize=quantize)
    bare = tiny_runner(base, dtype="bfloat16", quantize=quantize)
    mixed = together(runner, adapters, 12)
    for number, adapter in enumerate(adapters):
        assert mixed[number] == alone(runner, number, adapter, 12)
    assert mixed[0] == alone(bare, 0, "", 12)
    assert len({tuple(tokens) for tokens in mixed}) == len(mixed)


@needs_own_kernels
@torch.inference_mode()
def test_rows_of_the_base_are_the_same_to_the_bit(tmp_path: Path) -> None:
    base = make_tiny_model(tmp_path / "base", "Qwen3ForCausalLM")
    runner, adapters = loaded(base, dtype="bfloat16")
    expected = row_logits(tiny_runner(base, dtype="bfloat16"), PROMPTS[0])
    drive = Drive(runner, block_size=32)
    drive.tokens = {n: [*prompt, 0] for n, prompt in enumerate(PROMPTS)}
    drive.adapters = dict(enumerate(adapters))
    chunks = [drive.chunk(n, 0, len(p), rows=len(p)) for n, p in enumerate(PROMPTS)]
    rows = runner.forward(chunks, [drive.ids(n) for n in range(len(PROMPTS))])
    assert torch.equal(runner.lane.logits(rows)[: len(PROMPTS[0])], expected)


def test_a_dropped_adapter_leaves_no_trace(tmp_path: Path) -> None:
    base = make_tiny_model(tmp_path / "base", "LlamaForCausalLM")
    runner, adapters = loaded(base, dtype="bfloat16")
    before = alone(runner, 1, adapters[2], 8)
    for fingerprint in adapters[1:3]:
        runner.drop_adapter(fingerprint)
    kept = alone(runner, 1, adapters[4], 8)
    for name in ("queries and values", "attention"):
        runner.put_adapter(runner.read_adapter(adapters_for(base)[name]))
    assert alone(runner, 1, adapters[2], 8) == before
    assert alone(runner, 1, adapters[4], 8) == kept
    for fingerprint in adapters[1:]:
        runner.drop_adapter(fingerprint)
    assert runner.forward == runner.lane.forward
