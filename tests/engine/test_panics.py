"""Tests that a panic of a Rust library, which is a BaseException, ends only what called it."""

import asyncio
import queue
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace.cli import exit_codes
from headrace.cli import main as command
from headrace.engines.client import EngineDown, EngineUp, NewsQueue
from headrace.engines.local import LocalEngine
from headrace.engines.supervisor import Supervisor
from headrace_common import wire
from headrace_common.messages import FinishReason, Outputs, Pong, Shutdown
from headrace_engine.adapters import AdapterLoader, AdapterReadDone
from headrace_engine.engine import Engine, Inbox
from tests.engine.fakes import Runner, Sent
from tests.fleet.fakes import READY
from tests.scheduler.builders import make_scheduler, make_submit


class Panic(BaseException):
    """An exception like those of Rust libraries that panic."""


class Panicking:
    """A runner or an engine that always panics."""

    def put_adapter(self, read: Any) -> None:
        raise Panic

    def run(self, inbox: Any) -> None:
        raise Panic


def test_a_step_that_panics_ends_only_its_request() -> None:
    inbox: Inbox = queue.SimpleQueue()
    inbox.put(make_submit(1, 4, max_tokens=2))
    sent = Sent()
    sent.when_done = lambda: inbox.put(Shutdown())
    Engine(make_scheduler(max_step_tokens=64), Runner(Panic()), sent).run(inbox)
    assert sent.finishes == [FinishReason.ERROR]


def test_an_adapter_whose_load_panics_is_reported_as_unreadable() -> None:
    shelf = AdapterLoader(cast(Any, Panicking()))
    done: Future[Any] = Future()
    done.set_result("factors")
    shelf._waiting["own"] = []
    answer, _ = shelf.take(AdapterReadDone("own", done))
    assert (answer.code, answer.message) == (
        "internal_error",
        "The adapter could not be read (Panic); see the server's log.",
    )


async def test_a_subscriber_that_panics_is_ended_and_reported() -> None:
    def hear(news: object) -> None:
        raise Panic

    ends: list[BaseException | None] = []
    news = NewsQueue()
    news.subscribe(hear, hear, ends.append)
    news.put(EngineUp(READY))
    news.put(EngineUp(READY))  # dropped, like all later news
    news.deliver(Outputs())
    assert [type(end) for end in ends] == [Panic]


async def test_a_panic_while_delivering_outputs_ends_the_subscriber_and_not_the_engine() -> None:
    def deliver(outputs: Outputs) -> None:
        raise Panic

    reader = asyncio.StreamReader()
    reader.feed_data(2 * wire.encode(Outputs()) + wire.encode(Pong(1)))
    reader.feed_eof()
    ends: list[BaseException | None] = []
    answers: list[str] = []
    news = NewsQueue()
    news.subscribe(deliver, lambda news: None, ends.append)
    pulse = SimpleNamespace(beats=lambda: answers.append("pong"))
    supervisor, child = SimpleNamespace(news=news), SimpleNamespace(reader=reader)
    await Supervisor._pass_on(cast(Any, supervisor), cast(Any, child), cast(Any, pulse))
    assert [type(end) for end in ends] == [Panic]
    assert answers == ["pong"]


async def test_a_panic_of_an_engine_in_a_thread_is_reported() -> None:
    client = LocalEngine()
    await asyncio.to_thread(client._run, cast(Engine, Panicking()))
    async with asyncio.timeout(10):
        told = await anext(aiter(client.news))
    assert isinstance(told, EngineDown) and told.given_up


def test_a_command_that_panics_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: Any) -> None:
        raise Panic("inside")

    monkeypatch.setattr(command.cli, "main", fail)
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == exit_codes.FAILED
    assert "failed because of a bug: Panic" in capsys.readouterr().err
