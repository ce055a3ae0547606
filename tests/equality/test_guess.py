"""Guessing ahead changes no token and no bit of a log probability, whoever guesses and how well."""

import itertools
import json
from array import array
from pathlib import Path

import msgspec
import pytest
import torch

from headrace.text.tokenizer import Tokenizer
from headrace_common.cache import bytes_per_position
from headrace_common.checkpoints.find import find_model
from headrace_common.checkpoints.spec import read_spec
from headrace_common.config.settings import ModelConfig, SchedulerConfig
from headrace_common.ids import SequenceId, StreamId
from headrace_common.messages import NewSequence, Submit
from headrace_common.sampling import LLAMA_CPP_ORDER, Sampling
from headrace_engine.load import load
from headrace_engine.runner.lanes.native_text import NativeText
from headrace_engine.scheduler.guess import OwnGuesser
from headrace_engine.scheduler.guessing import MakeGuesser
from tests.kernels.own_kernels import needs_own_kernels
from tools.harness.drive import random_prompt
from tools.harness.engine_runs import Prophet, Run, run_engine
from tools.harness.tiny_models import make_tiny_model

pytestmark = needs_own_kernels  # torch's own products depend on the number of rows

FOLDER = find_model("headrace-mini")
TOKENIZER = Tokenizer.load(FOLDER)
ENDS = (2, 0)
JSON = json.dumps(
    {
        "grammars": [
            {
                "json_schema": {
                    "type": "object",
                    "properties": {
                        "the_name_of_it": {"enum": ["water", "wheel"]},
                        "the_number_of_them": {"type": "integer", "maximum": 999},
                    },
                    "required": ["the_name_of_it", "the_number_of_them"],
                    "additionalProperties": False,
                }
            }
        ]
    }
)
KINDS: list[dict[str, object]] = [
    {"temperature": 0, "num_logprobs": 2},
    {"temperature": 1, "num_logprobs": 0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0, "repetition_penalty": 1.3, "num_logprobs": 1},
    {"temperature": 1, "frequency_penalty": 0.6, "presence_penalty": 0.4},
    {"temperature": 0, "logit_bias": {100: 5.0, 7: -3.0}, "min_tokens": 9},
    {"temperature": 0, "grammar": JSON, "num_logprobs": 1},
    {"temperature": 1.5, "grammar": JSON, "frequency_penalty": 0.2},
    {"temperature": 1, "stop_token_ids": tuple(range(0, 1500, 37))},
    {"temperature": 0, "ignore_eos": True},
    {
        "temperature": 1.2,
        "samplers": LLAMA_CPP_ORDER,
        "xtc_probability": 0.5,
        "typical_p": 0.9,
        "dynatemp_range": 0.5,
        "repetition_penalty": 1.2,
        "repeat_last_n": 8,
        "num_logprobs": 1,
    },
    {"temperature": 1, "samplers": ("temperature", "mirostat"), "mirostat": 2, "num_logprobs": 0},
    {"temperature": 1, "samplers": ("temperature", "mirostat"), "mirostat": 1},
    {"temperature": 0, "samplers": LLAMA_CPP_ORDER, "dry_multiplier": 1.5},
]
MAX_TOKENS = 28


def submits(num: int, n: int = 1, kinds: list[dict[str, object]] = KINDS) -> list[Submit]:
    ids = itertools.count()
    made = []
    for number in range(num):
        text = f"{number}: " + "water over the wheel of the mill, " * (1 + number % 3)
        kind = kinds[number % len(kinds)] | {"seed": number, "end_token_ids": ENDS}
        sampling = msgspec.structs.replace(Sampling(max_tokens=MAX_TOKENS), **kind)
        made.append(
            Submit(
                StreamId(str(number)),
                (array("i", TOKENIZER.encode(text, add_special_tokens=True)).tobytes(),),
                tuple(NewSequence(SequenceId(next(ids)), 0, choice) for choice in range(n)),
                sampling,
                arrival=float(number),
            )
        )
    return made


def run(
    asked: list[Submit],
    guess: str | int,
    make_guesser: MakeGuesser | None = None,
    folder: Path = FOLDER,
    **config: object,
) -> Run:
    config = {"dtype": "bfloat16", "kv_cache_memory_bytes": 1 << 24, "threads": 1} | config
    config = {"max_model_len": 256} | config
    scheduler = SchedulerConfig(guess=guess, max_num_seqs=4, max_stall_ms="off", max_step_ms="off")
    loaded = load(ModelConfig(model=str(folder), scheduler=scheduler, **config))
    if make_guesser is not None:
        loaded.scheduler._planner._guessing._make_guesser = make_guesser
    return run_engine(loaded.scheduler, loaded.runner, asked, loaded.grammars)


@pytest.fixture(scope="module")
def plain() -> Run:
    return run(submits(20), "off")


@pytest.mark.parametrize("share", [1.0, 0.6, 0.0])
def test_right_wrong_and_mixed_guesses_change_nothing(plain: Run, share: float) -> None:
    told = run(submits(20), "auto", lambda sequence: Prophet(sequence, plain.answers, share))
    assert told.answers == plain.answers
    assert told.status.num_guessed > 200
    num_saved = plain.num_steps - told.num_steps
    match share:
        case 1.0:
            assert num_saved > plain.num_steps / 3
        case 0.0:
            assert told.status.num_accepted == 0
        case _:
            assert 0 < told.status.num_accepted < told.status.num_guessed


def test_its_own_guesses_save_steps(plain: Run) -> None:
    own = run(submits(20), "auto", lambda sequence: OwnGuesser())
    assert own.answers == plain.answers
    assert own.status.num_accepted > 20 and own.num_steps < plain.num_steps


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_so_it_is_in_fewer_bits(quantize: str) -> None:
    plain = run(submits(10), "off", quantize=quantize)
    told = run(
        submits(10),
        "auto",
        lambda sequence: Prophet(sequence, plain.answers, 0.8),
        quantize=quantize,
    )
    assert told.answers == plain.answers and told.status.num_accepted > 50


def test_choices_of_one_prompt_guess_for_themselves() -> None:
    plain = run(submits(10, n=3), "off")
    told = run(submits(10, n=3), 4, lambda sequence: Prophet(sequence, plain.answers, 0.8))
    assert told.answers == plain.answers and told.status.num_accepted > 50


@pytest.mark.parametrize(
    "architecture",
    ["Qwen3MoeForCausalLM", "Gemma3ForCausalLM", "GptOssForCausalLM", "Qwen3_5ForCausalLM"],
)
def test_experts_windows_caps_and_states_say_the_same(architecture: str, tmp_path: Path) -> None:
    folder = make_tiny_model(
        tmp_path / "tiny", architecture, head_dim=32, dtype=torch.bfloat16, pad_token_id=0
    )
    asked = submits(6, kinds=KINDS[:3])
    ids = [array("i", random_prompt(40, seed=number)).tobytes() for number in range(6)]
    asked = [msgspec.structs.replace(s, prompts=(i,)) for s, i in zip(asked, ids, strict=True)]
    plain = run(asked, "off", folder=folder)
    told = run(asked, "auto", lambda s: Prophet(s, plain.answers, 0.8), folder)
    assert told.answers == plain.answers and told.status.num_accepted > 20


def test_preempted_streams_guess_and_say_the_same() -> None:
    plain = run(submits(40), "off", block_size=16)
    told = run(
        submits(40),
        "auto",
        lambda sequence: Prophet(sequence, plain.answers, 0.7),
        block_size=16,
        max_model_len=128,
        kv_cache_memory_bytes=128 * position_bytes(),
    )
    assert told.status.num_preemptions > 0
    assert told.answers == plain.answers


def submits_after_a_kill(plain: Run) -> list[Submit]:
    """Return 20 requests whose first half of the answer is known, as after an engine's death."""
    asked = []
    for submit in submits(20):
        (new,) = submit.sequences
        told = [token_id for token_id, _ in plain.answers[new.sequence_id][0]]
        half = array("i", told[: len(told) // 2])
        state = plain.states[new.sequence_id][len(half) - 1] if half else b""
        again = (msgspec.structs.replace(new, generated=half.tobytes(), state=state),)
        asked.append(msgspec.structs.replace(submit, sequences=again))
    return asked


def assert_rest(rest: Run, plain: Run) -> None:
    """Check that each answer is the second half of the undisturbed answer."""
    for name, (tokens, finish) in plain.answers.items():
        assert rest.answers[name] == (tokens[len(tokens) // 2 :], finish)


def test_who_goes_on_after_a_kill_says_the_same(plain: Run) -> None:
    asked = submits_after_a_kill(plain)
    rest = run(asked, "auto", lambda sequence: Prophet(sequence, plain.answers, 0.8))
    assert_rest(rest, plain)


def position_bytes() -> int:
    return bytes_per_position(NativeText.cache_of(read_spec(FOLDER)), 2)
