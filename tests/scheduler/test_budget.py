"""Tests how many prompt tokens a step may have, by the token cap and by time."""

import pytest

from headrace_common.config.settings import SchedulerConfig
from headrace_common.layout import MemoryLayout
from headrace_common.plan import Elsewhere
from headrace_engine.scheduler.budget import Limits, StepTimes, TimeBudget, resolve
from headrace_engine.scheduler.cost import Coefficients, CostModel, StepShape
from tests.scheduler.builders import (
    Engine,
    lengths,
    make_limits,
    make_scheduler,
    make_submit,
    shape_of,
)

BLOCKS = MemoryLayout(16, 100)
LAPTOP = Coefficients(c_decode=0.021, c_prompt=0.021, g=5e-6, b=1.9e-3, a=4.5e-7)


class Measured(CostModel):
    """A cost model with fixed coefficients."""

    def __init__(self, coefficients: Coefficients = LAPTOP) -> None:
        super().__init__()
        self._fitted = coefficients
        self.is_measured = True
        self.largest_measured, self.most_pairs = 100_000, 1 << 60

    def observe(self, shape: StepShape, seconds: float) -> None:
        pass


def make_budget(stall_s: float | None = None, step_s: float | None = 1.0, **limits) -> TimeBudget:
    budget = TimeBudget(make_limits(max_stall_s=stall_s, max_step_s=step_s, **limits))
    budget.model = Measured()
    return budget


def decoding(number: int, context: int) -> StepShape:
    return shape_of([context] * number, [])


@pytest.mark.parametrize(
    ("prompts", "cap", "expected"),
    [
        ([5000], 512, [512]),
        ([5000, 8], 512, [8, 504]),
        ([200, 200, 300], 512, [200, 200, 112]),
        ([512, 8], 1024, [8, 512]),
        ([300, 300], 1 << 30, [300, 300]),
    ],
)
def test_prompts_fill_the_token_cap_in_order_of_their_sort_keys(prompts, cap, expected):
    engine = Engine(make_scheduler(max_step_tokens=cap))
    engine.add(*[make_submit(i, n, arrival=0.0) for i, n in enumerate(prompts)])
    assert lengths(engine.step()) == expected


def test_without_patience_prompts_fill_the_step_in_order_of_arrival():
    engine = Engine(make_scheduler(max_step_tokens=512, patience=0.0))
    engine.add(make_submit(0, 512, arrival=0.0), make_submit(1, 8, arrival=0.0))
    assert [lengths(engine.step()) for _ in range(2)] == [[512], [1, 8]]


def test_a_prompt_gets_one_token_if_decode_chunks_exceed_the_cap():
    engine = Engine(make_scheduler(2000, max_num_seqs=700, max_step_tokens=1000))
    engine.add(*[make_submit(i, 1, arrival=0.0) for i in range(600)])
    engine.step()
    engine.scheduler._budget._max_tokens = 512
    engine.add(make_submit(600, 5, arrival=0.0))
    assert lengths(engine.step()) == [1] * 601


@pytest.mark.parametrize(
    ("wanted", "fitting", "cap", "expected"),
    [
        (260, 256, 512, [260]),  # the tiny tail joins
        (300, 256, 512, [256, 44]),
        (520, 600, 512, [512, 8]),  # the cap is hard
        (256, 256, 512, [256]),
    ],
)
def test_a_tiny_tail_may_exceed_the_time_but_not_the_token_cap(wanted, fitting, cap, expected):
    budget = make_budget(step_s=0.001 * fitting, max_step_tokens=cap)
    budget.model._fitted = Coefficients(b=0.001)
    chunks = []
    while sum(chunks) < wanted:
        room = budget.open(StepShape(), is_awaited=False)
        chunks.append(room.largest_chunk(sum(chunks), wanted - sum(chunks), is_first=True))
        assert room.cause == ("tail" if chunks[-1] > fitting else "")
    assert chunks == expected


@pytest.mark.parametrize(
    ("number", "at", "context", "target", "seconds", "chunk"),
    [
        (0, 0, 0, None, 0.979, 464),
        (4, 128, 0, 0.030, 0.00791, 4),
        (4, 128, 0, 0.060, 0.02838, 14),
        (4, 128, 0, 0.100, 0.06838, 35),
        (4, 128, 0, 0.200, 0.16838, 86),
        (4, 128, 0, 10.0, 9.96838, 508),
        (4, 128, 2048, 0.100, 0.06838, 15),
        (4, 128, 8192, 0.100, 0.06838, 2),
        (4, 2048, 0, 0.100, 0.02307, 12),
        (16, 2048, 0, 0.100, 0.06118, 31),
    ],
)
def test_the_room_of_a_step_and_the_chunk_that_fits_it(number, at, context, target, seconds, chunk):
    budget = make_budget(stall_s=target)
    room = budget.open(decoding(number, at), is_awaited=number > 0)
    assert room.seconds == pytest.approx(seconds, abs=1e-5)
    assert room.largest_chunk(context, 100_000, is_first=True) == chunk
    assert room.cause == ("decode" if number == 16 or target == 0.030 else "")


def test_if_no_token_fits_time_is_saved_until_a_larger_chunk_fits():
    budget = make_budget(stall_s=0.1)
    chunks, causes = [], []
    for _ in range(6):
        room = budget.open(decoding(4, 128), is_awaited=True)
        chunks.append(room.largest_chunk(32_768, 1000, is_first=True))
        causes.append(room.cause)
    assert chunks == [0, 0, 0, 0, 0, 7]
    assert causes == [""] * 5 + ["token"]
    assert budget.saved_s == 0.0


def test_beyond_the_target_time_is_saved_if_the_prompt_advances_faster():
    """Without saving, each of the six steps would have one token, which makes six instead of 15."""
    budget = make_budget(stall_s=0.1)
    chunks, causes = [], []
    for _ in range(6):
        room = budget.open(decoding(4, 3000), is_awaited=True)
        assert room.seconds == pytest.approx(0.0248, abs=1e-4)
        chunks.append(room.largest_chunk(3600, 1000, is_first=True))
        causes.append(room.cause)
    assert chunks == [0, 5] * 3
    assert causes == ["decode", "token"] * 3


def test_the_last_token_of_a_prompt_is_not_delayed_if_it_fits():
    budget = make_budget(stall_s=0.1)
    room = budget.open(decoding(4, 3000), is_awaited=True)
    assert room.largest_chunk(3600, 1, is_first=True) == 1


def test_only_the_first_prompt_saves_time():
    budget = make_budget(stall_s=0.1)
    room = budget.open(decoding(4, 128), is_awaited=True)
    assert room.largest_chunk(32_768, 1000, is_first=False) == 0
    assert budget.saved_s == 0.0


def test_a_chunk_that_fits_spends_the_saved_time():
    budget = make_budget(stall_s=0.1)
    for context in (32_768, 0):
        room = budget.open(decoding(4, 128), is_awaited=True)
        room.largest_chunk(context, 1000, is_first=True)
    assert budget.saved_s == 0.0


def test_one_token_is_always_processed_if_no_stream_waits():
    budget = make_budget(step_s=0.01)
    assert budget.open(StepShape(), is_awaited=False).largest_chunk(32_768, 9, is_first=True) == 1


def test_a_forced_token_is_the_cause_of_a_missed_target() -> None:
    budget = make_budget(stall_s=0.05)
    room = budget.open(StepShape(), is_awaited=True, can_save=False)
    assert room.largest_chunk(32_768, 9, is_first=True) == 1
    assert room.cause == "token"


def test_the_next_prompt_gets_the_remaining_time_of_a_step():
    budget = make_budget(stall_s=0.1)
    room = budget.open(decoding(4, 128), is_awaited=True)
    room.spend(0, 20)
    assert room.largest_chunk(0, 1000, is_first=False) == 15
    room.spend(0, 15)
    assert not room.largest_chunk(0, 1000, is_first=False)


@pytest.mark.parametrize("is_awaited", [True, False])
def test_without_a_target_only_the_token_cap_limits_a_step(is_awaited):
    budget = make_budget(stall_s=None, step_s=None)
    room = budget.open(decoding(4, 128), is_awaited)
    assert room.seconds is None
    assert room.largest_chunk(0, 1000, is_first=True) == 508


def test_each_chunk_counts_a_forward_pass_where_lanes_need_one_per_chunk():
    budget = make_budget(stall_s=0.2, forward_per_chunk=True)
    shape = StepShape()
    for _ in range(4):
        shape.add(128, 1, is_prompt=False, forward_per_chunk=True)
    room = budget.open(shape, is_awaited=True)
    assert room.seconds == pytest.approx(0.2 - 4 * (0.021 + 0.00265565), abs=1e-6)
    assert room.largest_chunk(0, 1000, is_first=True) == 43  # 0.105 less a forward of its own


def test_a_chunk_is_at_most_twice_the_largest_measured():
    budget = make_budget()
    budget.model.largest_measured = 40
    assert budget.open(StepShape(), is_awaited=False).largest_chunk(0, 1000, is_first=True) == 80


def test_overhead_outside_the_runner_shortens_the_next_step():
    budget = make_budget(stall_s=0.1)
    budget.learn_step(decoding(4, 128), StepTimes(0.03, (), 0.04), is_awaited=True, cause="")
    room = budget.open(decoding(4, 128), is_awaited=True)
    assert room.seconds == pytest.approx(0.06838 - 0.01, abs=1e-5)


def test_an_unmeasured_engine_starts_with_small_chunks_and_doubles_them():
    limits = Limits(max_num_seqs=1, max_step_tokens=512, max_model_len=9000, max_step_s=1.0)
    budget = TimeBudget(limits)
    chunks = []
    for _ in range(5):
        room = budget.open(StepShape(), is_awaited=False)
        chunks.append(room.largest_chunk(0, 5000, is_first=True))
        shape = StepShape()
        shape.add(0, chunks[-1], is_prompt=True, forward_per_chunk=False)
        budget.learn_step(shape, StepTimes(0.1, (), 0.1), is_awaited=False, cause="")
    assert chunks == [64, 128, 256, 512, 512]


def test_an_unmeasured_engine_does_not_double_beyond_half_the_target():
    limits = Limits(max_num_seqs=1, max_step_tokens=512, max_model_len=9000, max_step_s=1.0)
    budget = TimeBudget(limits)
    shape = StepShape()
    shape.add(0, 64, is_prompt=True, forward_per_chunk=False)
    budget.learn_step(shape, StepTimes(0.5, (), 0.5), is_awaited=False, cause="")
    assert budget.open(StepShape(), is_awaited=False).tokens == 64


def test_an_unmeasured_engine_halves_its_chunks_on_a_slow_machine():
    limits = Limits(max_num_seqs=9, max_step_tokens=512, max_model_len=9000, max_stall_s=0.1)
    budget = TimeBudget(limits)
    seconds = []
    for _ in range(20):
        room = budget.open(decoding(4, 128), is_awaited=True)
        length = room.largest_chunk(0, 5000, is_first=True)
        shape = decoding(4, 128)
        shape.add(0, length, is_prompt=True, forward_per_chunk=False)
        seconds.append(0.03 + 0.01 * length)
        budget.learn_step(shape, StepTimes(seconds[-1], (), seconds[-1]), is_awaited=True, cause="")
    assert seconds[0] > 0.5 and sum(one > 0.1 for one in seconds) <= 4
    assert budget.model.is_measured and max(seconds[8:]) <= 0.1


@pytest.mark.parametrize(
    ("number", "cause", "expected"),
    [
        (4, "", {}),
        (16, "", {"decode": 1}),
        (16, "tail", {"tail": 1}),
        (4, "quarantine", {"quarantine": 1}),
    ],
)
def test_a_step_that_will_miss_the_target_is_counted_by_cause(number, cause, expected):
    budget = make_budget(stall_s=0.1)
    shape = decoding(number, 2048)
    budget.expect_miss(shape, cause, budget.predict(shape))
    assert budget.missed == expected


def test_an_unexpected_miss_is_attributed_to_the_cost_model():
    budget = make_budget(stall_s=0.1)
    budget.learn_step(decoding(4, 128), StepTimes(0.2, (), 0.2), is_awaited=True, cause="")
    budget.learn_step(decoding(4, 128), StepTimes(0.2, (), 0.2), is_awaited=True, cause="decode")
    budget.learn_step(decoding(4, 128), StepTimes(0.2, (), 0.2), is_awaited=False, cause="")
    assert budget.missed == {"model": 1}


def test_the_prompt_rate_includes_time_between_steps():
    budget = make_budget()
    assert budget.prompt_tokens_per_s == 0.0
    for new in (100, 300):
        shape = StepShape()
        shape.add(0, new, is_prompt=True, forward_per_chunk=False)
        budget.learn_step(shape, StepTimes(0.4, (), 0.5), is_awaited=False, cause="")
    assert budget.prompt_tokens_per_s == pytest.approx(400)


def test_streams_of_another_engine_limit_a_prompt_like_own_streams():
    budget = make_budget(stall_s=0.2)
    nothing = StepShape()
    free = budget.open(nothing, False).seconds
    budget.elsewhere = Elsewhere(decode_s=0.02, is_awaited=True)
    beside = budget.open(nothing, False).seconds
    budget.elsewhere = Elsewhere(decode_s=0.02, is_awaited=True, num_with_prompts=1)
    shared = budget.open(nothing, False).seconds
    alone = make_budget(stall_s=0.2).open(nothing, True).seconds
    assert alone < free
    assert beside == pytest.approx(alone - 0.02)
    assert shared == pytest.approx(beside / 2)


def test_the_time_of_a_prompt_alone_is_predicted_in_the_largest_steps():
    budget = make_budget()
    by_steps = sum(LAPTOP.c_prompt + LAPTOP.cost(at, 512) for at in (0, 512, 1024))
    assert budget.seconds_alone(0, 1536) == pytest.approx(by_steps)


def test_an_unmeasured_prompt_is_assumed_to_run_at_500_tokens_per_second():
    limits = Limits(max_num_seqs=1, max_step_tokens=512, max_model_len=9000)
    assert TimeBudget(limits).seconds_alone(100, 5000) == 10.0


def test_defaults_follow_the_device():
    config = SchedulerConfig()
    cpu, cuda = (resolve(config, BLOCKS, device, 8, 4096) for device in ("cpu", "cuda"))
    assert (cpu.max_step_tokens, cpu.max_stall_s, cpu.max_step_s) == (512, 0.2, 1.0)
    assert cpu.prompt_share == 1.4
    assert (cuda.max_step_tokens, cuda.max_stall_s) == (2048, 0.05)


def test_time_counts_as_starved_if_an_explicit_target_leaves_little_for_prompts():
    for share, expected in ((0.25, 3.0), (2.0, 0.0)):
        budget = TimeBudget(make_limits(max_stall_s=0.1, prompt_share=share))
        for _ in range(3):
            budget.learn_step(StepShape(1, 100, 9, 900, 5), StepTimes(1.0, (), 1.0), True, "decode")
        assert budget.starved_s == expected
        budget.learn_step(StepShape(1, 100, 9, 900, 5), StepTimes(0.05, (), 0.05), True, "")
        assert budget.starved_s == 0.0


def test_a_target_can_be_set_and_turned_off():
    config = SchedulerConfig(max_stall_ms=250.0, max_step_ms="off", max_step_tokens=64)
    limits = resolve(config, BLOCKS, "cpu", 8, 4096)
    assert (limits.max_step_tokens, limits.max_stall_s, limits.max_step_s) == (64, 0.25, None)
    assert limits.prompt_share == 0.25
    off = SchedulerConfig(max_stall_ms="off")
    assert resolve(off, BLOCKS, "cpu", 8, 4096).max_stall_s is None


def test_only_the_layout_decides_about_a_forward_pass_per_chunk():
    packed, dense = MemoryLayout(num_slots=8), MemoryLayout(num_slots=8, forward_per_chunk=True)
    layouts = BLOCKS, packed, dense
    found = [resolve(SchedulerConfig(), x, "cpu", 8, 64).forward_per_chunk for x in layouts]
    assert found == [False, False, True]


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (MemoryLayout(16, 4), 64),
        (MemoryLayout(16, 1000), 500),
        (MemoryLayout(num_slots=2, max_positions=90), 90),
    ],
)
def test_model_user_and_memory_limit_the_longest_sequence(layout, expected):
    limits = Limits(max_num_seqs=1, max_step_tokens=1, max_model_len=500)
    assert limits.max_total(layout) == expected


def test_the_default_target_does_not_rise_while_another_engine_has_streams():
    budget = make_budget(stall_s=0.01, is_default=True)
    budget.open(decoding(4, 128), is_awaited=True)
    assert budget.stall_s > 0.01
    budget.elsewhere = Elsewhere(decode_s=0.02, is_awaited=True)
    budget.open(decoding(4, 128), is_awaited=True)
    assert budget.stall_s == 0.01
