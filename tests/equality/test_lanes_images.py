"""Image-text models: chunk borders anywhere about an image give transformers' own answer."""

import io
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from headrace_common.errors import ModelError
from headrace_common.ids import SequenceId, SlotId
from headrace_common.plan import Begin, BlockCopy, Chunk, EncodeChunk, SlotCopy, StepPlan
from headrace_engine.runner.images import ImageProcessor, Prepared
from headrace_engine.runner.runner import Runner
from tools.harness.drive import GREEDY, assert_close, tiny_runner
from tools.harness.tiny_models import IMAGE_MARKS, make_tiny_image_model


def picture(seed: int, width: int = 40, height: int = 30) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


RED, BLUE = picture(1), picture(2)
NATIVE = ("Qwen3.5", "Qwen3.5-MoE")
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.5,
}
BLOCKS_EACH = 32  # of 8 positions each, in its memory


@pytest.fixture(scope="module", params=IMAGE_MARKS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_image_model(tmp_path_factory.mktemp("images"), kind)


@pytest.fixture(scope="module")
def runner(folder: Path) -> Runner:
    return tiny_runner(folder, max_model_len=256, block_size=8)


@pytest.fixture(scope="module")
def processor(kind: str, folder: Path) -> ImageProcessor:
    return ImageProcessor(folder, in_pieces=kind in NATIVE)


@pytest.fixture
def prepared(kind: str, processor: ImageProcessor, tmp_path: Path) -> Prepared:
    return prepare(processor, kind, [RED, BLUE], tmp_path)


def prepare(processor: ImageProcessor, kind: str, images: list[bytes], folder: Path) -> Prepared:
    file = folder / f"pixels-{len(list(folder.iterdir()))}"
    file.touch()
    text = "one" + "".join(f"{IMAGE_MARKS[kind]} and " for _ in images) + "what now"
    return processor.prepare(text, images, ["messages"] * len(images), str(file))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return transformers.AutoModelForImageTextToText.from_pretrained(
        folder, attn_implementation="eager"
    ).eval()


@torch.inference_mode()
def logits_of(
    reference: Any, processor: ImageProcessor, kind: str, tokens: list[int]
) -> torch.Tensor:
    """By one forward of everything, as transformers' own processor gives it."""
    text = f"one{IMAGE_MARKS[kind]} and {IMAGE_MARKS[kind]} and what now"
    made = processor._process(text, (RED, BLUE), ("", ""))
    made.pop("num_crops", None)
    num = made["input_ids"].shape[1]
    made["input_ids"] = torch.tensor([tokens])
    for name in ("attention_mask", "token_type_ids", "mm_token_type_ids"):
        if name in made:
            further = torch.full((1, len(tokens) - num), int(name == "attention_mask"))
            made[name] = torch.cat([made[name], further], dim=1)
    return reference(**made).logits[0]


class Talk:
    """One sequence in slot `number`; each image is encoded before the first chunk that needs it."""

    def __init__(self, runner: Runner, prepared: Prepared, number: int = 0) -> None:
        self.runner, self.number, self.slot = runner, number, SlotId(number % 8)
        self.tokens, self.inputs = prepared.token_ids.tolist(), prepared.inputs
        self.num_encoded = 0
        first = self.slot * BLOCKS_EACH
        self.blocks = array("i", range(first, first + BLOCKS_EACH))
        self.begin()

    def begin(self, generated: int = 0) -> None:
        ids = array("i", self.tokens)
        begin = Begin(SequenceId(self.number), ids, len(ids) - generated, 0, GREEDY, self.inputs)
        self.runner.launch(StepPlan(begun=(begin,))).result()

    def chunk(self, start: int, end: int, draws: bool = False, rows: int = 0) -> Any:
        while (
            self.num_encoded < len(self.inputs.works)
            and self.inputs.works[self.num_encoded].start < end
        ):
            num_units = self.inputs.works[self.num_encoded].num_units
            for start_unit, end_unit in ((0, num_units // 2), (num_units // 2, num_units)):
                if start_unit < end_unit:
                    encoded = EncodeChunk(
                        SequenceId(self.number), self.num_encoded, start_unit, end_unit, self.slot
                    )
                    self.runner.launch(StepPlan(encoded=(encoded,))).result()
            self.num_encoded += 1
        drawing = (SequenceId(self.number),) if draws else ()
        chunk = Chunk(
            SequenceId(self.number), start, end - start, rows or int(draws), drawing,
            self.blocks, self.slot,
        )  # fmt: skip
        if not draws:
            ids = array("i", self.tokens[start:end])
            return self.runner.lane.logits(self.runner.lane.forward([chunk], [ids]))
        result = self.runner.launch(StepPlan(chunks=(chunk,))).result()
        self.tokens.extend(result.chunks[0].drawn[0].token_ids)
        return None

    def answer(self, num: int) -> list[int]:
        start = len(self.tokens)
        self.chunk(0, start, draws=True)
        for _ in range(num - 1):
            self.chunk(len(self.tokens) - 1, len(self.tokens), draws=True)
        return self.tokens[start:]


def borders(kind: str, prepared: Prepared) -> list[list[int]]:
    """Cuts before, at the edges of and, where it may be cut, inside the first image."""
    work, last = prepared.inputs.works[0], len(prepared.token_ids)
    inside = [] if prepared.inputs.spans else [[work.start + 1, last], [work.end - 1, last]]
    return [[last], [work.start, last], [work.end, last], [1, work.start, work.end, last], *inside]


@torch.inference_mode()
def test_chunks_about_an_image_give_the_logits_of_transformers(
    kind, runner, processor, reference, prepared
):
    expected = logits_of(reference, processor, kind, prepared.token_ids.tolist())
    for number, ends in enumerate(borders(kind, prepared)):
        talk, start, rows = Talk(runner, prepared, number), 0, []
        for end in ends:
            rows.append(talk.chunk(start, end, rows=end - start))
            start = end
        assert_close(torch.cat(rows), expected, 5e-4 if kind in NATIVE else 1e-4)


def test_each_distinct_image_is_seen_once(kind, runner, processor, tmp_path):
    images = [picture(9), picture(9), picture(10)]
    prepared = prepare(processor, kind, images, tmp_path)
    before = runner.lane.num_encoded
    for number in range(2):
        Talk(runner, prepared, number).answer(2)
    assert runner.lane.num_encoded - before == 2


def test_swapped_images_have_other_marks(kind, processor, tmp_path):
    one = prepare(processor, kind, [RED, BLUE], tmp_path)
    other = prepare(processor, kind, [BLUE, RED], tmp_path)
    assert one.token_ids == other.token_ids
    assert [w.mark for w in one.inputs.works] == [w.mark for w in other.inputs.works][::-1]


def test_greedy_tokens_equal_those_of_transformers(kind, runner, processor, reference, prepared):
    talk = Talk(runner, prepared)
    num = len(talk.tokens)
    answer = talk.answer(32)
    logits = logits_of(reference, processor, kind, talk.tokens[:-1])[num - 1 :]
    best = logits.topk(2, dim=-1)
    is_close = best.values[:, 0] - best.values[:, 1] < 1e-3 * logits.abs().amax(-1)
    is_wrong = best.indices[:, 0] != torch.tensor(answer)
    assert not (is_wrong & ~is_close).any() and is_wrong.sum() <= 1


def test_an_answer_may_have_the_token_that_stands_for_an_image(runner, prepared):
    work = prepared.inputs.works[-1]
    tokens = array("i", [*prepared.token_ids, prepared.token_ids[work.start]])
    talk = Talk(runner, Prepared(tokens, prepared.inputs), 5)
    assert torch.isfinite(talk.chunk(0, len(tokens), rows=1)).all()


def test_a_sequence_without_images_in_a_used_slot_sees_none(runner, prepared):
    plain = Prepared(array("i", range(5, 30)), type(prepared.inputs)())
    fresh = Talk(runner, plain, 17).answer(5)
    Talk(runner, prepared, 10).answer(3)
    assert Talk(runner, plain, 18).answer(5) == fresh  # in the slot of number 10


def test_a_sibling_goes_on_from_a_copied_slot(kind, runner, prepared):
    leader = Talk(runner, prepared, 3)
    leader.answer(1)
    sibling = Talk(runner, Prepared(array("i", leader.tokens), prepared.inputs), 4)
    sibling.num_encoded = len(prepared.inputs.works)
    copies = tuple(map(BlockCopy, leader.blocks, sibling.blocks)) if kind in NATIVE else ()
    slots = (SlotCopy(SlotId(3), SlotId(4)),)
    runner.launch(StepPlan(block_copies=copies, slot_copies=slots)).result()
    for talk in (leader, sibling):
        for _ in range(5):
            talk.chunk(len(talk.tokens) - 1, len(talk.tokens), draws=True)
    assert leader.tokens == sibling.tokens


def test_a_model_whose_text_attends_both_ways_is_refused(tmp_path):
    text = {"vocab_size": 64, "num_key_value_heads": 2, "pad_token_id": 0} | SMALL
    config = transformers.PaliGemmaConfig(
        text_config={"model_type": "gemma", "head_dim": 16, **text},
        vision_config={"model_type": "siglip_vision_model", "image_size": 16, "patch_size": 8}
        | SMALL,
        image_token_index=63,
        projection_dim=32,
        hidden_size=32,
    )
    torch.manual_seed(0)
    transformers.PaliGemmaForConditionalGeneration(config).save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    with pytest.raises(ModelError, match="attend to later tokens"):
        tiny_runner(tmp_path, max_model_len=64)
