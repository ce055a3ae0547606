"""Tests prefixes on disk: which segments are read, and what happens if a read fails or is late."""

from array import array

from headrace_common.config.settings import SchedulerConfig
from headrace_common.layout import MemoryLayout
from headrace_common.prefix import ReadSegment, SegmentRead
from headrace_engine.memory.disk import DiskPrefixes
from headrace_engine.scheduler.restores import LONGEST_WAIT_S, MAX_RESTORES, PATIENCE_S
from headrace_engine.scheduler.scheduler import Scheduler
from tests.scheduler.builders import Engine, cancel, lengths, make_limits, make_submit, sequence_ids

BLOCK, PER_RUN, BLOCK_BYTES = 16, 4, 100
RUN = BLOCK * PER_RUN


class OnDisk(Engine):
    """An engine that has the prompts of these numbers on disk, with `tokens` tokens each."""

    def __init__(
        self, *numbers: int, tokens: int = 200, num_blocks: int = 1000, **limits: object
    ) -> None:
        layout = MemoryLayout(BLOCK, num_blocks)
        self.disk = DiskPrefixes(BLOCK, PER_RUN, BLOCK_BYTES)
        scheduler = Scheduler(SchedulerConfig(), layout, make_limits(**limits), self.disk)
        super().__init__(scheduler)
        for number in numbers:
            ids, chain = array("i", [1000 + number] * tokens), scheduler.memory.chain("")
            for end in range(PER_RUN, tokens // BLOCK + 1, PER_RUN):
                self.disk.add(chain.name(ids, end - 1), end - PER_RUN, end)

    def asked(self) -> list[ReadSegment]:
        self.step()
        return self.scheduler.take_reads()

    def answer(self, wishes: list[ReadSegment], miss: str = "", seconds: float = 1e-6) -> None:
        for wish in wishes:
            numbers = None if miss else memoryview(bytes(wish.num_bytes))
            self.scheduler.apply_news(SegmentRead(wish.number, numbers, seconds, miss), self.now)


def misses(engine: OnDisk) -> dict[str, int]:
    return engine.scheduler.status().disk_misses


def test_a_prefix_on_disk_is_loaded_and_only_the_rest_computed() -> None:
    engine = OnDisk(1).add(make_submit(1, 210))
    engine.answer(wishes := engine.asked())
    assert [(wish.segment.first, wish.segment.end) for wish in wishes] == [(0, 4), (4, 8), (8, 12)]
    plan = engine.step()
    assert plan is not None and not plan.chunks
    (load,) = plan.loads
    assert (load.start, load.end, len(load.segments)) == (0, 192, 3)
    assert lengths(engine.step()) == [18]
    assert engine.progress[1] == [192, 210], "it starts with what was loaded"
    assert engine.scheduler.status().disk["tokens"] == 192


def test_at_least_one_token_is_computed() -> None:
    engine = OnDisk(1, tokens=128).add(make_submit(1, 128))
    (only,) = engine.asked()
    assert only.segment.end == 4


def test_other_requests_continue_during_a_read() -> None:
    engine = OnDisk(1).add(make_submit(2, 20, max_tokens=50))
    engine.step()
    engine.add(make_submit(1, 210), make_submit(3, 30))
    plan = engine.step()
    assert sequence_ids(plan) == [2, 3], "neither the stream nor the prompt behind it waits"
    engine.answer(engine.scheduler.take_reads())
    plan = engine.step()
    assert plan is not None and [load.sequence_id for load in plan.loads] == [1]
    assert sequence_ids(plan) == [2, 3]


def test_no_step_is_planned_if_all_requests_wait_for_the_disk() -> None:
    engine = OnDisk(1).add(make_submit(1, 210))
    assert engine.step() is None
    rest_s = engine.scheduler.rest_s(engine.now)
    assert rest_s is not None and 0 < rest_s <= LONGEST_WAIT_S
    engine.answer(engine.scheduler.take_reads())
    assert engine.step() is not None
    assert engine.scheduler.rest_s(engine.now) == 0


def test_a_missing_segment_is_computed_and_not_read_again() -> None:
    engine = OnDisk(1).add(make_submit(1, 210))
    engine.answer(engine.asked(), miss="damaged")
    assert lengths(engine.step()) == [210]
    assert misses(engine) == {"damaged": 3}
    assert engine.scheduler.take_reads() == []


def test_segments_before_a_missing_one_are_used() -> None:
    engine = OnDisk(1).add(make_submit(1, 210))
    first, *others = engine.asked()
    engine.answer([first])
    engine.answer(others, miss="gone")
    plan = engine.step()
    assert plan is not None and plan.loads[0].end == RUN
    assert lengths(engine.step()) == [210 - RUN]
    assert engine.progress[1] == [RUN, 210]


def test_after_a_late_read_the_prompt_is_computed_and_the_disk_avoided() -> None:
    engine = OnDisk(1, 2, 3).add(make_submit(1, 210))
    late = engine.asked()
    engine.now += LONGEST_WAIT_S
    assert lengths(engine.step()) == [210]
    assert misses(engine) == {"late": 1}
    engine.add(make_submit(2, 210)).step()
    assert engine.scheduler.take_reads() == [], "it hangs"
    engine.now += PATIENCE_S
    engine.add(make_submit(3, 210)).step()
    assert engine.scheduler.take_reads() == [], "it still has not answered"
    engine.answer(late)
    engine.add(make_submit(4, 210)).step()
    engine.scheduler.memory.check()


def test_a_disk_that_is_slower_than_computing_is_not_read() -> None:
    engine = OnDisk(1, 2).add(make_submit(1, 210))
    engine.answer(engine.asked(), seconds=60)
    engine.run()
    engine.add(make_submit(2, 210))
    assert lengths(engine.step()) == [210]
    assert engine.scheduler.take_reads() == [] and misses(engine) == {"slower": 1}


def test_a_request_without_prefix_cache_is_not_read_from_disk() -> None:
    engine = OnDisk(1).add(make_submit(1, 210, use_prefix=False))
    assert lengths(engine.step()) == [210]


def test_a_prompt_with_another_salt_is_not_read_from_disk() -> None:
    engine = OnDisk(1).add(make_submit(1, 210, salt="another"))
    assert lengths(engine.step()) == [210]


def test_only_a_few_prompts_are_read_at_once() -> None:
    numbers = range(1, MAX_RESTORES + 3)
    engine = OnDisk(*numbers).add(*(make_submit(n, 210, arrival=0.0) for n in numbers))
    wishes = engine.asked()
    assert len({wish.segment.name for wish in wishes}) == 3 * MAX_RESTORES
    engine.answer(wishes)
    plan = engine.step()
    assert plan is not None and len(plan.loads) == MAX_RESTORES and not plan.chunks
    more = engine.scheduler.take_reads()
    assert len(more) == 6, "the two that waited"
    engine.answer(more)
    engine.run()
    assert [engine.progress[n][0] for n in numbers] == [192] * len(numbers)


def test_a_cancel_discards_reads_in_progress() -> None:
    engine = OnDisk(1, 2).add(make_submit(1, 210))
    wishes = engine.asked()
    engine.scheduler.cancel(cancel(1))
    engine.step()
    engine.answer(wishes)
    assert engine.scheduler.is_idle and engine.scheduler._restores._num_bytes == 0
    engine.scheduler.memory.check()


def test_a_recovered_stream_loads_its_prompt_and_answer_from_disk() -> None:
    engine = OnDisk()
    ids, chain = array("i", [1001] * 40 + [7] * 40), engine.scheduler.memory.chain("")
    engine.disk.add(chain.name(ids, 3), 0, 4)
    engine.add(make_submit(1, 40, generated=40, max_tokens=50))
    engine.answer(engine.asked())
    plan = engine.step()
    assert plan is not None and plan.loads[0].end == RUN
    assert lengths(engine.step()) == [16]


def test_a_segment_may_overlap_blocks_in_memory() -> None:
    engine = OnDisk(1).add(make_submit(1, 210))
    engine.answer(engine.asked(), miss="gone")
    engine.run()
    engine.disk.set_segments([])
    ids, chain = array("i", [1001] * 300), engine.scheduler.memory.chain("")
    engine.disk.add(chain.name(ids, 15), 12, 16)
    engine.add(make_submit(1, 300))  # 13 blocks are in memory still
    (wish,) = engine.asked()
    engine.answer([wish])
    plan = engine.step()
    assert plan is not None
    (segment,) = plan.loads[0].segments
    assert (plan.loads[0].start, plan.loads[0].end) == (208, 256)
    assert (segment.num_blocks, segment.skip, len(segment.block_ids)) == (4, 1, 3)


def test_a_request_may_start_right_after_a_preemption_without_other_work() -> None:
    """A plan that only preempts is empty. The next one may start another request at once."""
    engine = OnDisk(1, num_blocks=17).add(make_submit(1, 210, suspect=True))
    first, *_ = engine.asked()
    engine.answer([first])
    engine.step()
    engine.add(make_submit(2, 20, max_tokens=50)).step(0.001)
    engine.add(make_submit(3, 10))
    while engine.scheduler.status().num_preemptions == 0:
        last = engine.step(0.001)
    assert last is None and engine.scheduler.rest_s(engine.now) == 0
    assert sequence_ids(engine.step()) == [3]
