"""A draft model changes no token and no bit of a log probability, however good the model is."""

import shutil
from array import array
from pathlib import Path

import msgspec
import pytest
import torch

from headrace_common.checkpoints.find import find_model
from headrace_common.checkpoints.spec import read_spec
from headrace_common.messages import Submit
from headrace_engine.scheduler.guess import Guess
from headrace_engine.scheduler.sequence import Sequence
from tests.equality.test_guess import (
    KINDS,
    assert_rest,
    position_bytes,
    run,
    submits,
    submits_after_a_kill,
)
from tests.kernels.own_kernels import needs_own_kernels
from tools.harness.drive import random_prompt
from tools.harness.engine_runs import Run
from tools.harness.tiny_models import add_mtp_layer, make_tiny_model

pytestmark = needs_own_kernels  # torch's own products depend on the number of rows

MINI = find_model("headrace-mini")
PLAIN_DRAWS: list[dict[str, object]] = [
    {"temperature": 0, "ignore_eos": True},
    {"temperature": 1, "ignore_eos": True, "num_logprobs": 1},
    {"temperature": 0.8, "top_p": 0.9, "ignore_eos": True},
]


class NoGuesser:
    """Guesses nothing, so that the draft model chooses every guess."""

    def __init__(self, sequence: Sequence) -> None:
        pass

    def guess(self, token_ids: "array[int]", forced: tuple[int, ...], most: int) -> Guess:
        return Guess()


@pytest.fixture(scope="module")
def poor(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Make a draft model with random weights and the tokenizer of headrace-mini."""
    folder = make_tiny_model(
        tmp_path_factory.mktemp("poor") / "tiny",
        head_dim=32,
        vocab_size=read_spec(MINI).vocab_size,
        dtype=torch.bfloat16,
    )
    shutil.copy(MINI / "tokenizer.json", folder)
    return str(folder)


@pytest.fixture(scope="module")
def plain() -> Run:
    return run(submits(20), "off")


def test_a_model_that_drafts_for_itself_is_always_right() -> None:
    """The model draws with the same random numbers when it drafts, so even random draws agree."""
    asked = submits(12, kinds=PLAIN_DRAWS)
    alone = run(asked, "off")
    told = run(asked, "auto", NoGuesser, draft="headrace-mini")
    assert told.answers == alone.answers
    assert told.status.num_drafted_right == told.status.num_drafted > 100
    assert told.num_steps < alone.num_steps / 2


def test_drafts_help_with_every_kind_of_request(plain: Run) -> None:
    told = run(submits(20), "auto", NoGuesser, draft="headrace-mini")
    assert told.answers == plain.answers
    assert told.status.num_drafted_right > 100 and told.num_steps < plain.num_steps


def test_a_poor_draft_model_changes_nothing(plain: Run, poor: str) -> None:
    told = run(submits(20), "auto", NoGuesser, draft=poor)
    assert told.answers == plain.answers
    assert told.status.num_drafted > 20
    assert told.status.num_drafted_right < told.status.num_drafted / 10


def test_drafts_and_guesses_from_the_text_are_used_together(plain: Run) -> None:
    told = run(submits(20), "auto", draft="headrace-mini")
    status = told.status
    assert told.answers == plain.answers
    assert 0 < status.num_drafted < status.num_guessed
    assert 0 < status.num_drafted_right < status.num_accepted


def test_choices_of_one_prompt_draft_for_themselves() -> None:
    asked = submits(9, n=3, kinds=PLAIN_DRAWS)
    alone = run(asked, "off")
    told = run(asked, "auto", NoGuesser, draft="headrace-mini")
    assert told.answers == alone.answers
    # The draft model's part of the prompt is shared and copied like that of the served model.
    assert told.status.num_drafted_right == told.status.num_drafted > 100


def test_a_cached_prefix_also_has_the_draft_models_part() -> None:
    asked = submits(12, kinds=PLAIN_DRAWS[:1])
    asked = [msgspec.structs.replace(submit, prompts=asked[2].prompts) for submit in asked]
    alone = run(asked, "off", block_size=16)
    told = run(asked, "auto", NoGuesser, draft="headrace-mini", block_size=16)
    assert told.answers == alone.answers
    assert told.status.num_drafted_right == told.status.num_drafted > 100


def test_an_mtp_layer_drafts_after_a_cached_prefix(tmp_path: Path) -> None:
    options = {"head_dim": 32, "dtype": torch.bfloat16, "pad_token_id": 0}
    folder = make_tiny_model(tmp_path / "tiny", "Qwen3_5ForCausalLM", **options)
    add_mtp_layer(folder, is_right=True)
    asked = submits_of_ids(6, PLAIN_DRAWS[:1])
    asked = [msgspec.structs.replace(submit, prompts=asked[2].prompts) for submit in asked]
    alone = run(asked, "off", folder=folder, block_size=16)
    told = run(asked, "auto", NoGuesser, folder=folder, draft="mtp", block_size=16)
    assert told.answers == alone.answers
    assert told.status.num_drafted_right > 0.9 * told.status.num_drafted > 50


# Both models share the memory, which holds little more than one stream of 128 tokens. The poor
# model caches fewer bytes per token.
@pytest.mark.parametrize(("draft", "factor"), [("headrace-mini", 2.0), ("poor", 1.6)])
def test_preempted_streams_draft_and_say_the_same(
    draft: str, factor: float, request: pytest.FixtureRequest
) -> None:
    plain = run(submits(40), "off", block_size=16)
    told = run(
        submits(40),
        "auto",
        NoGuesser,
        block_size=16,
        max_model_len=128,
        kv_cache_memory_bytes=int(factor * 128 * position_bytes()),
        draft=request.getfixturevalue(draft) if draft == "poor" else draft,
    )
    assert told.answers == plain.answers
    assert told.status.num_preemptions > 0 and told.status.num_drafted > 0


def test_after_a_kill_a_stream_with_drafts_says_the_same(plain: Run) -> None:
    rest = run(submits_after_a_kill(plain), "auto", draft="headrace-mini")
    assert rest.status.num_drafted_right > 20
    assert_rest(rest, plain)


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3_5ForCausalLM"])
def test_a_model_with_states_takes_drafts(architecture: str, tmp_path: Path) -> None:
    options = {"head_dim": 32, "dtype": torch.bfloat16, "pad_token_id": 0}
    folder = make_tiny_model(tmp_path / "tiny", architecture, **options)
    draft = make_tiny_model(tmp_path / "draft", num_hidden_layers=1, **options)
    asked = submits_of_ids(6, KINDS[:3])
    alone = run(asked, "off", folder=folder)
    told = run(asked, "auto", folder=folder, draft=str(draft))
    assert told.answers == alone.answers and told.status.num_drafted > 20


def submits_of_ids(num: int, kinds: list[dict[str, object]], n: int = 1) -> list[Submit]:
    """Ask a tiny model, whose tokens are bytes."""
    ids = [array("i", random_prompt(40, seed=number)).tobytes() for number in range(num)]
    asked = submits(num, n, kinds)
    return [msgspec.structs.replace(s, prompts=(i,)) for s, i in zip(asked, ids, strict=True)]


@pytest.fixture(scope="module")
def with_mtp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a hybrid whose MTP layer has random weights, so that nearly all guesses are wrong."""
    folder = tmp_path_factory.mktemp("mtp") / "tiny"
    options = {"head_dim": 32, "dtype": torch.bfloat16, "pad_token_id": 0}
    return add_mtp_layer(make_tiny_model(folder, "Qwen3_5ForCausalLM", **options))


def test_a_poor_mtp_layer_changes_nothing(with_mtp: Path) -> None:
    asked = submits_of_ids(6, KINDS[:3])
    alone = run(asked, "off", folder=with_mtp)
    told = run(asked, "auto", NoGuesser, folder=with_mtp)
    assert told.answers == alone.answers and told.status.num_drafted > 20
    off = run(asked, "auto", NoGuesser, folder=with_mtp, draft="off")
    assert off.answers == alone.answers and off.status.num_drafted == 0


def test_streams_that_wait_for_a_slot_with_an_mtp_layer_say_the_same(with_mtp: Path) -> None:
    asked = submits_of_ids(12, KINDS[:3])
    plain = run(asked, "off", folder=with_mtp, block_size=16)
    size = {"block_size": 16, "max_model_len": 80, "kv_cache_memory_bytes": 600_000}
    told = run(asked, "auto", NoGuesser, folder=with_mtp, **size)
    assert told.answers == plain.answers and told.status.num_drafted > 100


@pytest.mark.parametrize("architecture", ["Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"])
def test_a_good_mtp_layer_saves_steps(architecture: str, tmp_path: Path) -> None:
    options = {"head_dim": 32, "dtype": torch.bfloat16, "pad_token_id": 0}
    folder = make_tiny_model(tmp_path / "tiny", architecture, **options)
    add_mtp_layer(folder, is_right=True)
    asked = submits_of_ids(4, PLAIN_DRAWS, n=2)
    alone = run(asked, "off", folder=folder)
    told = run(asked, "auto", NoGuesser, folder=folder, draft="mtp")
    assert told.answers == alone.answers
    # The layer rounds once more than the model, which matters if two tokens are equally likely.
    assert told.status.num_drafted_right > 0.9 * told.status.num_drafted > 50
    assert told.num_steps < 0.6 * alone.num_steps
