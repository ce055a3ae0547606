"""Tests the queue in front of several engines."""

from array import array

from headrace.fleet.request_queue import RequestQueue
from headrace_common.ids import SequenceId, StreamId
from headrace_common.layout import MemoryLayout
from headrace_common.messages import Cancel, NewSequence, Submit
from headrace_common.sampling import Sampling

LAYOUT = MemoryLayout(num_blocks=32, max_positions=256)


def line(num_replicas: int = 2, num_places: int = 2) -> RequestQueue:
    made = RequestQueue()
    for replica in range(num_replicas):
        made.placement.open(replica, num_places, LAYOUT.num_blocks)
    return made


def ids(*numbers: int) -> tuple[SequenceId, ...]:
    return tuple(map(SequenceId, numbers))


def ask(
    made: RequestQueue, *numbers: int, stream: str = "", prompts: int = 1, level: int = 0
) -> None:
    new = tuple(NewSequence(id, n % prompts, 0) for n, id in enumerate(ids(*numbers)))
    prompt = (array("i", [1, 2, 3]).tobytes(),) * prompts
    name = StreamId(stream or f"s{numbers[0]}")
    asked = Submit(name, prompt, new, Sampling(), arrival=float(numbers[0]), priority=level)
    made.ask(asked, LAYOUT)


def placed(made: RequestQueue) -> list[tuple[int, list[int]]]:
    return [(replica, [it.sequence_id for it in part.sequences]) for replica, part in made.placed()]


def test_prompts_are_placed_separately_and_a_prompts_choices_together() -> None:
    made = line()
    ask(made, 0, 1, 2, 3, prompts=2)
    parts = list(made.placed())
    assert [[it.sequence_id for it in part.sequences] for _, part in parts] == [[0, 2], [1, 3]]
    assert [replica for replica, _ in parts] == [0, 1]
    assert all(len(part.prompts) == 1 for _, part in parts)
    assert all(it.prompt == 0 for _, part in parts for it in part.sequences)


def test_requests_without_a_place_wait_in_order_of_priority() -> None:
    made = line(num_replicas=1)
    ask(made, 0, 1)
    ask(made, 2, level=1)
    ask(made, 3, 4)
    assert placed(made) == [(0, [0, 1])]
    status = made.status()
    assert status.queue == ids(3, 2) and (status.num_waiting, status.num_waiting_tokens) == (3, 6)
    made.release(SequenceId(0))
    assert placed(made) == []
    made.release(SequenceId(1))
    assert placed(made) == [(0, [3, 4])]


def test_a_cancelled_waiting_sequence_ends_at_once_and_its_sibling_runs() -> None:
    made = line(num_replicas=1)
    ask(made, 0)
    assert placed(made) == [(0, [0])]
    ask(made, 1, 2)
    ended, running = made.cancel(Cancel(ids(1, 9)))
    assert [end.sequence_id for end in ended] == [1] and not running
    assert placed(made) == [(0, [2])]


def test_a_cancelled_running_sequence_keeps_its_place_until_released() -> None:
    made = line(num_replicas=1, num_places=1)
    ask(made, 0)
    ask(made, 1)
    assert placed(made) == [(0, [0])]
    assert made.cancel(Cancel(ids(0))) == ((), {0: Cancel(ids(0))})
    assert placed(made) == []
    made.release(SequenceId(0))
    assert placed(made) == [(0, [1])] and made.cancel(Cancel(ids(0))) == ((), {})


def test_the_streams_of_a_lost_replica_lose_all_their_sequences() -> None:
    made = line(num_places=1)
    ask(made, 0, 1, 2, stream="all", prompts=3)
    ask(made, 3)
    assert placed(made) == [(0, [0]), (1, [1])]
    assert made.close(0) == (ids(0, 1, 2), {1: Cancel(ids(1))})
    assert made.status().queue == ids(3) and placed(made) == []
    made.release(SequenceId(1))
    assert placed(made) == [(1, [3])]


def test_a_replica_that_was_never_up_loses_nothing() -> None:
    made = line(num_replicas=1)
    ask(made, 0)
    assert made.close(7) == ((), {}) and placed(made) == [(0, [0])]


def test_a_lost_sequence_can_be_submitted_again() -> None:
    made = line(num_places=1)
    ask(made, 0)
    assert placed(made) == [(0, [0])]
    assert made.close(0)[0] == ids(0)
    assert made.cancel(Cancel(ids(0))) == ((), {})
    ask(made, 0)
    assert placed(made) == [(1, [0])]
