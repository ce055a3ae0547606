"""Tests the sequences of a request over the life of its engine."""

from typing import Any

from headrace.engines.client import EngineUp
from headrace.fleet.engine_users import EngineUsers
from headrace.fleet.load_progress import LoadProgressWatch
from headrace.generation.submission import Submission
from headrace_common.messages import Cancel, FinishReason, NewToken, Outputs
from tests.fleet.fakes import READY, FakeEngine, FakeUser

MODEL: Any = object()  # only handed on


def begun() -> tuple[EngineUsers, FakeEngine, FakeUser, Submission]:
    users, engine, user = EngineUsers(LoadProgressWatch()), FakeEngine(), FakeUser(0)
    users.begin(MODEL, engine, EngineUp(READY))
    submission = Submission(user)
    submission.move_to(users)
    return users, engine, user, submission


def test_each_part_has_its_own_sequence_until_it_ends() -> None:
    users, _, user, submission = begun()
    first, second = submission.open((4, 7))
    assert submission.parts == {first: 4, second: 7}
    assert submission.close(first) == 4 and submission.parts == {second: 7}
    users.deliver(Outputs(tokens=(NewToken(first, 65), NewToken(second, 66))))
    assert user.told == [[NewToken(second, 66)]]


def test_a_cancel_lists_all_open_sequences_and_is_not_sent_without_any() -> None:
    _, engine, _, submission = begun()
    submission.cancel()
    Submission(FakeUser(0)).cancel()  # before there was an engine
    assert not engine.cancels
    ids = submission.open((0, 1))
    submission.cancel()
    submission.stop(ids[1])
    assert engine.cancels == [Cancel(ids), Cancel(ids[1:], FinishReason.STOP)]


def test_forgotten_sequences_are_returned_and_get_no_more_outputs() -> None:
    users, _, user, submission = begun()
    (id,) = submission.open((3,))
    assert submission.forget() == {id: 3} and submission.forget() == {}
    users.deliver(Outputs(tokens=(NewToken(id, 65),)))
    assert not user.told
