"""Admission of requests, and the time at which refused clients may retry."""

import asyncio
import gc
import heapq
import itertools
import random
import weakref
from pathlib import Path

import msgspec
import pytest

from headrace.engines.client import EngineUp
from headrace.fleet.queue_eta import NextStart, QueueEta, Schedule, Waiting, starts
from headrace.generation.admission import Admission, Capacity, Demand, KeyLimits, QueueTicket
from headrace.generation.generation import Generation
from headrace.generation.registry import Found
from headrace.streams.events import Error, Queued
from headrace.streams.record import Names
from headrace.streams.stores.sqlite import SqliteStore
from headrace_common.config.settings import StreamConfig
from headrace_common.errors import RequestError
from headrace_common.ids import SequenceId
from headrace_common.messages import FinishReason
from tests.fleet.fakes import DOWN, READY, STATUS, FakeEngine
from tests.generation.fakes import make_request, models_of, opened, read, running
from tools.harness.eventually import settle

ONE_AT_A_TIME = Capacity(1, 100)


def make_admission(**options: int) -> Admission:
    config = StreamConfig(**options)
    return Admission(config, KeyLimits(config), QueueEta())


def foretell(admission: Admission, schedule: Schedule, tokens_per_s: float) -> None:
    eta = admission._eta
    eta.schedule, eta.tokens_per_s = schedule, tokens_per_s


def asked(number: int, owner: str = "", num_choices: int = 1, num_tokens: int = 5) -> Demand:
    return Demand(owner, str(number).encode(), num_choices, num_tokens)


def refusal(admission: Admission, request: Demand, now: float = 0.0) -> RequestError:
    with pytest.raises(RequestError) as refused:
        admission.enter(request, ONE_AT_A_TIME, now)
    return refused.value


async def test_a_thousand_concurrent_durable_requests_do_not_exceed_the_queue(
    folder: Path, tmp_path: Path
) -> None:
    store = SqliteStore.open(tmp_path)
    async with running(folder, store, max_num_queued_reqs=16) as (generation, engine):
        made = await asyncio.gather(
            *(
                generation.open(make_request(), Names(key=str(i), digest=str(i).encode()))
                for i in range(1000)
            ),
            return_exceptions=True,
        )
        refused = [it for it in made if isinstance(it, RequestError)]
        assert {error.code for error in refused} == {"server_overloaded"}
        assert len(made) - len(refused) == 16
        await settle()
        assert len(engine.submits) == 16
        assert {error.retry_after_s > 0 for error in refused} == {True}
    await store.close()


async def test_a_queue_place_is_freed_however_its_stream_ends(folder: Path) -> None:
    async with running(folder) as (generation, engine):
        await opened(generation, engine, n=2)
        admission = generation.queues.of(generation.fleet.hosts.first)
        assert (admission.num_live, admission.num_waiting, admission.num_tokens) == (2, 2, 5)
        first, second = (it.sequence_id for it in engine.submits[-1].sequences)
        await engine.start(first)
        assert (admission.num_live, admission.num_waiting, admission.num_tokens) == (2, 1, 0)
        await engine.finish(first, FinishReason.LENGTH)
        await engine.finish(second, FinishReason.LENGTH)
        stopped = await opened(generation, engine)
        stopped.stop(RequestError("cancelled", ""))
        await settle()
        assert admission.num_waiting == 1, "until the engine has let go"
        await engine.let_go()
        await opened(generation, engine)
        await engine.say(DOWN)
        assert admission.num_waiting == 1
        await engine.say(EngineUp(READY))
        await engine.finish(engine.newest, FinishReason.ERROR)
        with pytest.raises(RequestError):
            await generation.open(make_request("x" * 300))
        assert (admission.num_live, admission.num_waiting, admission.num_tokens) == (0, 0, 0)


def test_an_empty_queue_accepts_any_prompt_and_a_full_one_reports_its_tokens() -> None:
    admission = make_admission(max_num_queued_tokens=50)
    place = admission.enter(asked(0, num_tokens=90), ONE_AT_A_TIME, 0.0)
    error = refusal(admission, asked(1))
    assert error.code == "server_overloaded"
    assert "90 prompt tokens" in error.message and "50" in error.message
    place.update(1, 0, 0)
    admission.enter(asked(1, num_tokens=40), ONE_AT_A_TIME, 0.0)
    admission.enter(asked(2, num_tokens=10), ONE_AT_A_TIME, 0.0)
    refusal(admission, asked(3, num_tokens=1))


async def test_a_queue_full_of_tokens_refuses_a_request_before_tokenizing_it(folder: Path) -> None:
    async with running(folder, max_num_queued_tokens=5) as (generation, engine):
        await opened(generation, engine)
        generation.work = None  # type: ignore[assignment]
        with pytest.raises(RequestError) as refused:
            await generation.open(make_request())
        assert refused.value.code == "server_overloaded"


def test_one_key_may_fill_half_of_the_queue() -> None:
    admission = make_admission(max_num_queued_reqs=4, max_num_queued_tokens=100)
    running = admission.enter(asked(0, "a"), ONE_AT_A_TIME, 0.0)
    running.update(1, 0, 0)
    waiting = [admission.enter(asked(i, "a"), ONE_AT_A_TIME, 0.0) for i in (1, 2)]
    error = refusal(admission, asked(3, "a"))
    assert error.code == "server_overloaded"
    assert "2 choices of this key are waiting, and one key may have 2" in error.message
    assert error.retry_after_s > 0
    places = [admission.enter(asked(i, "b"), ONE_AT_A_TIME, 0.0) for i in (1, 2)]
    for place in (*waiting, *places):
        place.close()
    admission.enter(asked(3, "a", num_tokens=30), ONE_AT_A_TIME, 0.0)
    error = refusal(admission, asked(4, "a", num_tokens=30))
    assert "30 prompt tokens of this key" in error.message and "may have 50" in error.message
    admission.enter(asked(4, "b", num_tokens=30), ONE_AT_A_TIME, 0.0)


def test_without_keys_one_client_may_fill_the_queue() -> None:
    admission = make_admission(max_num_queued_reqs=4)
    for number in range(4):
        admission.enter(asked(number), ONE_AT_A_TIME, 0.0)
    assert "4 choices are waiting" in refusal(admission, asked(4)).message


def test_without_a_queue_a_request_is_only_accepted_if_it_can_run() -> None:
    admission = make_admission(max_num_queued_reqs=0)
    place = admission.enter(asked(0), ONE_AT_A_TIME, 0.0)
    place.update(1, 0, 0)
    assert refusal(admission, asked(1)).code == "server_overloaded"
    place.close()
    admission.enter(asked(1), ONE_AT_A_TIME, 0.0)


def schedule(*in_s: float) -> Schedule:
    return Schedule(0.0, (NextStart(s, 10) for s in in_s))


def told(admission: Admission, request: Demand, now: float = 0.0) -> float:
    """Return the seconds after which a refused client may retry, without the margin."""
    return round((refusal(admission, request, now).retry_after_s - 0.1) / 1.1, 3)


def test_a_refused_request_is_told_when_the_queue_will_have_room() -> None:
    admission = make_admission(max_num_queued_reqs=2, max_num_queued_tokens=25)
    for number in range(2):
        admission.enter(asked(number, num_tokens=10), ONE_AT_A_TIME, 0.0)
    foretell(admission, schedule(2, 5, 9, 14), 100.0)
    assert told(admission, asked(2)) == 2
    assert told(admission, asked(2), now=0.5) == 1.5, "the same one came back"
    assert told(admission, asked(3)) == 5, "behind the one that will return"
    assert told(admission, asked(4, num_tokens=20)) == 9
    admission = make_admission(max_num_queued_tokens=25)
    for number in range(2):
        admission.enter(asked(number, num_tokens=10), ONE_AT_A_TIME, 0.0)
    foretell(admission, schedule(2, 5, 9), 100.0)
    assert told(admission, asked(2, num_tokens=25)) == 5


def test_a_new_request_does_not_overtake_a_refused_one_that_returns() -> None:
    admission = make_admission(max_num_queued_reqs=2)
    admission.enter(asked(0), ONE_AT_A_TIME, 0.0)
    first = admission.enter(asked(1), ONE_AT_A_TIME, 0.0)
    foretell(admission, schedule(2, 5, 9, 14), 100.0)
    refusal(admission, asked(2))
    first.update(1, 0, 0)
    assert "1 places are reserved" in refusal(admission, asked(3), now=2.0).message
    admission.enter(asked(2), ONE_AT_A_TIME, 2.3)
    assert refusal(admission, asked(3), now=20.0).code == "server_overloaded"


class Crowd:
    """A simulation of clients that retry when told to, with four places and a virtual clock."""

    MEAN_S, NUM_PLACES = 2.0, 4

    def __init__(self, arrivals: list[float]) -> None:
        self.num_returned = self.num_admitted = 0
        self._dice = random.Random(3)
        self._numbers = itertools.count()
        self._admission = make_admission(max_num_queued_reqs=8)
        self._coming = [(at, next(self._numbers), False) for at in arrivals]
        heapq.heapify(self._coming)
        self._ends: list[tuple[float, int, QueueTicket]] = []
        self._waiting: list[QueueTicket] = []

    def run(self) -> None:
        while self._coming:
            if self._ends and self._ends[0] < self._coming[0]:
                now, _, place = heapq.heappop(self._ends)
                place.close()
            else:
                now, number, is_back = heapq.heappop(self._coming)
                self._ask(now, number, is_back)
            while self._waiting and len(self._ends) < self.NUM_PLACES:
                place = self._waiting.pop(0)
                place.update(1, 0, 0)
                ends_at = now + self._dice.uniform(0.2, 1.8) * self.MEAN_S
                heapq.heappush(self._ends, (ends_at, next(self._numbers), place))

    def _ask(self, now: float, number: int, is_back: bool) -> None:
        usual = itertools.repeat(Waiting(0.01, self.MEAN_S))
        left = [max(self.MEAN_S / 4, end - now) for end, _, _ in self._ends]
        foretold = starts(left, self.NUM_PLACES, 0.0, usual)
        coming = Schedule(now, (NextStart(s, 5) for s in foretold))
        foretell(self._admission, coming, 500.0)
        try:
            place = self._admission.enter(asked(number), Capacity(self.NUM_PLACES, 100), now)
            self._waiting.append(place)
            self.num_admitted += is_back
        except RequestError as error:
            heapq.heappush(self._coming, (now + error.retry_after_s, number, True))
        self.num_returned += is_back


@pytest.mark.parametrize("load", ["steady", "bursts"])
def test_retry_after_leads_to_admission(load: str) -> None:
    dice = random.Random(1)
    if load == "steady":
        arrivals = list(itertools.accumulate(dice.expovariate(1.8) for _ in range(3000)))
    else:
        arrivals = [60.0 * i + dice.random() for i in range(30) for _ in range(40)]
    crowd = Crowd(arrivals)
    crowd.run()
    share = crowd.num_admitted / crowd.num_returned
    print(f"{load}: {crowd.num_returned} came back as they were told, {share:.0%} got in")
    assert crowd.num_returned > 100 and share >= 0.9


def test_a_key_at_its_rate_limit_is_told_when_to_retry() -> None:
    config = StreamConfig(key_requests_per_minute=2, key_tokens_per_minute=60)
    limits = KeyLimits(config)
    admission = Admission(config, limits, QueueEta())
    capacity = Capacity(8, 100)
    for number in range(2):
        admission.enter(asked(number, "a", num_tokens=10), capacity, 0.0)
    with pytest.raises(RequestError) as refused:
        admission.enter(asked(2, "a"), capacity, 0.0)
    assert refused.value.code == "rate_limit_exceeded" and refused.value.retry_after_s == 30
    admission.enter(asked(2, "b"), capacity, 0.0)
    limits.used("a", 70)
    with pytest.raises(RequestError) as refused:
        admission.enter(asked(2, "a", num_tokens=10), capacity, 30.0)
    assert "tokens a minute" in refused.value.message
    assert refused.value.retry_after_s == pytest.approx(10)
    admission.enter(asked(2, "a", num_tokens=10), capacity, 30.0 + refused.value.retry_after_s)


def test_a_prompt_beyond_the_token_rate_is_accepted_from_an_idle_key() -> None:
    admission = make_admission(key_tokens_per_minute=60)
    admission.enter(asked(0, num_tokens=90), Capacity(8, 100), 0.0)
    assert refusal(admission, asked(1, num_tokens=90)).retry_after_s == 90


async def last_of(generation: Generation, engine: FakeEngine, stream: Found) -> Error:
    while not engine.cancels:
        await asyncio.sleep(0.005)
    await engine.let_go()
    last = (await read(stream))[-1]
    assert isinstance(last, Error)
    return last


async def test_a_request_that_waits_too_long_gets_queue_timeout(folder: Path) -> None:
    async with running(folder, queue_timeout_s=0.05) as (generation, engine):
        begun = await opened(generation, engine)
        await engine.start(engine.newest)
        last = await last_of(generation, engine, await opened(generation, engine))
        assert (last.code, last.status, last.retryable) == ("queue_timeout", 429, True)
        assert not begun.ended.is_set()  # type: ignore[union-attr]


async def test_an_answer_that_takes_too_long_gets_request_timeout(folder: Path) -> None:
    async with running(folder, request_timeout_s=0.05) as (generation, engine):
        stream = await opened(generation, engine)
        await engine.start(engine.newest)
        last = await last_of(generation, engine, stream)
        assert (last.code, last.status, last.retryable) == ("request_timeout", 504, False)


async def test_every_waiting_stream_gets_its_queue_position(folder: Path) -> None:
    async with running(folder) as (generation, engine):
        streams = [await opened(generation, engine) for _ in range(200)]
        queue = tuple(SequenceId(submit.sequences[0].sequence_id) for submit in engine.submits)
        await engine.say(msgspec.structs.replace(STATUS, num_waiting=200, queue=queue))
        for position, stream in enumerate(streams, 1):
            events, _ = await stream.log.read(-1, 10)
            (told,) = (event for event in events if isinstance(event, Queued))
            assert (told.position, told.waiting) == (position, 200)


async def test_the_engine_gets_the_owner_of_a_request(folder: Path) -> None:
    async with running(folder) as (generation, engine):
        await opened(generation, engine, Names(owner="somebody"))
        assert engine.submits[-1].client == "somebody"


async def test_a_stopped_server_can_admit_again_until_it_ends(folder: Path) -> None:
    async with running(folder) as (generation, _):
        queues, host = generation.queues, generation.fleet.hosts.first
        queues.stop()
        with pytest.raises(RequestError, match="shutting down"):
            queues.of(host)
        queues.admit_again()
        assert queues.of(host).num_live == 0
        queues.end()
        queues.admit_again()
        with pytest.raises(RequestError, match="shutting down"):
            await generation.open(make_request())


async def test_a_resumed_stream_gets_a_place_while_no_request_is_admitted(
    folder: Path,
) -> None:
    async with running(folder, max_num_queued_reqs=1) as (generation, engine):
        queues, host = generation.queues, generation.fleet.hosts.first
        await opened(generation, engine)
        queues.stop()
        queues.resume(host, "").update(1, 1, 5)
        queues.admit_again()
        assert queues.of(host).num_waiting == 2


async def test_the_queue_of_a_removed_model_is_freed(folder: Path) -> None:
    async with models_of(folder, "ab") as (generation, _):
        queue = weakref.ref(generation.queues.of(generation.fleet.hosts.exact("a")))
        generation.fleet.become((generation.fleet.hosts.exact("b"),))
        gc.collect()
        assert queue() is None
