"""The sequences of a request as its engine comes, works and goes."""

from typing import Any

from headrace.engines.client import EngineUp
from headrace.fleet.engine_users import EngineUsers
from headrace.fleet.load_progress import LoadProgressWatch
from headrace.generation.submission import Submission
from headrace_common.messages import Cancel, FinishReason, NewToken, Outputs
from tests.fleet.fakes import READY, FakeEngine, FakeTenant

MODEL: Any = object()  # only handed on


def begun() -> tuple[EngineUsers, FakeEngine, FakeTenant, Submission]:
    tenants, engine, tenant = EngineUsers(LoadProgressWatch()), FakeEngine(), FakeTenant(0)
    tenants.begin(MODEL, engine, EngineUp(READY))
    submission = Submission(tenant)
    submission.move_to(tenants)
    return tenants, engine, tenant, submission


def test_each_part_has_a_sequence_of_its_own_until_it_has_ended() -> None:
    tenants, _, tenant, submission = begun()
    first, second = submission.open((4, 7))
    assert submission.parts == {first: 4, second: 7}
    assert submission.close(first) == 4 and submission.parts == {second: 7}
    tenants.deliver(Outputs(tokens=(NewToken(first, 65), NewToken(second, 66))))
    assert tenant.told == [[NewToken(second, 66)]]


def test_a_cancel_names_all_that_the_engine_has_and_is_not_sent_for_nothing() -> None:
    _, engine, _, submission = begun()
    submission.cancel()
    Submission(FakeTenant(0)).cancel()  # before there was an engine
    assert not engine.cancels
    ids = submission.open((0, 1))
    submission.cancel()
    submission.stop(ids[1])
    assert engine.cancels == [Cancel(ids), Cancel(ids[1:], FinishReason.STOP)]


def test_what_is_forgotten_is_returned_and_heard_of_no_more() -> None:
    tenants, _, tenant, submission = begun()
    (id,) = submission.open((3,))
    assert submission.forget() == {id: 3} and submission.forget() == {}
    tenants.deliver(Outputs(tokens=(NewToken(id, 65),)))
    assert not tenant.told
