"""Tests that lane llama-cpp answers like llama.cpp, with chunked prompts and batches, too."""

from pathlib import Path

import msgspec
import pytest

from headrace.cli.capacity import cache_bytes
from headrace_common.checkpoints.find import find_model
from headrace_common.config.settings import SchedulerConfig
from headrace_common.errors import ModelError
from headrace_common.ids import BlockId, SlotId
from headrace_common.plan import BlockCopy, SlotCopy, StepPlan
from headrace_common.sampling import Sampling
from headrace_engine.runner.runner import Runner
from tests.llama.models import (
    ARCHITECTURES,
    VOCAB,
    write_gpt_oss,
    write_hybrid,
    write_model,
)
from tools.harness.drive import (
    Drive,
    assert_close,
    generate,
    random_prompt,
    row_logits,
    tiny_runner,
)
from tools.harness.llama_alone import Alone

PROMPT = random_prompt(60, VOCAB)
K_FILES = sorted(Path("tests/checkpoints/data").glob("*.gguf"))


@pytest.fixture(scope="module", params=ARCHITECTURES)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny") / "tiny-F32.gguf", request.param)


@pytest.fixture(scope="module")
def runner(file: Path) -> Runner:
    sizes = {"max_model_len": 256, "block_size": 16}
    return tiny_runner(find_model(str(file)), "llama-cpp", dtype="float32", **sizes)


@pytest.fixture(scope="module")
def alone(file: Path) -> Alone:
    return Alone(file)


def is_recurrent(runner: Runner) -> bool:
    return runner.lane.traits.facts.memory == "slot"


def test_only_recurrent_models_use_slots_instead_of_blocks(file, runner) -> None:
    config = (find_model(str(file)) / "config.json").read_text()
    assert is_recurrent(runner) == ("mamba" in config)
    layout = runner.lane.layout(1 << 24, 4, 100, 16)
    assert bool(layout.num_slots) == is_recurrent(runner) != bool(layout.num_blocks)


def test_greedy_tokens_equal_those_of_llama_cpp(runner, alone) -> None:
    found = generate(runner, PROMPT, 64)
    assert found == alone.generate(PROMPT, 64)


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_a_chunked_prompt_gives_the_logits_of_the_whole(runner, alone, chunk: int) -> None:
    assert_close(row_logits(runner, PROMPT, chunk), row_logits(runner, PROMPT), 3e-3)
    alone.assert_greedy(PROMPT, generate(runner, PROMPT, 64, chunk=chunk))


def test_batched_sequences_get_the_same_tokens_as_single_ones(runner, alone) -> None:
    prompts = [random_prompt(length, VOCAB, seed=length) for length in (1, 30, 17)]
    drive = Drive(runner, room=128)
    for number, prompt in enumerate(prompts):
        drive.begin(number, prompt)
    drive.step((0, 0, 1), (1, 0, 9))
    drive.step((0, 1, 1), (1, 9, 21), (2, 0, 17))
    drive.decode(range(3), 30)
    for number, prompt in enumerate(prompts):
        alone.assert_greedy(prompt, drive.tokens[number][len(prompt) :])


def test_a_restarted_sequence_continues_with_the_same_tokens(runner, alone) -> None:
    whole = generate(runner, PROMPT, 40)
    drive = Drive(runner, room=128)
    drive.begin(3, PROMPT + whole[:15], generated=15)
    drive.prefill(3, chunk=32)
    drive.decode([3], 24)
    alone.assert_greedy(PROMPT, drive.tokens[3][len(PROMPT) :])


def test_a_sibling_sequence_continues_from_copied_memory(runner, alone) -> None:
    drive = Drive(runner, room=128)
    drive.begin(0, PROMPT)
    drive.prefill(0)
    drive.begin(1, drive.tokens[0], generated=1)
    if is_recurrent(runner):
        plan = StepPlan(slot_copies=(SlotCopy(SlotId(0), SlotId(1)),))
        runner.launch(plan).result()
        drive.decode([0, 1], 10)
    else:
        # The first three blocks are shared; the fourth is copied.
        runner.launch(StepPlan(block_copies=(BlockCopy(BlockId(3), BlockId(11)),))).result()
        sharing = drive.chunk
        shared = {0: list(range(8)), 1: [0, 1, 2, *range(11, 16)]}

        def chunk(number: int, *rest: int, rows: int | None = None):
            made = sharing(number, *rest, rows=rows)
            ids = type(made.block_ids)("i", shared[number])
            return msgspec.structs.replace(made, block_ids=ids)

        drive.chunk = chunk  # type: ignore[method-assign]
        drive.decode([0, 1], 10)
    assert drive.tokens[0] == drive.tokens[1]
    alone.assert_greedy(PROMPT, drive.tokens[1][len(PROMPT) :])


def test_seeded_sampling_is_reproducible(runner) -> None:
    dice = Sampling(temperature=0.9, top_p=0.95, seed=1)
    first = generate(runner, PROMPT, 40, sampling=dice)
    assert generate(runner, PROMPT, 40, sampling=dice) == first
    assert first != generate(runner, PROMPT, 40)


def test_prompt_logits_may_take_several_calls(runner) -> None:
    prompt = random_prompt(200, VOCAB)  # one call returns at most 64 rows
    whole, cut = row_logits(runner, prompt), row_logits(runner, prompt, 40)
    error = (whole - cut).abs().amax(-1) / cut.abs().amax(-1)
    # Rounding may choose another expert for a token, and all later tokens attend to it.
    assert error.median() < 1e-2 and (error[:60] < 1e-2).all()


@pytest.mark.parametrize("path", K_FILES, ids=lambda path: path.stem)
def test_native_text_chooses_the_same_clear_tokens_as_llama_cpp(path: Path) -> None:
    """Compare only tokens with a clear margin, since llama.cpp rounds activations to 8 bits."""
    native = tiny_runner(find_model(str(path)), dtype="float32")
    theirs = tiny_runner(find_model(str(path)), "llama-cpp", dtype="float32")
    assert (native.lane.traits.id, theirs.lane.traits.id) == ("native-text", "llama-cpp")
    tokens = PROMPT + generate(native, PROMPT, 64)
    ours, rows = (row_logits(one, tokens)[len(PROMPT) - 1 : -1] for one in (native, theirs))
    assert_close(rows, ours, 5e-2)
    best = ours.topk(2, dim=-1)
    is_clear = best.values[:, 0] - best.values[:, 1] > 5e-2 * ours.abs().amax(-1)
    assert is_clear.sum() >= 16
    assert (rows.argmax(-1) == best.indices[:, 0])[is_clear].all()


def median_error(folder: Path) -> float:
    """Return the median of each row's largest difference, relative to its largest logit."""
    native = tiny_runner(folder, dtype="float32")
    theirs = tiny_runner(folder, "llama-cpp", dtype="float32")
    assert (native.lane.traits.id, theirs.lane.traits.id) == ("native-text", "llama-cpp")
    ours, rows = (row_logits(one, PROMPT) for one in (native, theirs))
    error = (rows - ours).abs().amax(-1) / ours.abs().amax(-1)
    print(f"median {error.median():.2g}, largest {error.max():.2g}")
    return float(error.median())


@pytest.mark.parametrize("architecture", ["qwen3moe", "gemma2"])
def test_native_families_give_the_logits_of_llama_cpp(tmp_path: Path, architecture: str) -> None:
    """Compare medians in float32, since rounding may choose another of two similar experts."""
    folder = find_model(str(write_model(tmp_path / "tiny-F32.gguf", architecture)))
    assert median_error(folder) < 1e-2


@pytest.mark.parametrize(
    "architecture", ["Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM"]
)
def test_native_hybrids_give_the_logits_of_llama_cpp(tmp_path: Path, architecture: str) -> None:
    """Compare a file with the layout of llama.cpp's converter, which reorders value heads."""
    folder = find_model(str(write_hybrid(tmp_path, architecture)))
    assert median_error(folder) < 1e-2


@pytest.mark.parametrize("is_mxfp4", [False, True])
def test_native_gpt_oss_gives_the_logits_of_llama_cpp(tmp_path: Path, is_mxfp4: bool) -> None:
    """Allow a larger error for MXFP4, for which llama.cpp rounds activations to 8 bits."""
    folder = find_model(str(write_gpt_oss(tmp_path, is_mxfp4)))
    assert median_error(folder) < (5e-2 if is_mxfp4 else 1e-2)


def test_an_unknown_architecture_is_a_one_line_error(tmp_path: Path) -> None:
    file = write_model(tmp_path / "x.gguf", "nothing")
    with pytest.raises(ModelError, match="unknown model architecture: 'nothing'") as caught:
        tiny_runner(find_model(str(file)))
    assert "\n" not in str(caught.value)


def test_more_sequences_than_llama_cpp_supports_are_refused(file: Path) -> None:
    with pytest.raises(ModelError, match="at most 128 sequences at the same time"):
        tiny_runner(find_model(str(file)), "llama-cpp", scheduler=SchedulerConfig(max_num_seqs=200))


def test_cache_bytes_match_the_shapes_of_keys_values_and_states(file: Path, runner) -> None:
    """Expect float32 keys and values of 3 layers, 2 heads and 16 dimensions, or Mamba's states."""
    per_token, per_sequence = cache_bytes(runner.lane, 16)
    if is_recurrent(runner):
        states = 3 * 4 * 128 * (8 + 4 - 1)
        assert per_token == 0 and states <= per_sequence < 1.05 * states
    else:
        cells = 3 * 2 * 2 * 16 * 4
        assert cells <= per_token < 1.1 * cells and per_sequence == 0
