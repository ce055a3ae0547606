"""Every lane computes what transformers computes, however its prompt is cut and whoever is near."""

from pathlib import Path

import pytest
import torch
import transformers

from headrace_common.sampling import Sampling
from tools.harness.drive import (
    Drive,
    assert_close,
    assert_greedy,
    generate,
    random_prompt,
    row_logits,
    tiny_runner,
)

PROMPT = random_prompt(100)
LANES = ("native-text", "generic-text")


@pytest.fixture(scope="module", params=LANES)
def runner(request: pytest.FixtureRequest, folder: Path):
    return tiny_runner(folder, request.param)


@pytest.fixture(scope="module")
def reference(folder: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


@torch.inference_mode()
def test_logits_equal_those_of_transformers(runner, reference):
    assert_close(row_logits(runner, PROMPT), reference(torch.tensor([PROMPT])).logits[0])


def test_greedy_tokens_equal_those_of_transformers_over_256_steps(runner, reference):
    assert_greedy(PROMPT + generate(runner, PROMPT, 256), len(PROMPT), reference)


def test_both_lanes_generate_the_same(folder: Path):
    native, generic = (generate(tiny_runner(folder, lane), PROMPT, 128) for lane in LANES)
    assert native == generic


@pytest.mark.parametrize("chunk", [1, 4, 16, 64])
def test_a_prompt_in_chunks_gives_the_logits_of_the_whole(runner, chunk):
    assert_close(row_logits(runner, PROMPT, chunk), row_logits(runner, PROMPT))


def test_sequences_in_one_batch_get_the_tokens_that_they_get_alone(runner):
    prompts = [random_prompt(length, seed=length) for length in (1, 15, 16, 17, 40)]
    drive = Drive(runner, room=128)
    for number, prompt in enumerate(prompts):
        drive.begin(number, prompt)
    drive.step(*((number, 0, len(prompt)) for number, prompt in enumerate(prompts)))
    drive.decode(range(5), 40)
    for number, prompt in enumerate(prompts):
        assert drive.tokens[number][len(prompt) :] == generate(runner, prompt, 41)


def test_a_prompt_chunk_beside_decoding_sequences_changes_nothing(runner):
    drive = Drive(runner, room=256)
    drive.begin(0, PROMPT[:20])
    drive.prefill(0)
    drive.begin(1, PROMPT)
    for start in range(0, 100, 25):
        drive.step((0, len(drive.tokens[0]) - 1, 1), (1, start, 25))
    drive.decode([0, 1], 20)
    assert drive.tokens[0][20:] == generate(runner, PROMPT[:20], 25)
    assert drive.tokens[1][100:] == generate(runner, PROMPT, 21)


def test_a_sequence_begun_again_with_its_tokens_goes_on_as_if_undisturbed(runner):
    whole = generate(runner, PROMPT, 40)
    drive = Drive(runner)
    drive.begin(3, PROMPT + whole[:15], generated=15)
    drive.prefill(3, chunk=32)
    drive.decode([3], 24)
    assert drive.tokens[3][100:] == whole


def test_seeded_draws_are_the_same_cut_or_whole_batched_or_alone_resumed_or_not(runner):
    dice = [Sampling(temperature=0.9, top_p=0.95, seed=seed) for seed in (1, -2)]
    alone = [generate(runner, PROMPT, 100, sampling=each) for each in dice]
    assert alone[0] != alone[1]
    drive = Drive(runner, room=256)
    for number, sampling in enumerate(dice):
        drive.begin(number, PROMPT, sampling)
        drive.prefill(number, chunk=7)
    drive.decode([0, 1], 99)
    assert [drive.tokens[number][100:] for number in (0, 1)] == alone
    drive.begin(2, PROMPT + alone[0][:60], dice[0], generated=60)
    drive.prefill(2)
    drive.decode([2], 39)
    assert drive.tokens[2][100:] == alone[0]


def test_bfloat16_stays_near_float32(folder: Path):
    exact, coarse = tiny_runner(folder), tiny_runner(folder, dtype="bfloat16")
    assert_close(row_logits(coarse, PROMPT), row_logits(exact, PROMPT), tolerance=0.2)
