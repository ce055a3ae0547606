"""Tests replicas over fake engines: placing, moving, scaling and replacing."""

import asyncio
import contextlib
from array import array
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.engines.client import EngineDown, EngineNews, EngineResized, EngineUp
from headrace.fleet import replica
from headrace.fleet import replicas as module
from headrace.fleet.model_host import ModelHost
from headrace.fleet.replicas import Replicas
from headrace.fleet.served_model import ServedModel
from headrace.generation.generation import Generation
from headrace.metrics.metrics import Metrics
from headrace.protocols.worker import Jobs
from headrace.streams.events import Error, Heartbeat, Tokens
from headrace.streams.stores.memory import MemoryStore
from headrace.workers.pool import ThreadJobRunner
from headrace_common.config.settings import ModelConfig, ServerConfig
from headrace_common.ids import SequenceId, StreamId
from headrace_common.messages import Cancel, FinishReason, NewSequence, Outputs, Status, Submit
from headrace_common.sampling import Sampling
from tests.fleet.fakes import DOWN, READY, STATUS, FakeEngine
from tests.generation.fakes import make_request, read
from tools.harness.eventually import settle

LIMIT_S = 30


class Scene:
    """Replicas over fake engines, with the engines in starting order and all messages."""

    def __init__(self, fewest: int = 2, most: int = 2, idle_s: float | None = None) -> None:
        self.engines: list[FakeEngine] = []
        self.replicas = Replicas(self._start, fewest, most, idle_s)
        self.news: list[EngineNews] = []
        self.reading = asyncio.create_task(self._read())

    def _start(self) -> FakeEngine:
        self.engines.append(FakeEngine())
        return self.engines[-1]

    async def _read(self) -> None:
        async for news in self.replicas.news:
            self.news.append(news)

    async def up(self, *numbers: int) -> None:
        await settle()
        for number in numbers:
            await self.engines[number].say(EngineUp(READY, pid=number))

    def heard(self, kind: type) -> list[EngineNews]:
        return [news for news in self.news if isinstance(news, kind)]

    def ask(self, *ids: int, stream: str = "", prompts: int = 1) -> None:
        new = (NewSequence(SequenceId(id), n % prompts, 0) for n, id in enumerate(ids))
        prompt = array("i", [1, 2, 3]).tobytes()
        name = StreamId(stream or f"s{ids[0]}")
        self.replicas.submit(
            Submit(name, (prompt,) * prompts, tuple(new), Sampling(), arrival=float(ids[0]))
        )

    def ran(self, number: int) -> list[int]:
        return [new.sequence_id for it in self.engines[number].submits for new in it.sequences]


async def test_each_engine_fills_its_places_and_the_other_requests_wait() -> None:
    async with asyncio.timeout(LIMIT_S):
        made = Scene()
        await made.up(0, 1)
        for id in range(5):
            made.ask(id)
        assert (made.ran(0), made.ran(1)) == ([0, 2], [1, 3])
        await made.engines[1].say(STATUS)
        (status,) = made.heard(Status)
        assert isinstance(status, Status) and status.queue == (SequenceId(4),)
        await made.engines[1].finish(SequenceId(3), FinishReason.LENGTH)
        assert made.ran(1) == [1, 3, 4]
        await made.replicas.close()


async def test_starting_or_losing_one_engine_only_changes_the_capacity() -> None:
    async with asyncio.timeout(LIMIT_S):
        made = Scene()
        await made.up(0, 1)
        (up,), (larger,) = made.heard(EngineUp), made.heard(EngineResized)
        assert isinstance(up, EngineUp) and up.ready == READY
        assert isinstance(larger, EngineResized) and larger.ready.max_num_seqs == 4
        assert larger.has_started and larger.pid == 0
        await made.engines[0].say(DOWN)
        down, smaller = made.heard(EngineDown)[-1], made.heard(EngineResized)[-1]
        assert isinstance(down, EngineDown) and down.lost == ()
        assert isinstance(smaller, EngineResized) and smaller.ready.max_num_seqs == 2
        assert not smaller.has_started and smaller.pid == 1
        await made.engines[1].say(DOWN)
        assert made.heard(EngineDown)[-1] == DOWN
        await made.up(0)
        assert len(made.heard(EngineUp)) == 2
        await made.replicas.close()


async def test_an_engines_death_lists_all_sequences_of_its_streams() -> None:
    async with asyncio.timeout(LIMIT_S):
        made = Scene()
        await made.up(0, 1)
        made.ask(0, 1, stream="both", prompts=2)
        made.ask(2)
        made.ask(3)
        made.ask(4, 5, stream="line", prompts=2)
        assert (made.ran(0), made.ran(1)) == ([0, 2], [1, 3])
        await made.engines[0].say(DOWN)
        (down,) = made.heard(EngineDown)
        assert isinstance(down, EngineDown) and set(down.lost or ()) == {0, 1, 2}
        assert made.engines[1].cancels == [Cancel((SequenceId(1),))]
        await made.engines[1].let_go()  # only then is its place free
        assert made.ran(1) == [1, 3, 4]
        await made.replicas.close()


async def test_waiting_requests_are_cancelled_at_once_and_running_ones_by_the_engine() -> None:
    async with asyncio.timeout(LIMIT_S):
        made = Scene(fewest=1)
        await made.up(0)
        for id in range(3):
            made.ask(id)
        made.replicas.cancel(Cancel((SequenceId(0), SequenceId(2), SequenceId(9))))
        await settle()
        (outputs,) = made.heard(Outputs)
        assert isinstance(outputs, Outputs)
        assert [end.sequence_id for end in outputs.finished] == [2]
        assert made.engines[0].cancels == [Cancel((SequenceId(0),))]
        await made.replicas.close()


async def test_a_model_only_ends_when_its_last_engine_is_given_up() -> None:
    async with asyncio.timeout(LIMIT_S):
        given_up = EngineDown("load_failed", "No memory.", given_up=True)
        made = Scene()
        await made.up(0)
        await made.engines[1].say(given_up)
        assert not made.heard(EngineDown)
        await made.engines[0].say(given_up)
        assert made.heard(EngineDown) == [given_up]
        await made.replicas.close()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def test_another_engine_starts_while_requests_wait_and_ends_when_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(replica, "_GROW_AFTER_S", 0.05)

    async with asyncio.timeout(LIMIT_S):
        made = Scene(fewest=1, most=2, idle_s=0.1)
        await made.up(0)
        for id in range(4):
            made.ask(id)
        await until(lambda: len(made.engines) == 2)
        await made.up(1)
        assert made.ran(1) == [2, 3]
        for id in range(4):
            await made.engines[id // 2].finish(SequenceId(id), FinishReason.LENGTH)
        await until(lambda: len(made.replicas.all()) == 1)
        assert not any(it.num_taken for it in made.replicas.all())
        assert not any(down.given_up for down in made.heard(EngineDown))  # type: ignore[union-attr]
        await made.replicas.close()


async def test_a_resize_takes_effect_at_once_and_drains_removed_replicas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_CHECK_INTERVAL_S", 0.01)

    def numbers(made: Scene) -> list[int]:
        return [it.number for it in made.replicas.all()]

    async with asyncio.timeout(LIMIT_S):
        made = Scene(fewest=1, most=1)
        await made.up(0)
        made.replicas.resize(3, 3, LIMIT_S)
        await until(lambda: numbers(made) == [0, 1, 2])
        await made.up(1, 2)
        for id in range(6):  # two places each
            made.ask(id)
        assert sorted(len(made.ran(number)) for number in range(3)) == [2, 2, 2]
        least = next(number for number in range(3) if 0 in made.ran(number))
        others = [number for number in range(3) if number != least]
        await made.engines[least].finish(SequenceId(0), FinishReason.LENGTH)
        made.replicas.resize(2, 2, LIMIT_S)
        await until(lambda: any(it.is_leaving for it in made.replicas.all()))
        await settle()
        made.ask(6)
        assert 6 not in made.ran(least) and numbers(made) == [0, 1, 2]  # it still has a stream
        last = next(id for id in made.ran(least) if id)
        await made.engines[least].finish(SequenceId(last), FinishReason.LENGTH)
        await until(lambda: numbers(made) == others)
        made.replicas.resize(1, 1, 0.0)
        await until(lambda: len(made.replicas.all()) == 1)
        lost = [len(down.lost or ()) for down in made.heard(EngineDown)]  # type: ignore[attr-defined]
        assert lost == [0, 2]  # the streams of the second go on at the last one
        await made.replicas.close()


async def test_no_engine_is_started_for_a_model_that_was_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_CHECK_INTERVAL_S", 0.001)
    monkeypatch.setattr(replica, "_RETRY_AFTER_S", 0.001)
    async with asyncio.timeout(LIMIT_S):
        made = Scene(fewest=1)
        await made.engines[0].say(EngineDown("load_failed", "No memory.", given_up=True))
        await made.reading  # The news has ended.
        await asyncio.sleep(0.05)
        assert len(made.engines) == 1


async def test_the_only_engine_is_replaced_even_if_its_successor_loads_slowly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_CHECK_INTERVAL_S", 0.001)
    async with asyncio.timeout(LIMIT_S):
        made = Scene(fewest=1, most=1)
        await made.up(0)
        replacing = asyncio.create_task(made.replicas.replace(0, 0.0))
        await asyncio.sleep(0.05)
        await made.up(1)
        await replacing
        assert [it.number for it in made.replicas.all()] == [1]
        await made.replicas.close()


async def test_close_waits_for_a_replaced_engine_to_end() -> None:
    # The engine still holds memory, and another model may be loaded after the close.
    async with asyncio.timeout(LIMIT_S):
        made = Scene()
        await made.up(0, 1)
        has_ended = asyncio.Event()
        made.engines[0].close = has_ended.wait  # type: ignore[assignment]
        replacing = asyncio.create_task(made.replicas.replace(0, 0.0))
        await settle()
        closing = asyncio.create_task(made.replicas.close())
        await settle()
        assert not closing.done()
        has_ended.set()
        await asyncio.gather(closing, replacing)


async def test_an_engine_stays_if_its_successor_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_CHECK_INTERVAL_S", 0.001)
    async with asyncio.timeout(LIMIT_S):
        made = Scene(fewest=1, most=1)
        await made.up(0)
        replacing = asyncio.create_task(made.replicas.replace(0, 0.0))
        await settle()
        await made.engines[1].say(EngineDown("load_failed", "No memory.", given_up=True))
        await replacing
        (kept,) = made.replicas.all()
        assert kept.number == 0 and kept.up and not kept.is_leaving
        await made.replicas.close()


@contextlib.asynccontextmanager
async def running(folder: Path) -> AsyncIterator[tuple[Generation, list[FakeEngine]]]:
    """Run a generation over two fake engines that are up."""
    engines: list[FakeEngine] = []

    def start_one() -> FakeEngine:
        engines.append(FakeEngine())
        return engines[-1]

    model = ModelConfig(model=str(folder), served_model_name=("tiny",))
    served, metrics = ServedModel(model), Metrics()
    host = ModelHost(model, lambda _: Replicas(start_one, 2, 2), metrics, served)
    work = ThreadJobRunner(Jobs(served))
    generation = Generation(ServerConfig(models=(model,)), (host,), MemoryStore(), work, metrics)
    task = asyncio.create_task(generation.run())
    await settle()
    for number, engine in enumerate(engines):
        await engine.say(EngineUp(READY, pid=number))
    try:
        yield generation, engines
    finally:
        await generation.fleet.close()
        await asyncio.wait([task], timeout=5)
        task.cancel()


async def test_a_stream_continues_on_another_engine_with_its_tokens(folder: Path) -> None:
    async with asyncio.timeout(LIMIT_S):
        async with running(folder) as (generation, (first, second)):
            stream = await generation.open(make_request())
            await settle()
            await first.start(first.newest)
            await first.token(first.newest, 65)
            await first.say(DOWN)
            assert generation.state == "ok"
            (again,) = second.submits
            assert array("i", again.sequences[0].generated).tolist() == [65]
            await second.start(second.newest)
            await second.token(second.newest, 66)
            await second.finish(second.newest, FinishReason.LENGTH)
            events = await read(stream)
            ids = [id for it in events if isinstance(it, Tokens) for id in it.ids]
            assert ids == [65, 66]
            assert sum(isinstance(it, Heartbeat) for it in events) == 1


async def test_no_engine_is_started_after_a_close() -> None:
    async with asyncio.timeout(LIMIT_S):
        made = Scene(1, 1)
        await made.up(0)
        closing = asyncio.create_task(made.replicas.close())
        replacing = asyncio.create_task(made.replicas.replace(0, 0.0))
        await asyncio.gather(closing, replacing)
        assert len(made.engines) == 1


async def test_a_replaced_engine_finishes_some_streams_and_the_others_move_once(
    folder: Path,
) -> None:
    async with asyncio.timeout(LIMIT_S):
        async with running(folder) as (generation, engines):
            streams = [await generation.open(make_request()) for _ in range(3)]
            await settle()
            first, second = engines[:2]
            await second.finish(second.newest, FinishReason.LENGTH)
            ended, moved = (it.sequences[0].sequence_id for it in first.submits)
            replacing = asyncio.create_task(generation.fleet.hosts.first.engine.replace(0, 0.2))
            await settle()
            await first.finish(ended, FinishReason.LENGTH)
            await replacing
            await settle()
            assert moved not in (it.sequences[0].sequence_id for it in second.submits)
            assert second.submits[-1].stream_id == first.submits[-1].stream_id
            await second.finish(second.newest, FinishReason.LENGTH)
            found = [await read(stream) for stream in streams]
            gaps = [sum(isinstance(it, Heartbeat) for it in events) for events in found]
            assert sorted(gaps) == [0, 0, 1]
            assert [it.number for it in generation.fleet.hosts.first.engine.replicas] == [1, 2]


async def test_a_request_that_kills_two_engines_is_not_tried_on_a_third(
    folder: Path,
) -> None:
    async with asyncio.timeout(LIMIT_S):
        async with running(folder) as (generation, (first, second)):
            stream = await generation.open(make_request())
            await settle()
            for engine in (first, second):
                await engine.start(engine.newest)
                fatal = replace(DOWN, suspects=(engine.newest,))
                await engine.say(fatal)
                await engine.say(EngineUp(READY))
            assert len(first.submits) == len(second.submits) == 1
            (error,) = (it for it in await read(stream) if isinstance(it, Error))
            assert error.code == "poison_request"
