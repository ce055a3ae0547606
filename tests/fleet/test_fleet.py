"""Tests which of two models is loaded when memory only holds one, over fake engines."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from headrace.engines.client import EngineDown, EngineUp
from headrace.fleet.fleet import Fleet
from headrace.fleet.model_host import ModelFiles, ModelHost
from headrace.fleet.served_model import ServedModel
from headrace.metrics.metrics import Metrics
from headrace_common.config.settings import LoadingConfig, ModelConfig, ServerConfig, StreamConfig
from headrace_common.errors import RequestError
from tests.fleet.fakes import READY, FakeEngine
from tools.harness.eventually import settle

NO_MEMORY = EngineDown("load_failed", "No memory.", given_up=True)


class Scene:
    """A fleet with its engines by model, and records of the models it loaded and lost."""

    def __init__(self, folder: Path, names: str, loading: LoadingConfig, max_waiting: int) -> None:
        self.folder = folder
        self.engines: dict[str, list[FakeEngine]] = {name: [] for name in "abc"}
        self.loaded: list[str] = []
        self.lost: list[str] = []
        self.arriving: list[ModelHost] = []  # in the folder of models, and not taken up yet
        hosts = tuple(map(self.host, names))
        streams = StreamConfig(max_num_queued_reqs=max_waiting)
        models = tuple(host.config for host in hosts)
        config = ServerConfig(models=models, streams=streams, loading=loading)
        self.fleet = Fleet(
            hosts,
            config,
            lambda host: self.loaded.append(host.name),
            lambda host: self.lost.append(host.name),
            self._look_again,
        )

    async def _look_again(self) -> None:
        self.fleet.become((*self.fleet.hosts.all(), *self.arriving))

    def host(self, name: str, **settings: str) -> ModelHost:
        config = ModelConfig(model=str(self.folder), served_model_name=(name,))
        config = msgspec.structs.replace(config, **settings)  # type: ignore[arg-type]
        return ModelHost(config, self._start, Metrics(), ServedModel(config))

    def _start(self, config: ModelConfig) -> FakeEngine:
        self.engines[config.served_model_name[0]].append(engine := FakeEngine())
        return engine

    async def ask(self, name: str) -> "asyncio.Task[ModelHost]":
        """Start a request for the model, which is admitted or waits."""
        host = await self.fleet.find(name)
        asked = asyncio.create_task(self.fleet.enter(host))
        await settle()
        return asked

    async def up(self, name: str) -> None:
        await self.engines[name][-1].say(EngineUp(READY))

    async def use(self, name: str) -> ModelHost:
        """Use the model, loading it if necessary."""
        asked = await self.ask(name)
        if not asked.done():
            await self.up(name)
        return asked.result()

    def states(self) -> dict[str, str]:
        return {host.name: host.engine.state for host in self.fleet.hosts.all()}


@contextlib.asynccontextmanager
async def running(
    folder: Path, names: str = "ab", max_waiting: int = 9, **loading: float
) -> AsyncIterator[Scene]:
    options = {"max_models": 1} | loading
    made = Scene(folder, names, LoadingConfig(**options), max_waiting)  # type: ignore[arg-type]
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        made.fleet.start(tasks)
        yield made
        await made.fleet.close()
        made.fleet.cancel()


def code_of(asked: "asyncio.Task[ModelHost]") -> str:
    error = asked.exception()
    assert isinstance(error, RequestError)
    return error.code


async def test_a_model_is_loaded_on_request_and_admits_all_waiting_requests(folder: Path) -> None:
    async with running(folder) as made:
        first, second = await made.ask("a"), await made.ask("a")
        assert made.states() == {"a": "loading", "b": "unloaded"} and not first.done()
        await made.up("a")
        assert first.result() is second.result() is made.fleet.hosts.get("a")
        assert made.loaded == ["a"] and len(made.engines["a"]) == 1


async def test_requests_are_refused_after_the_fleet_has_closed(folder: Path) -> None:
    async with running(folder) as made:
        host = await made.fleet.find("a")
    for late in (made.fleet.fetch, made.fleet.need, lambda it: made.fleet.replace(it, 0)):
        with pytest.raises(RequestError) as refused:
            late(host)
        assert refused.value.code == "server_shutdown"


async def test_a_closed_engine_counts_as_unloaded_at_once(folder: Path) -> None:
    async with running(folder) as made:
        host = await made.use("a")
        await host.engine.close()
        assert host.engine.state == "unloaded"


async def test_a_second_model_replaces_the_first_once_the_first_is_unused(folder: Path) -> None:
    async with running(folder) as made:
        used = await made.use("a")
        waiting = await made.ask("b")
        assert not made.engines["b"]
        made.fleet.release(used)
        await settle()
        assert made.states() == {"a": "unloaded", "b": "loading"}
        await made.up("b")
        assert waiting.result().name == "b"


async def test_a_failed_load_refuses_all_waiting_requests_and_can_be_retried(folder: Path) -> None:
    async with running(folder) as made:
        waiting = [await made.ask("a"), await made.ask("a")]
        await made.engines["a"][0].say(NO_MEMORY)
        assert [code_of(asked) for asked in waiting] == ["load_failed"] * 2
        assert made.lost == ["a"] and made.states()["a"] == "dead"
        assert (await made.use("a")).engine.state == "ok"


async def test_a_model_whose_engine_is_given_up_makes_room_for_another(folder: Path) -> None:
    async with running(folder) as made:
        used = await made.use("a")
        await made.engines["a"][0].say(NO_MEMORY)
        assert made.lost == ["a"] and not made.fleet.ended.is_set()
        made.fleet.release(used)
        assert (await made.use("b")).engine.state == "ok"


async def test_a_model_larger_than_the_memory_is_refused(folder: Path) -> None:
    async with running(folder, models_memory_bytes=1) as made:
        asked = await made.ask("a")
        assert code_of(asked) == "load_failed" and not made.engines["a"]
        assert "raise that limit" in made.fleet.hosts.get("a").engine.last_words


async def test_unload_waits_for_uses_and_a_later_request_loads_the_model_again(
    folder: Path,
) -> None:
    async with running(folder) as made:
        used = await made.use("a")
        made.fleet.unload(used)
        later = await made.ask("a")
        assert used.engine.state == "ok" and not later.done()
        made.fleet.release(used)
        await settle()
        await made.up("a")
        assert later.result().engine.state == "ok" and len(made.engines["a"]) == 2


async def test_unload_cancels_a_load_that_no_request_needs(folder: Path) -> None:
    async with running(folder) as made:
        host = made.fleet.hosts.get("a")
        made.fleet.need(host)
        await settle()
        assert host.engine.state == "loading"
        made.fleet.unload(host)
        await settle()
        assert host.engine.state == "unloaded" and not made.lost


async def test_unload_waits_for_a_request_that_waits_for_the_model(
    folder: Path,
) -> None:
    async with running(folder) as made:
        asked = await made.ask("a")
        made.fleet.unload(made.fleet.hosts.get("a"))
        await settle()
        await made.up("a")
        used = asked.result()
        assert used.engine.state == "ok"
        made.fleet.release(used)
        await settle()
        assert used.engine.state == "unloaded"


async def test_a_request_cancelled_while_it_waits_does_not_load_its_model(folder: Path) -> None:
    async with running(folder) as made:
        used = await made.use("a")
        asked = await made.ask("b")
        asked.cancel()
        await settle()
        made.fleet.release(used)
        await settle()
        assert not made.engines["b"] and used.engine.state == "ok"


async def test_a_request_cancelled_while_it_is_admitted_does_not_hold_its_model(
    folder: Path,
) -> None:
    async with running(folder) as made:
        used = await made.use("a")
        first = await made.ask("b")
        behind = await made.ask("a")
        made.fleet.become((made.host("a"), made.host("c")))  # so he enters,
        behind.cancel()  # and is not awake yet
        await settle()
        assert behind.cancelled() and code_of(first) == "model_not_found"
        made.fleet.release(used)
        assert (await made.use("c")).engine.state == "ok"  # else a were still in use


async def test_a_removed_model_is_unloaded_after_its_streams_and_refuses_others(
    folder: Path,
) -> None:
    async with running(folder) as made:
        used = await made.use("a")
        waiting = await made.ask("b")
        made.fleet.become((made.host("a"), made.host("c")))
        await settle()
        assert code_of(waiting) == "model_not_found"
        assert not made.fleet.roster.leaving
        made.fleet.become((made.host("c"),))
        assert list(made.fleet.roster.leaving) == ["a"] and used.engine.state == "ok"
        made.fleet.release(used)
        await settle()
        assert not made.fleet.roster.leaving
        assert made.states() == {"c": "unloaded"}


async def test_a_request_that_found_a_model_before_its_removal_is_refused(folder: Path) -> None:
    async with running(folder) as made:
        found = await made.use("a")
        made.fleet.become((made.host("b"),))
        asked = asyncio.create_task(made.fleet.enter(found))
        await settle()
        assert code_of(asked) == "model_not_found"
        made.fleet.release(found)
        await settle()
        assert not made.fleet.roster.leaving
        assert (await made.use("b")).engine.state == "ok"


async def test_a_model_gets_its_new_settings_once_the_old_one_is_unused(
    folder: Path,
) -> None:
    async with running(folder) as made:
        used = await made.use("a")
        fresh = made.host("a", tool_format="none")
        made.fleet.become((fresh, made.fleet.hosts.get("b")))
        waiting = await made.ask("a")
        assert made.fleet.roster.changing == ("a",) and made.fleet.hosts.get("a") is used
        made.fleet.release(used)
        await settle()
        assert made.fleet.hosts.get("a") is fresh
        await made.up("a")
        assert waiting.result() is fresh and not made.fleet.roster.changing


async def test_changed_settings_only_reload_a_model_that_was_loaded(
    folder: Path,
) -> None:
    async with running(folder) as made:
        made.fleet.release(await made.use("a"))
        made.fleet.become(tuple(made.host(name, tool_format="none") for name in "ab"))
        await settle()
        assert made.states() == {"a": "loading", "b": "unloaded"}


async def test_a_model_added_again_before_it_was_unloaded_stays_loaded(folder: Path) -> None:
    async with running(folder) as made:
        used = await made.use("a")
        made.fleet.become((made.host("b"),))
        made.fleet.become((made.host("a"), made.host("b")))
        assert not made.fleet.roster.leaving and made.fleet.hosts.get("a") is used
        made.fleet.release(used)
        await settle()
        assert made.fleet.roster.all()[0] is used


async def test_an_idle_model_is_unloaded_and_a_used_one_stays(folder: Path) -> None:
    async with running(folder, max_models=2, idle_unload_s=0.02) as made:
        used, resting = await made.use("a"), await made.use("b")
        made.fleet.release(resting)
        while resting.engine.state != "unloaded":
            await asyncio.sleep(0.01)
        assert used.engine.state == "ok"


async def test_requests_beyond_the_queue_limit_are_refused(folder: Path) -> None:
    async with running(folder, max_waiting=1) as made:
        made.fleet.check_line()
        await made.ask("a")
        with pytest.raises(RequestError) as refused:
            made.fleet.check_line()
        assert refused.value.code == "server_overloaded"
        await made.up("a")
        made.fleet.check_line()


async def test_an_unknown_model_name_is_looked_up_again_in_the_folder(folder: Path) -> None:
    async with running(folder) as made:
        with pytest.raises(RequestError):
            await made.fleet.find("c")
        made.arriving.append(made.host("c"))
        assert (await made.fleet.find("c")).name == "c"


async def test_close_refuses_waiting_and_new_requests(folder: Path) -> None:
    async with running(folder) as made:
        waiting = await made.ask("a")
        await made.fleet.close()
        late = await made.ask("b")
        assert [code_of(waiting), code_of(late)] == ["server_shutdown"] * 2
        assert made.fleet.ended.is_set()


async def test_the_only_model_is_loaded_at_startup_and_then_admits_requests(
    folder: Path,
) -> None:
    async with running(folder, "a") as made:
        await settle()
        (host,) = made.fleet.hosts.all()
        waiting = await made.ask("a")
        assert host.engine.state == "loading" and not waiting.done()
        await made.up("a")
        assert host.engine.state == "ok" and waiting.done()
        assert (await made.ask("a")).done()
        await made.engines["a"][0].say(NO_MEMORY)
        assert made.lost == ["a"] and made.fleet.ended.is_set()


async def test_the_only_model_can_be_unloaded_once_another_was_added(folder: Path) -> None:
    async with running(folder, "a", max_models=1) as made:
        await settle()
        await made.up("a")
        (first,) = made.fleet.hosts.all()
        assert made.fleet.pinned is first
        made.fleet.become((first, made.host("b")))
        assert made.fleet.pinned is None and made.states() == {"a": "ok", "b": "unloaded"}
        await made.use("b")  # which had to make room
        assert made.states() == {"a": "unloaded", "b": "ok"}
        made.fleet.release(made.fleet.hosts.get("b"))
        await made.use("a")
        await made.engines["a"][-1].say(NO_MEMORY)
        assert made.lost == ["a"] and not made.fleet.ended.is_set()


async def test_the_callback_of_a_removal_runs_once_the_model_is_unused(folder: Path) -> None:
    done: list[str] = []

    async def note() -> None:
        done.append("gone")

    async with running(folder) as made:
        host = await made.use("a")
        made.fleet.become((made.fleet.hosts.get("b"),))
        made.fleet.when_removed("a", note)
        await settle()
        assert not done
        made.fleet.release(host)
        await settle()
        assert done == ["gone"]
        made.fleet.when_removed("a", note)  # it is gone already
        await settle()
        assert done == ["gone", "gone"]


async def test_the_callback_of_a_removal_waits_while_the_files_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(folder) as made:
        fleet, has_read, gone = made.fleet, asyncio.Event(), list[str]()
        fleet.become((*fleet.hosts.all(), fresh := made.host("c")))
        monkeypatch.setattr(fresh, "read", has_read.wait)
        reading = fleet.fetch(fresh)
        await settle()
        fleet.become(fleet.hosts.all()[:-1])
        fleet.when_removed("c", lambda: told(gone))
        await settle()
        assert gone == []
        has_read.set()
        await reading
        await settle()
        assert gone == ["c"]


async def told(gone: list[str]) -> None:
    gone.append("c")


async def test_a_shutdown_refuses_a_request_that_waits_for_model_files(
    folder: Path,
) -> None:
    may_go_on = threading.Event()

    def fetch(*_: object) -> str:
        may_go_on.wait(30)
        return ""

    async with running(folder) as made:
        files = ModelFiles(fetch)
        unread = ModelHost(ModelConfig(model="far/away"), made._start, Metrics(), files=files)
        waiting = asyncio.create_task(made.fleet.read(unread))
        await settle()
        assert not waiting.done()
        made.fleet.refuse(RequestError("server_shutdown", "It ends."))
        with pytest.raises(RequestError) as refused:
            await waiting
        assert refused.value.code == "server_shutdown"
        may_go_on.set()
