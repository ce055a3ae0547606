from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_common.config.settings import ModelConfig
from headrace_common.ids import BlockId, SequenceId
from headrace_common.plan import Begin, BlockCopy, Chunk, StepPlan
from headrace_engine.runner.load import load_runner
from headrace_engine.runner.runner import Runner
from tests.kernels.own_kernels import forget_openmp, needs_own_kernels
from tools.harness.drive import GREEDY, Drive, generate, random_prompt, tiny_runner
from tools.harness.tiny_models import make_tiny_model

A, B = SequenceId(0), SequenceId(1)
POSITION = 3 * 2 * 16 * 2 * 4  # bytes: layers, kv heads, head size, keys and values, float32


@pytest.fixture(scope="module")
def runner(folder: Path) -> Runner:
    return tiny_runner(folder)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return tiny_runner(make_tiny_model(tmp_path_factory.mktemp("hybrid"), "Qwen3_5ForCausalLM"))


def test_blocks_are_as_many_as_the_sequences_need_or_the_memory_holds(runner: Runner) -> None:
    plenty = runner.lane.layout(1 << 40, 4, 100, 16)
    assert (plenty.num_blocks, plenty.max_positions, plenty.num_slots) == (4 * 7, 100, 0)
    scarce = runner.lane.layout(5 * 16 * POSITION + 7, 4, 100, 16)
    assert (scarce.num_blocks, scarce.max_positions) == (5, 80)


@pytest.mark.parametrize("free_bytes", [0, 30_000, 100_000, 1 << 20, 1 << 24, 1 << 40])
def test_slots_snapshots_and_blocks_together_fit_the_memory(
    free_bytes: int, hybrid: Runner
) -> None:
    layout = hybrid.lane.layout(free_bytes, 64, 500, 48)
    num_states = layout.num_slots + layout.num_snapshots
    slot_bytes = 2 * 4 * (4 * 16 * 64 + 3 * (2 * 2 * 16 + 4 * 64))  # layers, float32
    block_bytes = 48 * 2 * 2 * 16 * 4  # keys and values, kv heads, head size, float32
    if layout.num_blocks:  # else the model is refused
        assert num_states * slot_bytes + layout.num_blocks * block_bytes <= free_bytes
    assert 1 <= layout.num_slots <= 64 and layout.num_snapshots <= 2 * layout.num_slots
    assert layout.snapshot_every % 48 == 0
    if free_bytes == 1 << 40:
        assert (layout.num_slots, layout.num_snapshots, layout.max_positions) == (64, 128, 500)


def test_rows_that_nobody_asked_for_never_reach_the_head(runner: Runner) -> None:
    rows: list[int] = []
    hook = runner.lane._model.head.register_forward_hook(
        lambda _, inputs, __: rows.append(len(inputs[0]))
    )
    drive = Drive(runner, room=64)
    drive.begin(0, random_prompt(40))
    drive.begin(1, random_prompt(10))
    drive.step((0, 0, 20), (1, 0, 10))
    drive.step((0, 20, 20), (1, 10, 1))
    hook.remove()
    assert rows == [1, 2]


def test_a_sibling_goes_on_from_a_copied_last_block(runner: Runner) -> None:
    prompt = random_prompt(20)
    both = tuple(Begin(s, array("i", prompt), 20, k, GREEDY) for k, s in enumerate((A, B)))
    first = Chunk(A, 0, 20, 1, (A, B), array("i", [0, 1]))
    copy = BlockCopy(BlockId(1), BlockId(2))
    runner.launch(StepPlan(both, (first,), block_copies=(copy,))).result()
    drawn: dict[SequenceId, list[int]] = {A: [], B: []}
    for start in range(20, 30):
        chunks = (
            Chunk(A, start, 1, 1, (A,), array("i", [0, 1])),
            Chunk(B, start, 1, 1, (B,), array("i", [0, 2])),
        )
        result = runner.launch(StepPlan(chunks=chunks)).result()
        for chunk, part in zip(chunks, result.chunks, strict=True):
            drawn[chunk.sequence_id] += part.drawn[0].token_ids
    assert drawn[A] == drawn[B] == generate(runner, prompt, 11)[1:]


def test_a_cached_prefix_is_taken_from_another_sequences_blocks(runner: Runner) -> None:
    prompt = random_prompt(50)
    cold = generate(runner, prompt, 10)
    drive = Drive(runner)
    drive.begin(0, prompt)
    drive.prefill(0, start=48)  # the blocks of the run before still hold the first 48
    drive.decode([0], 9)
    assert drive.tokens[0][50:] == cold


def test_the_same_run_twice_gives_the_same_bits(runner: Runner) -> None:
    chunk = Chunk(A, 0, 30, 30, (), array("i", [0, 1]))
    ids = [array("i", random_prompt(30))]
    with torch.inference_mode():
        one, two = (runner.lane.logits(runner.lane.forward([chunk], ids)) for _ in range(2))
    assert torch.equal(one, two)


def test_there_is_one_copy_of_the_weights(runner: Runner, folder: Path) -> None:
    assert runner.lane.weight_bytes == runner.lane.num_parameters * 4
    stored = (folder / "model.safetensors").stat().st_size
    assert 0 <= stored - runner.lane.weight_bytes < 16_384  # the header


def captured_and_not(folder: Path) -> tuple[Runner, Runner]:
    captured, plain = tiny_runner(folder), tiny_runner(folder)
    plain.lane._hidden = plain.lane._forward
    return captured, plain


@needs_own_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_small_steps_are_captured_from_the_first_on(dtype: str, folder: Path) -> None:
    forget_openmp()
    config = ModelConfig(model=str(folder), dtype=dtype, max_model_len=64)
    runner: Any = load_runner(config, folder)[0]
    generate(runner, list(range(1, 8)), 3, chunk=5)
    assert {1, 2, 5} <= runner.lane._hidden._calls.keys()


def test_repeated_decode_steps_compute_what_uncaptured_ones_do(folder: Path) -> None:
    runs = []
    for runner in captured_and_not(folder):
        drive = Drive(runner, room=80)
        for number, length in enumerate((5, 40, 21)):
            drive.begin(number, random_prompt(length))
            drive.prefill(number)
        for numbers in ((0, 1, 2), (2,), (0, 1), (0, 1, 2), (1,), (2, 0), (0, 1, 2)):
            drive.decode(numbers, 3)
        runs.append(drive.tokens)
    assert runs[0] == runs[1]


def test_small_mixed_steps_compute_what_uncaptured_ones_do(folder: Path) -> None:
    prompts = [random_prompt(length) for length in (30, 30, 12)]
    runs = []
    for runner in captured_and_not(folder):
        drive = Drive(runner, room=80)
        for number, prompt in enumerate(prompts):
            drive.begin(number, prompt)
        at = [0, 0, 0]
        for lengths in ((3, 5, 2), (5, 2, 3), (2, 3, 5), (10, 10, 1), (10, 10, 1)):
            drive.step(*((n, at[n], length) for n, length in enumerate(lengths)))
            at = [start + length for start, length in zip(at, lengths, strict=True)]
        drive.decode((0, 1, 2), 3)
        runs.append(drive.tokens)
    assert runs[0] == runs[1]
    assert [len(runs[0][n]) - len(prompt) for n, prompt in enumerate(prompts)] == [4, 4, 4]
