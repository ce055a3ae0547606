"""Tenants of a fake engine: what reaches it, and who hears when."""

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
from tests.fleet.fakes import DOWN, READY, STATUS, FakeEngine, FakeTenant
from tools.harness.eventually import settle

MODEL: Any = object()  # only handed on
SUBMIT = Submit(StreamId("one"), (b"",), (), Sampling(), 0.0)
CANCEL = Cancel((SequenceId(0),))


def test_what_tenants_ask_reaches_an_engine_from_its_coming_to_its_end() -> None:
    tenants, engine = EngineUsers(LoadProgressWatch()), FakeEngine()
    for _ in range(2):
        tenants.submit(SUBMIT)
        tenants.cancel(CANCEL)
        assert (engine.submits, engine.cancels) == ([], [])
        tenants.begin(MODEL, engine, EngineUp(READY))
        tenants.submit(SUBMIT)
        tenants.cancel(CANCEL)
        assert (engine.submits, engine.cancels) == ([SUBMIT], [CANCEL])
        tenants.end()
        engine.submits.clear()
        engine.cancels.clear()


def test_no_two_sequences_ever_share_an_id() -> None:
    tenants, tenant = EngineUsers(LoadProgressWatch()), FakeTenant(2)
    tenants.add(tenant)
    tenants.begin(MODEL, FakeEngine(), EngineUp(READY))
    before = list(tenant.ids)
    tenants.forget(before)
    tenants.pause(DOWN)
    tenants.begin(MODEL, FakeEngine(), EngineUp(READY))
    assert len({*before, *tenant.ids}) == 4


def test_waiters_hear_of_a_load_at_once_and_then_every_second() -> None:
    watch = LoadProgressWatch()
    tenants, waiter = EngineUsers(watch), FakeTenant(0)
    with tenants.telling(waiter):
        for now, share in ((10.0, 0.1), (10.9, 0.2), (11.0, 0.3)):
            watch.tell(Loading(share))
            tenants.set_load_progress(now)
        watch.begin("compiling kernels")
        watch.tell(Loading(0.25, "compiling kernels", "(2 of 8)"))
        tenants.set_load_progress(12.0)
    tenants.set_load_progress(20.0)
    weights = [(0.1, "loading weights"), (0.3, "loading weights")]
    assert waiter.loads == [(None, ""), *weights, (None, "compiling kernels (2 of 8)")]


async def test_who_has_an_adapter_read_hears_of_the_death_of_one_engine_of_several() -> None:
    tenants = EngineUsers(LoadProgressWatch())
    tenants.begin(MODEL, FakeEngine(), EngineUp(READY))
    reading = asyncio.create_task(tenants.read_adapter(Adapter("a", "/a", "0123")))
    await settle()
    assert not reading.done()
    tenants.move(DOWN, ())  # perhaps the only one that was asked
    await settle()
    assert reading.done() and isinstance(reading.exception(), RequestError)


def test_a_tenant_hears_when_its_turn_may_come_once_that_is_measured() -> None:
    tenants, tenant = EngineUsers(LoadProgressWatch()), FakeTenant(4)
    tenants.add(tenant)
    tenants.begin(MODEL, FakeEngine(), EngineUp(READY))
    first, *running, waiting = tenant.ids
    status = replace(STATUS, queue=(waiting,), num_running=1, prompt_tokens_per_s=100.0)
    tenants.report_positions(status, 0.0)
    tenants.deliver(Outputs(tokens=(NewToken(first, 65),) * 8))
    tenants.deliver(Outputs(finished=(Finished(first, FinishReason.LENGTH),)))
    tenants.deliver(Outputs(started=tuple(Started(id, 50, 0) for id in running)))
    tenants.report_positions(status, 1.0)
    # eight tokens took a second, and the two places are free after as many more
    assert [it.eta_ms for it in tenant.places] == [None, 1000]
    assert tenants.eta.tokens_per_s == 100.0
