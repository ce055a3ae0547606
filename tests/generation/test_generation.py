"""Tests streams over a fake engine: ends, disconnects, engine crashes, keys and queues."""

import asyncio
from array import array
from pathlib import Path

import msgspec
import pytest

from headrace.engines.client import EngineUp
from headrace.generation.generation import Generation
from headrace.generation.registry import Found
from headrace.streams.events import AnyEvent, Error, Heartbeat, Progress, Queued, Tokens
from headrace.streams.events import Finish as FinishEvent
from headrace.streams.record import Names, Record
from headrace.streams.store import Stored
from headrace.streams.stores.memory import MemoryStore
from headrace_common.errors import RequestError
from headrace_common.ids import StreamId
from headrace_common.messages import FinishReason
from headrace_common.sampling import Sampling
from tests.fleet.fakes import DOWN, READY, STATUS, FakeEngine
from tests.generation.fakes import make_request, opened, read, running, text_of
from tools.harness.eventually import settle

OPTED_IN = Names(conversation="c", digest=b"1")


def ids(generation: Generation, text: str) -> list[int]:
    return list(generation.fleet.hosts.first.model.tokenizer.encode(text, False))


async def speak(generation: Generation, engine: FakeEngine, text: str) -> None:
    for token_id in ids(generation, text):
        await engine.token(engine.newest, token_id)


async def test_a_log_contains_progress_tokens_and_one_end(folder: Path) -> None:
    async with running(folder) as (generation, engine):
        stream = await opened(generation, engine)
        await engine.start(engine.newest)
        await speak(generation, engine, "hi")
        await engine.finish(engine.newest, FinishReason.LENGTH)
        events = await read(stream)
        assert [event.seq for event in events] == list(range(len(events)))
        assert text_of(events) == "hi" and isinstance(events[-1], FinishEvent)
        assert [e.processed for e in events if isinstance(e, Progress)] == [5]
        assert len(generation.streams) == 0


async def test_a_stop_string_takes_precedence_over_later_tokens_of_the_engine(folder: Path) -> None:
    async with running(folder) as (generation, engine):
        stream = await opened(generation, engine, stop=("END",))
        await engine.start(engine.newest)
        await speak(generation, engine, "one ENDtwo")
        assert engine.cancels[0].finish is FinishReason.STOP
        await engine.finish(engine.newest, FinishReason.LENGTH)
        events = await read(stream)
        assert text_of(events) == "one " and isinstance(events[-1], FinishEvent)
        assert [(e.finish_reason, e.stop_reason) for e in events[-1].ends] == [("stop", "END")]
        assert events[-1].usage.completion_tokens == len(ids(generation, "one END"))


async def leave(stream: object, num_events: int) -> list[AnyEvent]:
    """Read this many events and disconnect; return the events."""
    found: list[AnyEvent] = []
    async with stream.audience.reader() as events:  # type: ignore[attr-defined]
        async for event in events:
            events.sent(event)
            found.append(event)
            if len(found) == num_events:
                break
    await settle()
    return found


async def test_a_stream_ends_if_its_client_disconnects_after_reading_text(folder: Path) -> None:
    async with running(folder) as (generation, engine):
        stream = await opened(generation, engine)
        await engine.start(engine.newest)
        await speak(generation, engine, "hi")
        await leave(stream, 3)
        assert [cancel.sequence_ids for cancel in engine.cancels] == [(engine.newest,)]
        await engine.let_go()
        assert len(generation.streams) == 0


async def test_an_equal_request_attaches_to_the_stream_of_a_disconnected_client(
    folder: Path,
) -> None:
    async with running(folder, linger_s=30) as (generation, engine):
        names = Names(digest=b"1")
        stream = await opened(generation, engine, names)
        await leave(stream, 1)
        assert not engine.cancels
        assert await generation.streams.find_equal(Names(digest=b"2")) is None
        assert await generation.streams.find_equal(Names(owner="other", digest=b"1")) is None
        assert await generation.streams.find_equal(Names(digest=b"1", can_attach=False)) is None
        assert await generation.streams.find_equal(names) is stream


async def test_an_equal_request_does_not_attach_to_a_stream_with_a_reader(folder: Path) -> None:
    async with running(folder) as (generation, engine):
        names = Names(digest=b"1")
        stream = await opened(generation, engine, names)
        async with stream.audience.reader():
            assert await generation.streams.find_equal(names) is None


async def test_a_stream_without_a_client_ends_if_another_request_waits(
    folder: Path,
) -> None:
    async with running(folder, linger_s=30) as (generation, engine):
        unread = await opened(generation, engine, Names(digest=b"1"))
        await leave(unread, 1)
        assert not engine.cancels
        # The engine can run fewer choices than this request has.
        crowd = await opened(generation, engine, Names(digest=b"2"), n=2)
        assert [cancel.sequence_ids for cancel in engine.cancels] == [(0,)]
        left = await opened(generation, engine, Names(digest=b"3"))
        await leave(left, 1)
        assert len(engine.cancels) == 2, "the other requests wait already"
        crowd.stop(RequestError("cancelled", ""))


async def test_without_linger_s_a_stream_ends_when_its_client_disconnects(folder: Path) -> None:
    async with running(folder, linger_s=0) as (generation, engine):
        stream = await opened(generation, engine)
        await leave(stream, 1)
        assert engine.cancels
        await engine.let_go()
        assert len(generation.streams) == 0


@pytest.mark.parametrize(
    "opted_in", [Names(conversation="c"), Names(key="k"), Names(is_stored=True)]
)
async def test_a_stream_that_cannot_be_found_again_ends_with_its_client(
    opted_in: Names, folder: Path
) -> None:
    async with running(folder, linger_s=30) as (generation, engine):
        stream = await opened(generation, engine, Names(digest=b"1", can_attach=False))
        await leave(stream, 1)
        assert engine.cancels
        await engine.let_go()
        assert len(generation.streams) == 0
        found_by_name = msgspec.structs.replace(opted_in, digest=b"1", can_attach=False)
        stream = await opened(generation, engine, found_by_name)
        await leave(stream, 1)
        assert not engine.cancels


async def test_a_stream_of_a_conversation_outlives_its_client(folder: Path) -> None:
    async with running(folder, linger_s=0) as (generation, engine):
        stream = await opened(generation, engine, OPTED_IN)
        await engine.start(engine.newest)
        await speak(generation, engine, "hi")
        await leave(stream, 3)
        await engine.finish(engine.newest, FinishReason.LENGTH)
        assert not engine.cancels
        assert text_of(await read(stream)) == "hi"


async def test_a_key_attaches_an_equal_request_and_refuses_a_different_one(folder: Path) -> None:
    async with running(folder) as (generation, engine):
        names = Names(key="k", digest=b"1")
        stream = await opened(generation, engine, names)
        assert (await generation.streams.find_equal(names)) is stream
        assert await generation.open(make_request(), names) is stream
        with pytest.raises(RequestError) as refused:
            await generation.streams.find_equal(Names(key="k", digest=b"2"))
        assert refused.value.code == "idempotency_key_reused"


async def test_a_new_request_in_a_conversation_replaces_the_running_one(folder: Path) -> None:
    async with running(folder) as (generation, engine):
        old = await opened(generation, engine, OPTED_IN)
        first = engine.newest
        new = await opened(generation, engine, OPTED_IN)
        assert [cancel.sequence_ids for cancel in engine.cancels] == [(first,)]
        await engine.let_go()
        last = (await read(old))[-1]
        assert isinstance(last, Error) and last.code == "replaced"
        assert new.state == "queued"


async def test_a_refused_request_does_not_replace_the_running_one(folder: Path) -> None:
    async with running(folder) as (generation, engine):
        await opened(generation, engine, OPTED_IN)
        with pytest.raises(RequestError):
            await generation.open(make_request("x" * 300), OPTED_IN)
        assert not engine.cancels


async def test_concurrent_requests_in_a_conversation_leave_one_alive(folder: Path) -> None:
    async with running(folder) as (generation, engine):
        await asyncio.gather(*(generation.open(make_request(), OPTED_IN) for _ in range(5)))
        await settle()
        await engine.let_go()
        alive = [stream for stream in generation.streams if not stream.ended.is_set()]
        assert len(alive) == 1


async def test_a_new_engine_continues_where_the_dead_one_stopped(folder: Path) -> None:
    async with running(folder) as (generation, engine):
        stream = await opened(generation, engine, stop=("XYZ",))
        await engine.start(engine.newest)
        await speak(generation, engine, "one X")
        await engine.say(DOWN)
        assert generation.state == "recovering"
        await engine.say(EngineUp(READY))
        again = engine.submits[-1].sequences[0]
        assert list(array("i", again.generated)) == ids(generation, "one X")
        await speak(generation, engine, "YZ more")
        await engine.let_go()
        events = await read(stream)
        assert text_of(events) == "one "
        assert [event.seq for event in events] == list(range(len(events)))


async def recoveries(stream: Found) -> list[int | None]:
    events, _ = await stream.log.read(-1, 1000)
    return [event.attempt for event in events if isinstance(event, Heartbeat)]


async def test_every_stream_reports_each_recovery_immediately(
    folder: Path,
) -> None:
    async with running(folder) as (generation, engine):
        waiting, busy = await opened(generation, engine), await opened(generation, engine)
        await engine.start(engine.newest)
        await speak(generation, engine, "hi")
        for number in (1, 2):
            await engine.say(DOWN)
            for stream in (waiting, busy):
                assert stream.state == "recovering"
                assert await recoveries(stream) == list(range(1, number + 1))
            await engine.say(EngineUp(READY))
            assert (waiting.state, busy.state) == ("queued", "recovering")
        await speak(generation, engine, "!")
        assert busy.state == "decode"


async def test_a_request_sent_while_no_engine_runs_starts_as_recovering(folder: Path) -> None:
    async with running(folder) as (generation, engine):
        await engine.say(DOWN)
        stream = await opened(generation, engine)
        assert stream.state == "recovering" and await recoveries(stream) == [1]


async def test_a_stream_gets_its_new_position_in_the_queue_of_a_new_engine(folder: Path) -> None:
    async with running(folder) as (generation, engine):
        stream = await opened(generation, engine)
        for _ in range(2):
            await engine.say(msgspec.structs.replace(STATUS, queue=(engine.newest,)))
            await engine.say(DOWN)
            await engine.say(EngineUp(READY))
        events, _ = await stream.log.read(-1, 1000)
        assert [type(event).__name__ for event in events[1:]] == ["Queued", "Heartbeat"] * 2


async def test_a_waiting_stream_gets_an_estimate_of_its_wait(folder: Path) -> None:
    async with running(folder) as (generation, engine):
        engine_ready = msgspec.structs.replace(READY, max_num_seqs=1)
        await engine.say(EngineUp(engine_ready))
        status = msgspec.structs.replace(STATUS, num_running=1, prompt_tokens_per_s=1000.0)
        for finish in (FinishReason.LENGTH, None):
            await opened(generation, engine)
            await engine.start(engine.newest)
            await engine.say(status)
            await speak(generation, engine, "hello")
            await engine.say(status)
            if finish:
                await engine.finish(engine.newest, finish)
        stream = await opened(generation, engine, n=2)
        queue = tuple(sequence.sequence_id for sequence in engine.submits[-1].sequences)
        await engine.say(msgspec.structs.replace(status, queue=queue))
        events, _ = await stream.log.read(-1, 1000)
        (queued,) = (event for event in events if isinstance(event, Queued))
        assert queued.position == 1 and queued.eta_ms is not None


async def test_many_readers_share_one_heartbeat(folder: Path) -> None:
    async with running(folder) as (generation, engine):
        stream = await opened(generation, engine)
        for _ in range(5):
            stream.beat("data", 60)
            stream.beat("comment", 60)
            await settle()
            stream.beat("data", 60)
        events, _ = await stream.log.read(-1, 1000)
        assert [e.form for e in events if isinstance(e, Heartbeat)] == ["data", "comment"]
        stream.beat("data", 0)
        await settle()
        assert stream.log.next_seq == len(events) + 1


async def test_late_messages_of_a_dead_engine_are_ignored(folder: Path) -> None:
    async with running(folder) as (generation, engine):
        stream = await opened(generation, engine)
        old = engine.newest
        await engine.start(old)
        await engine.say(DOWN)
        await engine.say(EngineUp(READY))
        await engine.token(old, ids(generation, "x")[0])
        await engine.finish(engine.newest, FinishReason.LENGTH)
        assert text_of(await read(stream)) == ""


async def test_a_stop_while_no_engine_runs_is_final(folder: Path) -> None:
    async with running(folder) as (generation, engine):
        stream = await opened(generation, engine)
        await engine.say(DOWN)
        stream.stop(RequestError("cancelled", "Stopped."))
        await settle()
        num_submits = len(engine.submits)
        await engine.say(EngineUp(READY))
        assert len(engine.submits) == num_submits
        last = (await read(stream))[-1]
        assert isinstance(last, Error) and last.code == "cancelled"


async def test_a_request_that_kills_two_engines_is_ended_as_poison(folder: Path) -> None:
    async with running(folder) as (generation, engine):
        poison = await opened(generation, engine)
        first = engine.newest
        await opened(generation, engine)
        await engine.say(msgspec.structs.replace(DOWN, suspects=(first, engine.newest)))
        await engine.say(EngineUp(READY))
        assert [submit.suspect for submit in engine.submits[-2:]] == [True, True]
        guilty = engine.submits[-2].sequences[0].sequence_id
        await engine.say(msgspec.structs.replace(DOWN, suspects=(guilty,)))
        last = (await read(poison))[-1]
        assert isinstance(last, Error) and last.code == "poison_request"
        await engine.say(EngineUp(READY))
        assert len(generation.streams) == 1


async def test_three_external_kills_end_no_stream_but_the_fourth_does(folder: Path) -> None:
    async with running(folder) as (generation, engine):
        stream = await opened(generation, engine)
        for _ in range(3):
            assert not stream.ended.is_set()
            killed = msgspec.structs.replace(DOWN, suspects=(engine.newest,), from_outside=True)
            await engine.say(killed)
            await engine.say(EngineUp(READY))
        assert not stream.ended.is_set()
        await engine.say(
            msgspec.structs.replace(DOWN, suspects=(engine.newest,), from_outside=True)
        )
        assert stream.ended.is_set()


async def test_a_restarted_server_continues_the_streams_in_its_store(folder: Path) -> None:
    store = MemoryStore()
    async with running(folder, store) as (generation, engine):
        stream = await opened(generation, engine, OPTED_IN, stop=("three",))
        await engine.start(engine.newest)
        await speak(generation, engine, "one two th")
        for task in list(generation.writers.tasks.values()):
            task.cancel()  # as a kill would: nothing more is written
        await settle()
    async with running(folder, store) as (generation, engine):
        await settle()
        (resumed,) = generation.streams
        assert resumed.state == "recovering" and await recoveries(resumed) == [1]
        again = engine.submits[-1].sequences[0]
        assert list(array("i", again.generated)) == ids(generation, "one two th")
        await speak(generation, engine, "ree four")
        await engine.let_go()
        events = await read(stream)
        assert text_of(events) == "one two "
        assert [event.seq for event in events] == list(range(len(events)))


async def test_the_next_server_writes_an_end_that_a_killed_server_did_not(
    folder: Path,
) -> None:
    store = MemoryStore()
    async with running(folder, store) as (generation, engine):
        stream = await opened(generation, engine, OPTED_IN, stop=("three",))
        await engine.start(engine.newest)
        await speak(generation, engine, "one two three")  # and the engine has not let go yet
        for task in list(generation.writers.tasks.values()):
            task.cancel()
        await settle()
    async with running(folder, store):
        events = await read(stream)
    assert [e.end.finish_reason for e in events if isinstance(e, Tokens) and e.end] == ["stop"]
    assert text_of(events) == "one two " and isinstance(events[-1], FinishEvent)
    assert events[-1].usage.completion_tokens == len(ids(generation, "one two three"))


async def test_a_choice_that_ended_reports_it_once_while_the_others_continue(folder: Path) -> None:
    async with running(folder) as (generation, engine):
        stream = await opened(generation, engine, n=2)
        first, second = (new.sequence_id for new in engine.submits[-1].sequences)
        await engine.start(first, second)
        await engine.finish(first, FinishReason.STOP)
        for token_id in ids(generation, "on"):
            await engine.token(second, token_id)
        await engine.finish(second, FinishReason.LENGTH)
        ends = [(e.choice, e.end) for e in await read(stream) if isinstance(e, Tokens) and e.end]
        assert [choice for choice, _ in ends] == [0, 1]


async def test_a_stream_is_not_continued_with_other_weights(folder: Path) -> None:
    async with running(folder) as (generation, engine):
        stream = await opened(generation, engine, OPTED_IN)
        await engine.say(DOWN)
        await engine.say(EngineUp(msgspec.structs.replace(READY, fingerprint="other")))
        last = (await read(stream))[-1]
        assert isinstance(last, Error) and last.code == "model_changed"
        assert "other weights" in last.message


async def test_another_dtype_is_reported_and_the_key_may_run_again(folder: Path) -> None:
    async with running(folder) as (generation, engine):
        names = Names(key="k", digest=b"1")
        stream = await opened(generation, engine, names)
        await engine.say(DOWN)
        other = msgspec.structs.replace(READY, fingerprint="other", dtype="bfloat16")
        await engine.say(EngineUp(other))
        last = (await read(stream))[-1]
        assert isinstance(last, Error) and "bfloat16 instead of float32" in last.message
        assert await generation.streams.find_equal(names) is None
        assert (await opened(generation, engine, names)).record.id != stream.record.id


async def test_another_variant_of_the_kernels_is_reported(folder: Path) -> None:
    async with running(folder) as (generation, engine):
        stream = await opened(generation, engine, OPTED_IN)
        await engine.say(DOWN)
        other = msgspec.structs.replace(READY, fingerprint="other", kernels="avx512")
        await engine.say(EngineUp(other))
        last = (await read(stream))[-1]
        assert isinstance(last, Error)
        assert "cpu with kernels avx512 instead of cpu with kernels plain" in last.message


@pytest.mark.parametrize("room", [-1, 0])
async def test_a_stream_too_long_for_a_smaller_context_ends_with_an_error(
    folder: Path, room: int
) -> None:
    async with running(folder) as (generation, engine):
        stream = await opened(generation, engine, OPTED_IN)
        await engine.start(engine.newest)
        await speak(generation, engine, "hi")
        await engine.say(DOWN)
        num = stream.record.num_prompt_tokens + len(ids(generation, "hi"))
        limit = num + room
        await engine.say(EngineUp(msgspec.structs.replace(READY, max_model_len=limit)))
        last = (await read(stream))[-1]
        assert isinstance(last, Error) and last.code == "model_changed"
        assert f"now {limit} tokens, and this stream had {num}" in last.message


@pytest.mark.parametrize(("max_tokens", "end"), [(2, "finish"), (9, "error"), (None, "error")])
async def test_only_a_stream_cut_short_by_a_smaller_context_ends_with_an_error(
    folder: Path, max_tokens: int | None, end: str
) -> None:
    async with running(folder) as (generation, engine):
        sampling = Sampling(temperature=0, max_tokens=max_tokens)
        stream = await opened(generation, engine, OPTED_IN, sampling=sampling)
        await engine.say(DOWN)
        text = ids(generation, "hi")
        limit = stream.record.num_prompt_tokens + len(text)
        assert len(text) == 2
        await engine.say(EngineUp(msgspec.structs.replace(READY, max_model_len=limit)))
        await engine.start(engine.newest)
        await speak(generation, engine, "hi")
        await engine.finish(engine.newest, FinishReason.LENGTH)
        last = (await read(stream))[-1]
        assert type(last).__name__.lower() == end
        assert not isinstance(last, Error) or f"now {limit} tokens" in last.message


async def test_a_request_beyond_the_queue_limit_is_refused(folder: Path) -> None:
    async with running(folder, max_num_queued_reqs=3) as (generation, engine):
        for _ in range(3):
            await opened(generation, engine)
        with pytest.raises(RequestError) as refused:
            await generation.open(make_request())
        assert refused.value.code == "server_overloaded"


async def test_each_choice_takes_a_place_in_the_queue(folder: Path) -> None:
    async with running(folder, max_num_queued_reqs=4) as (generation, engine):
        await opened(generation, engine)
        await opened(generation, engine, n=8)  # more than may wait, but the queue was not full
        with pytest.raises(RequestError) as refused:
            await generation.open(make_request())
        assert "9 choices are waiting" in refused.value.message
        for sequence in engine.submits[1].sequences[:6]:
            await engine.start(sequence.sequence_id)
        await generation.open(make_request())


async def test_requests_that_are_being_stored_count_toward_the_queue_limit(folder: Path) -> None:
    class SlowStore(MemoryStore):
        async def create(self, record: Record, replaces: StreamId | None = None) -> Stored:
            await settle()
            return await super().create(record, replaces)

    async with running(folder, SlowStore(), max_num_queued_reqs=4) as (generation, _):
        names = [Names(key=str(number), digest=b"1") for number in range(3)]
        opening = (generation.open(make_request(n=5), each) for each in names)
        found = await asyncio.gather(*opening, return_exceptions=True)
        assert [isinstance(each, RequestError) for each in found] == [False, True, True]


async def test_an_error_of_one_choice_ends_the_whole_stream(folder: Path) -> None:
    async with running(folder) as (generation, engine):
        stream = await opened(generation, engine, n=2)
        first, second = (new.sequence_id for new in engine.submits[-1].sequences)
        await engine.start(first, second)
        await engine.finish(first, FinishReason.ERROR, "the logits are not numbers")
        await engine.let_go()
        events = await read(stream)
        assert isinstance(events[-1], Error) and not any(isinstance(e, Tokens) for e in events)
