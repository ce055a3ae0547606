"""Tests embeddings: the rows they need, inputs that cannot be chunked, and running streams."""

import pytest

from headrace_common.plan import StepPlan
from headrace_common.sampling import Pooling, PoolingMode, Sampling
from tests.scheduler.builders import Engine, lengths, make_scheduler, make_submit


def to_embed(number: int, length: int, *modes: PoolingMode, **fields: object) -> object:
    sampling = Sampling(max_tokens=0, pooling=Pooling(modes or ("mean",)))
    return make_submit(number, length, sampling=sampling, use_prefix=False, **fields)


def rows(plans: list[StepPlan]) -> list[int]:
    return [chunk.num_rows for plan in plans for chunk in plan.chunks]


@pytest.mark.parametrize(
    ("modes", "expected"),
    [
        (("mean",), [8, 8, 4]),
        (("last",), [0, 0, 1]),
        (("cls",), [8, 0, 0]),
        (("cls", "last"), [8, 0, 1]),
        (("last", "max"), [8, 8, 4]),
    ],
)
def test_each_chunk_requests_only_the_rows_that_pooling_needs(
    modes: tuple[PoolingMode, ...], expected: list[int]
) -> None:
    engine = Engine(make_scheduler(max_step_tokens=8)).add(to_embed(0, 20, *modes))
    plans = engine.run()
    assert rows(plans) == expected
    assert not any(chunk.draws for plan in plans for chunk in plan.chunks)
    assert engine.finished == {0: ("length", "")} and not engine.tokens


def test_a_preempted_embedding_starts_again() -> None:
    engine = Engine(make_scheduler(num_blocks=5, max_step_tokens=3))
    engine.add(to_embed(1, 40), make_submit(0, 16, max_tokens=30))
    plans = engine.run()
    chunks = [chunk for plan in plans for chunk in plan.chunks if chunk.sequence_id == 1]
    last = max(place for place, chunk in enumerate(chunks) if chunk.start == 0)
    assert last > 0 and sum(chunk.num_rows for chunk in chunks[last:]) == 40
    assert engine.finished.keys() == {0, 1}


def test_inputs_that_cannot_be_chunked_are_processed_whole() -> None:
    scheduler = make_scheduler(0, num_slots=8, max_step_tokens=16, is_whole=True)
    engine = Engine(scheduler)
    engine.add(*(to_embed(number, length) for number, length in enumerate((10, 6, 40, 5, 12))))
    assert [lengths(plan) for plan in engine.run()] == [[10, 6], [40], [5], [12]]


def test_a_long_batch_of_embeddings_never_leaves_a_stream_out() -> None:
    """A decoding stream has a chunk in each step while 150 inputs are embedded."""
    engine = Engine(make_scheduler(max_step_tokens=64, max_num_seqs=8))
    engine.add(make_submit(0, 10, max_tokens=60))
    engine.step()
    engine.add(*(to_embed(number, 20) for number in range(1, 151)))
    plans = engine.run()
    decoding = [any(chunk.sequence_id == 0 for chunk in plan.chunks) for plan in plans]
    assert all(decoding[:59])
    assert max(sum(lengths(plan)) for plan in plans) <= 64
    assert len(engine.finished) == 151
