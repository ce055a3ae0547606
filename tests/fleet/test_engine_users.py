"""Tests the messages between an engine and its users."""

import asyncio
from typing import Any

from msgspec.structs import replace

from headrace.engines.client import EngineUp
from headrace.fleet.engine_users import EngineUsers
from headrace.fleet.load_progress import LoadProgressWatch
from headrace_common.adapter import Adapter
from headrace_common.errors import RequestError
from headrace_common.ids import SequenceId, StreamId
from headrace_common.messages import (
    Cancel,
    Finished,
    FinishReason,
    Loading,
    NewToken,
    Outputs,
    Started,
    Submit,
)
from headrace_common.sampling import Sampling
from tests.fleet.fakes import DOWN, READY, STATUS, FakeEngine, FakeUser
from tools.harness.eventually import settle

MODEL: Any = object()  # only handed on
SUBMIT = Submit(StreamId("one"), (b"",), (), Sampling(), 0.0)
CANCEL = Cancel((SequenceId(0),))


def test_messages_only_reach_an_engine_while_it_is_up() -> None:
    users, engine = EngineUsers(LoadProgressWatch()), FakeEngine()
    for _ in range(2):
        users.submit(SUBMIT)
        users.cancel(CANCEL)
        assert (engine.submits, engine.cancels) == ([], [])
        users.begin(MODEL, engine, EngineUp(READY))
        users.submit(SUBMIT)
        users.cancel(CANCEL)
        assert (engine.submits, engine.cancels) == ([SUBMIT], [CANCEL])
        users.end()
        engine.submits.clear()
        engine.cancels.clear()


def test_no_two_sequences_ever_share_an_id() -> None:
    users, user = EngineUsers(LoadProgressWatch()), FakeUser(2)
    users.add(user)
    users.begin(MODEL, FakeEngine(), EngineUp(READY))
    before = list(user.ids)
    users.forget(before)
    users.pause(DOWN)
    users.begin(MODEL, FakeEngine(), EngineUp(READY))
    assert len({*before, *user.ids}) == 4


def test_waiting_users_get_load_progress_at_once_and_then_every_second() -> None:
    watch = LoadProgressWatch()
    users, waiter = EngineUsers(watch), FakeUser(0)
    with users.telling(waiter):
        for now, share in ((10.0, 0.1), (10.9, 0.2), (11.0, 0.3)):
            watch.tell(Loading(share))
            users.set_load_progress(now)
        watch.begin("compiling kernels")
        watch.tell(Loading(0.25, "compiling kernels", "(2 of 8)"))
        users.set_load_progress(12.0)
    users.set_load_progress(20.0)
    weights = [(0.1, "loading weights"), (0.3, "loading weights")]
    assert waiter.loads == [(None, ""), *weights, (None, "compiling kernels (2 of 8)")]


async def test_loading_an_adapter_fails_if_one_of_several_engines_dies() -> None:
    users = EngineUsers(LoadProgressWatch())
    users.begin(MODEL, FakeEngine(), EngineUp(READY))
    reading = asyncio.create_task(users.read_adapter(Adapter("a", "/a", "0123")))
    await settle()
    assert not reading.done()
    users.move(DOWN, ())  # perhaps the only one that was asked
    await settle()
    assert reading.done() and isinstance(reading.exception(), RequestError)


def test_a_user_gets_an_estimate_of_its_wait_once_the_pace_is_measured() -> None:
    users, user = EngineUsers(LoadProgressWatch()), FakeUser(4)
    users.add(user)
    users.begin(MODEL, FakeEngine(), EngineUp(READY))
    first, *running, waiting = user.ids
    status = replace(STATUS, queue=(waiting,), num_running=1, prompt_tokens_per_s=100.0)
    users.report_positions(status, 0.0)
    users.deliver(Outputs(tokens=(NewToken(first, 65),) * 8))
    users.deliver(Outputs(finished=(Finished(first, FinishReason.LENGTH),)))
    users.deliver(Outputs(started=tuple(Started(id, 50, 0) for id in running)))
    users.report_positions(status, 1.0)
    # Eight tokens took a second, and both places are free after eight more.
    assert [it.eta_ms for it in user.places] == [None, 1000]
    assert users.eta.tokens_per_s == 100.0
