"""The text of a model that sees depends on its images, not on memory, cuts or neighbours."""

from array import array
from pathlib import Path

import msgspec
import pytest

from headrace_common.ids import SequenceId, StreamId
from headrace_common.layout import MemoryLayout
from headrace_common.messages import NewSequence, Submit
from headrace_common.sampling import Sampling
from headrace_engine.runner.images import ImageProcessor, Prepared
from headrace_engine.runner.runner import Runner
from tests.equality.test_lanes_images import picture
from tests.equality.test_pressure import RealEngine
from tests.equality.test_pressure_hybrid import engine_with
from tools.harness.drive import random_prompt, tiny_runner
from tools.harness.tiny_models import IMAGE_MARKS, make_tiny_image_model

GREEDY = Sampling(temperature=0, max_tokens=40, ignore_eos=True)
DICE = Sampling(temperature=0.9, seed=7, max_tokens=40, ignore_eos=True)
AMPLE = MemoryLayout(8, 256, 16, 32, snapshot_every=32, max_positions=256)
MARK = IMAGE_MARKS["Qwen3.5"]
RED, BLUE = picture(1, 64, 48), picture(2, 64, 48)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_image_model(tmp_path_factory.mktemp("seeing"), "Qwen3.5")


@pytest.fixture(scope="module")
def runner(folder: Path) -> Runner:
    runner = tiny_runner(folder, max_model_len=256, block_size=8)
    assert runner.lane.traits.id == "native-multimodal"
    return runner


@pytest.fixture(scope="module")
def prompts(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Prepared]:
    processor, files = ImageProcessor(folder, in_pieces=True), tmp_path_factory.mktemp("pixels")

    def prepare(name: str, images: list[bytes], text: str) -> Prepared:
        (files / name).touch()
        paths = ["messages"] * len(images)
        return processor.prepare(text, images, paths, str(files / name))

    two = f"Once {MARK} and {MARK} there"
    return {
        "one": prepare("one", [RED, BLUE], two),
        "swapped": prepare("swapped", [BLUE, RED], two),
        "longer": prepare("longer", [RED, BLUE], two + " was a river, and by the river"),
        "last": prepare("last", [RED], f"A very long line of words, and then {MARK}"),
    }


def submit(number: int, prompt: Prepared, sampling: Sampling = GREEDY, choices: int = 1) -> Submit:
    news = tuple(NewSequence(SequenceId(number + i), 0, i) for i in range(choices))
    return Submit(
        StreamId(str(number)),
        (prompt.token_ids.tobytes(),),
        news,
        sampling,
        arrival=0.0,
        inputs=(prompt.inputs,),
    )


def plain(number: int) -> Submit:
    news = (NewSequence(SequenceId(number), 0, 0),)
    ids = array("i", random_prompt(20 + number % 30, seed=number))
    return Submit(StreamId(str(number)), (ids.tobytes(),), news, GREEDY, arrival=0.0)


def alone(runner: Runner, one: Submit, layout: MemoryLayout = AMPLE) -> RealEngine:
    engine = engine_with(runner, layout)
    engine.add(one)
    engine.run(max_steps=10_000)  # a slow moment cuts chunks small
    return engine


def test_images_in_a_crowd_are_what_they_are_alone_also_after_preemptions(runner, prompts):
    numbers = range(0, 40, 2)
    names = [name for name, _ in zip([*prompts] * 10, numbers, strict=False)]
    expected = {name: alone(runner, submit(0, prompts[name])).tokens[0] for name in prompts}
    assert expected["one"] != expected["swapped"]
    few = msgspec.structs.replace(AMPLE, num_blocks=40, num_snapshots=4)
    for layout, settings in (
        (AMPLE, {"max_stall_ms": "off", "max_step_ms": "off"}),
        (AMPLE, {"max_stall_ms": 0.5, "max_step_ms": 1.0}),
        (few, {}),
    ):
        engine = engine_with(runner, layout, **settings)
        for number, name in zip(numbers, names, strict=True):
            engine.add(submit(number, prompts[name]), plain(number + 1))
        engine.run(max_steps=10_000)  # a slow moment cuts chunks small
        for number, name in zip(numbers, names, strict=True):
            assert engine.tokens[number] == expected[name]
        if layout is few:
            assert sum(engine.num_begun.values()) - 40 >= 10


@pytest.mark.parametrize("sampling", [GREEDY, DICE], ids=["greedy", "seeded"])
def test_two_choices_share_an_image(runner, prompts, sampling):
    both = alone(runner, submit(0, prompts["last"], sampling, choices=2))
    for choice in range(2):
        one = submit(0, prompts["last"], sampling, choices=2)
        one = msgspec.structs.replace(one, sequences=one.sequences[choice : choice + 1])
        assert alone(runner, one).tokens[choice] == both.tokens[choice]


def test_a_prompt_with_the_same_images_is_credited_and_with_swapped_ones_is_not(runner, prompts):
    cold = {name: alone(runner, submit(0, prompts[name])).tokens[0] for name in prompts}
    engine = engine_with(runner)
    engine.add(submit(0, prompts["one"]))
    engine.run(max_steps=10_000)  # a slow moment cuts chunks small
    num_encoded = runner.lane.num_encoded
    engine.add(submit(1, prompts["swapped"]), submit(2, prompts["longer"]))
    engine.run(max_steps=10_000)  # a slow moment cuts chunks small
    first_image = prompts["one"].inputs.works[0]
    assert engine.progress[1][0] <= first_image.start
    assert engine.progress[2][0] > first_image.end
    assert engine.tokens[1] == cold["swapped"] and engine.tokens[2] == cold["longer"]
    assert runner.lane.num_encoded == num_encoded  # both were seen before


def test_a_prompt_may_go_on_from_within_an_image(runner, prompts):
    """Where the state was saved there: the image is seen again, for the rest of its rows."""
    within = msgspec.structs.replace(AMPLE, snapshot_every=8)
    cold = alone(runner, submit(1, prompts["last"]), within)
    engine = engine_with(runner, within)
    work = prompts["last"].inputs.works[0]
    cut = (work.start // 8 + 1) * 8
    assert work.start < cut < work.end
    head = prompts["last"].token_ids[: cut + 1]
    engine.add(submit(0, Prepared(head, prompts["last"].inputs)))
    engine.run(max_steps=10_000)  # a slow moment cuts chunks small
    engine.add(submit(1, prompts["last"]))
    engine.run(max_steps=10_000)  # a slow moment cuts chunks small
    assert engine.progress[1][0] == cut
    assert engine.tokens[1] == cold.tokens[1]
