"""Encoder-decoder models: any pieces of the encoder, any order of answers, transformers' tokens."""

from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headrace_common.ids import SequenceId, SlotId
from headrace_common.plan import (
    Begin,
    Chunk,
    EncodeChunk,
    PromptInputs,
    SlotCopy,
    StepPlan,
)
from headrace_engine.runner.runner import Runner
from tools.harness.drive import GREEDY, assert_close, random_prompt, tiny_runner
from tools.harness.tiny_models import make_tiny_seq2seq

SOURCE = random_prompt(60)


@pytest.fixture(scope="module", params=["T5", "BART", "GatedT5"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_seq2seq(tmp_path_factory.mktemp("seq2seq") / "tiny", request.param)


@pytest.fixture(scope="module")
def runner(folder: Path) -> Runner:
    return tiny_runner(folder, max_model_len=256)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return transformers.AutoModelForSeq2SeqLM.from_pretrained(
        folder, attn_implementation="eager"
    ).eval()


class Answers:
    """Answers to sources, each in a slot of its own."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.form = runner, runner.lane.traits.source
        self.tokens: dict[int, list[int]] = {}

    def begin(self, number: int, source: list[int], further: tuple[int, ...] = ()) -> None:
        self.tokens[number] = [*self.form.start_ids, *further]
        data = array("i", source).tobytes()
        work = self.form.encoding(len(source), data)
        self.num_units, works = work.num_units, PromptInputs((work,))
        ids = array("i", self.tokens[number])
        begin = Begin(SequenceId(number), ids, len(ids) - len(further), 0, GREEDY, works)
        self.runner.launch(StepPlan(begun=(begin,))).result()

    def encode(self, number: int, piece: int = 1 << 20) -> None:
        for start in range(0, self.num_units, piece):
            end = min(start + piece, self.num_units)
            chunk = EncodeChunk(SequenceId(number), 0, start, end, SlotId(number))
            self.runner.launch(StepPlan(encoded=(chunk,))).result()

    def step(self, *shares: tuple[int, int]) -> None:
        """Chunks of (sequence, start), each to the last token, of which it draws the next."""
        chunks = tuple(
            Chunk(
                SequenceId(n), start, len(self.tokens[n]) - start, 1, (SequenceId(n),),
                array("i"), SlotId(n),
            )
            for n, start in shares
        )  # fmt: skip
        result = self.runner.launch(StepPlan(chunks=chunks)).result()
        for chunk, part in zip(chunks, result.chunks, strict=True):
            self.tokens[chunk.sequence_id].extend(part.drawn[0].token_ids)

    def decode(self, numbers: list[int], num_steps: int) -> None:
        for _ in range(num_steps):
            self.step(*((n, len(self.tokens[n]) - 1) for n in numbers))


def answer(runner: Runner, source: list[int], num: int, piece: int = 1 << 20) -> list[int]:
    answers = Answers(runner)
    answers.begin(0, source)
    answers.encode(0, piece)
    answers.step((0, 0))
    answers.decode([0], num - 1)
    return answers.tokens[0]


@torch.inference_mode()
def logits_of(reference: Any, source: list[int], tokens: list[int]) -> torch.Tensor:
    return reference(
        input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([tokens])
    ).logits[0]


def test_an_answer_starts_with_what_the_model_forces(runner, reference):
    forced = reference.generation_config.forced_bos_token_id
    assert runner.lane.traits.source.start_ids == ((257,) if forced is None else (257, 256))


@pytest.mark.parametrize("piece", [1, 3, 100])
@torch.inference_mode()
def test_pieces_of_the_encoder_give_the_logits_of_transformers(runner, reference, piece: int):
    answers = Answers(runner)
    assert answers.form.num_layers == 3 and answers.form.num_cross
    answers.begin(0, SOURCE)
    answers.encode(0, piece)
    tokens = array("i", [*answers.form.start_ids, *random_prompt(20, seed=1)])
    rows = []
    for start, end in ((0, 5), (5, 6), (6, len(tokens))):
        chunk = Chunk(SequenceId(0), start, end - start, end - start, (), array("i"), SlotId(0))
        rows.append(runner.lane.logits(runner.lane.forward([chunk], [tokens[start:end]])))
    assert_close(torch.cat(rows), logits_of(reference, SOURCE, tokens.tolist()))


def test_greedy_tokens_equal_those_of_transformers(runner, reference):
    tokens = answer(runner, SOURCE, 64, piece=1)
    num_start = len(runner.lane.traits.source.start_ids)
    logits = logits_of(reference, SOURCE, tokens[:-1])[num_start - 1 :]
    best = logits.topk(2, dim=-1)
    is_close = best.values[:, 0] - best.values[:, 1] < 1e-3 * logits.abs().amax(-1)
    is_wrong = best.indices[:, 0] != torch.tensor(tokens[num_start:])
    assert not (is_wrong & ~is_close).any() and is_wrong.sum() <= 1


def test_answers_side_by_side_are_those_given_alone(runner):
    sources = [random_prompt(length, seed=length) for length in (3, 40, 150)]
    answers = Answers(runner)
    for number, source in enumerate(sources):
        answers.begin(number, source)
        answers.encode(number, 1)
        answers.step((number, 0))
        answers.decode(list(range(number + 1)), 5)
    answers.decode([0, 1, 2], 5)
    for number, source in enumerate(sources):
        tokens = answers.tokens[number]
        num = len(tokens) - len(runner.lane.traits.source.start_ids)
        assert tokens == answer(runner, source, num)


def test_a_preempted_answer_goes_on_as_if_undisturbed(runner):
    expected = answer(runner, SOURCE, 24)
    num_start = len(runner.lane.traits.source.start_ids)
    answers = Answers(runner)
    answers.begin(3, SOURCE, tuple(expected[num_start : num_start + 10]))
    answers.encode(3, 2)
    answers.step((3, 0))
    answers.decode([3], 13)
    assert answers.tokens[3] == expected


def test_a_sibling_goes_on_from_a_copied_slot_and_writes_only_its_own(runner):
    answers = Answers(runner)
    answers.begin(0, SOURCE)
    answers.encode(0)
    answers.step((0, 0))
    answers.begin(1, SOURCE, tuple(answers.tokens[0][len(answers.form.start_ids) :]))
    runner.launch(StepPlan(slot_copies=(SlotCopy(SlotId(0), SlotId(1)),))).result()
    answers.decode([1], 6)
    answers.decode([0], 6)
    assert answers.tokens[0] == answers.tokens[1]


def test_a_model_that_knows_a_few_tokens_is_loaded_and_still_cut(tmp_path: Path):
    ids = {"decoder_start_token_id": 3, "pad_token_id": 3, "eos_token_id": 2, "bos_token_id": 1}
    folder = make_tiny_seq2seq(tmp_path / "few", "T5", vocab_size=16, **ids)
    runner = tiny_runner(folder, max_model_len=64)
    assert runner.lane.traits.source.can_be_cut
    assert max(answer(runner, [4, 5, 6], 8)) < 16
