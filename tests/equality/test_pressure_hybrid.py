"""A hybrid's text depends neither on memory nor on neighbours nor on states used again."""

from array import array

import msgspec
import pytest

from headrace_common.config.settings import SchedulerConfig
from headrace_common.ids import SequenceId, StreamId
from headrace_common.layout import MemoryLayout
from headrace_common.messages import NewSequence, Submit
from headrace_common.sampling import Sampling
from headrace_engine.runner.runner import Runner
from headrace_engine.scheduler.budget import resolve
from headrace_engine.scheduler.scheduler import Scheduler
from tests.equality.test_pressure import RealEngine
from tests.scheduler.builders import cancel
from tools.harness.drive import random_prompt, tiny_runner
from tools.harness.tiny_models import make_tiny_model

GREEDY = Sampling(temperature=0, max_tokens=60, ignore_eos=True)
DICE = Sampling(temperature=0.9, seed=7, max_tokens=40, ignore_eos=True)
NUM_STREAMS = 32
AMPLE = MemoryLayout(16, 200, 16, 16, snapshot_every=64, max_positions=256)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    folder = make_tiny_model(tmp_path_factory.mktemp("hybrid"), "Qwen3_5ForCausalLM")
    return tiny_runner(folder, max_model_len=256)


def engine_with(runner: Runner, layout: MemoryLayout = AMPLE, **scheduler: object) -> RealEngine:
    settings = SchedulerConfig(**scheduler)  # type: ignore[arg-type]
    runner.lane.open(layout)
    limits = resolve(settings, layout, "cpu", layout.num_slots, 256)
    return RealEngine(Scheduler(settings, layout, limits), runner, seconds=0.01)


def submit(number: int, prompt: list[int], sampling: Sampling = GREEDY, choices: int = 1) -> Submit:
    news = tuple(NewSequence(SequenceId(number + i), 0, i) for i in range(choices))
    return Submit(
        StreamId(str(number)), (array("i", prompt).tobytes(),), news, sampling, arrival=0.0
    )


def crowd(engine: RealEngine) -> RealEngine:
    for number in range(NUM_STREAMS):
        engine.add(submit(number, random_prompt(10 + 9 * (number % 5), seed=number)))
    engine.run(max_steps=10_000)  # a slow moment cuts chunks small
    assert set(map(len, engine.tokens.values())) == {60}
    return engine


def test_tokens_are_the_same_whole_cut_short_of_slots_and_after_ten_preemptions(
    runner: Runner,
) -> None:
    whole = crowd(engine_with(runner, max_stall_ms="off", max_step_ms="off"))
    cut = crowd(engine_with(runner, max_stall_ms=0.5, max_step_ms=1.0))
    assert cut.num_steps > whole.num_steps and cut.tokens == whole.tokens
    few = msgspec.structs.replace(AMPLE, num_blocks=12, num_snapshots=2)
    preempted = crowd(engine_with(runner, few))
    assert sum(preempted.num_begun.values()) - NUM_STREAMS >= 10
    assert preempted.tokens == whole.tokens
    narrow = msgspec.structs.replace(AMPLE, num_slots=5, num_snapshots=0)
    assert crowd(engine_with(runner, narrow)).tokens == whole.tokens


@pytest.mark.parametrize("sampling", [GREEDY, DICE], ids=["greedy", "seeded"])
def test_four_choices_are_those_that_each_would_be_alone(
    runner: Runner, sampling: Sampling
) -> None:
    prompt = random_prompt(75)
    engine = engine_with(runner)
    engine.add(submit(0, prompt, sampling, choices=4))
    engine.run(max_steps=10_000)  # a slow moment cuts chunks small
    assert any(len(chunk.draws) == 4 for chunk in engine.chunks)
    two = msgspec.structs.replace(AMPLE, num_slots=2)
    crowded = engine_with(runner, two)
    crowded.add(submit(0, prompt, sampling, choices=4))
    crowded.run()
    assert crowded.tokens == engine.tokens
    for choice in range(4):
        alone = engine_with(runner)
        one = submit(0, prompt, sampling, choices=4)
        one = msgspec.structs.replace(one, sequences=one.sequences[choice : choice + 1])
        alone.add(one)
        alone.run()
        assert alone.tokens[choice] == engine.tokens[choice]


def test_a_prompt_that_begins_like_an_earlier_one_goes_on_from_its_saved_state(
    runner: Runner,
) -> None:
    first, cold = random_prompt(150), engine_with(runner)
    longer = first + random_prompt(30, seed=1)
    cold.add(submit(1, longer))
    cold.run()
    warm = engine_with(runner)
    warm.add(submit(0, first))
    warm.run()
    warm.add(submit(2, random_prompt(100, seed=2)), submit(3, random_prompt(70, seed=3)))
    warm.run()
    warm.add(submit(1, longer))
    warm.run()
    assert warm.progress[1][0] == 144  # the last border of a block before the end of the first
    assert warm.tokens[1] == cold.tokens[1]


def test_a_cancelled_stream_leaves_nothing_in_its_slot(runner: Runner) -> None:
    one = msgspec.structs.replace(AMPLE, num_slots=1, num_snapshots=0)
    alone = engine_with(runner, one)
    alone.add(submit(1, random_prompt(40, seed=1)))
    alone.run()
    engine = engine_with(runner, one)
    engine.add(submit(0, random_prompt(40)))
    for _ in range(5):
        engine.step()
    engine.scheduler.cancel(cancel(0))
    engine.add(submit(1, random_prompt(40, seed=1)))
    engine.run(max_steps=10_000)  # a slow moment cuts chunks small
    assert engine.tokens[1] == alone.tokens[1]
