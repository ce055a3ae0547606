"""Tests the host of a model over a fake engine."""

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from headrace.engines.client import EngineDown, EngineResized, EngineUp
from headrace.fleet.engine_life import EngineClosed
from headrace.fleet.model_host import ModelHost
from headrace.fleet.served_model import ServedModel
from headrace.metrics.metrics import Metrics
from headrace_common.config.settings import ModelConfig
from headrace_common.errors import ModelError, RequestError
from headrace_common.ids import SequenceId
from headrace_common.messages import (
    Finished,
    FinishReason,
    Loading,
    NewToken,
    Outputs,
    PromptAdvance,
    Started,
)
from tests.fleet.fakes import DOWN, READY, STATUS, FakeEngine, FakeUser
from tools.harness.eventually import settle

GGUF = Path(__file__).parents[1] / "checkpoints" / "data" / "llama-Q4_K_M.gguf"
UP = EngineUp(READY, pid=7)
GIVEN_UP = replace(DOWN, message="It will not.", given_up=True)


class Scene(NamedTuple):
    host: ModelHost
    engine: FakeEngine
    life: "asyncio.Task[None]"

    def user(self, num_sequences: int = 1) -> FakeUser:
        user = FakeUser(num_sequences)
        self.host.users.add(user)
        return user


@contextlib.asynccontextmanager
async def loading(folder: Path) -> AsyncIterator[Scene]:
    """Yield a host whose engine is loading."""
    engine = FakeEngine()
    config = ModelConfig(model=str(folder), served_model_name=("tiny",))
    host = ModelHost(config, lambda _: engine, Metrics(), ServedModel(config))
    host.begin()
    life = asyncio.create_task(host.engine.run())
    async with asyncio.timeout(30):
        yield Scene(host, engine, life)
        await host.engine.close()
        await life


@contextlib.asynccontextmanager
async def up(folder: Path) -> AsyncIterator[Scene]:
    """Yield a host whose engine is up."""
    async with loading(folder) as scene:
        await scene.engine.say(UP)
        yield scene


async def test_all_waiters_are_woken_when_an_engine_has_loaded(folder: Path) -> None:
    async with loading(folder) as (host, engine, _):
        settled, ready = host.engine.settled, asyncio.create_task(host.engine.wait_until_ready())
        await settle()
        assert host.engine.state == "loading" and not settled.done() and host.ready is None
        await engine.say(UP)
        await settled
        assert await ready == host.ready == READY
        assert host.engine.state == "ok" and host.engine.num_starts == 1 and host.engine.up == UP


async def test_waiting_users_get_load_progress_at_most_once_a_second(folder: Path) -> None:
    async with loading(folder) as (host, engine, _):
        told: list[tuple[float | None, str]] = []
        waiter = FakeUser(0)
        waiter.loads = told
        with host.users.telling(waiter):
            await engine.say(Loading(0.25))
            await engine.say(Loading(0.5))
            assert [progress for progress, _ in told] == [None, 0.25]
        late = FakeUser(0)
        with host.users.telling(late):
            assert late.loads == [(0.5, "loading weights")]
        await engine.say(UP)
        with host.users.telling(after := FakeUser(0)):
            assert after.loads == []


async def test_a_failed_load_reports_its_reason(folder: Path) -> None:
    async with loading(folder) as (host, engine, life):
        settled = host.engine.settled
        await engine.say(GIVEN_UP)
        with pytest.raises(ModelError, match="It will not"):
            await settled
        assert (
            life.done() and host.engine.state == "dead" and host.engine.last_words == "It will not."
        )


async def test_closing_a_host_during_a_load_is_not_a_failure(folder: Path) -> None:
    async with loading(folder) as (host, _, life):
        settled = host.engine.settled
        await settle()
        await host.engine.close()
        with pytest.raises(EngineClosed):
            await settled
        await life
        assert host.engine.state == "unloaded" and not host.engine.last_words


async def test_a_host_can_start_a_new_engine_after_closing_one(folder: Path) -> None:
    async with up(folder) as (host, engine, life):
        await engine.say(STATUS)
        await host.engine.close()
        await life
        assert (
            host.engine.state == "unloaded"
            and host.engine.status is None
            and host.engine.up is None
        )
        host.begin()
        again = asyncio.create_task(host.engine.run())
        await engine.say(UP)
        assert host.engine.state == "ok" and host.engine.num_starts == 2 and host.engine.up
        await host.engine.close()
        await again


async def test_a_user_starts_once_the_engine_is_up_and_a_late_one_at_once(
    folder: Path,
) -> None:
    async with loading(folder) as scene:
        early = scene.user()
        assert early.told == [EngineDown("engine_failed", "", given_up=False)]
        await scene.engine.say(UP)
        late = scene.user()
        assert early.begun == late.begun == [UP]
        assert list(scene.host.users) == [early, late]
        scene.host.users.remove(early)
        assert list(scene.host.users) == [late]


async def test_outputs_are_delivered_to_the_owners_of_their_sequences(folder: Path) -> None:
    async with up(folder) as scene:
        one, other = scene.user(), scene.user(2)
        (a,), (b, c) = one.ids, other.ids
        await scene.engine.say(
            Outputs(
                started=(Started(c, 5, 0),),
                progress=(PromptAdvance(a, 2), PromptAdvance(c, 5)),
                tokens=(NewToken(b, 65), NewToken(a, 66)),
                finished=(Finished(b, FinishReason.STOP),),
            )
        )
        assert one.told == [[PromptAdvance(a, 2), NewToken(a, 66)]]
        expected = [Started(c, 5, 0), PromptAdvance(c, 5), NewToken(b, 65)]
        assert other.told == [[*expected, Finished(b, FinishReason.STOP)]]


async def test_outputs_of_forgotten_sequences_are_dropped(folder: Path) -> None:
    async with up(folder) as scene:
        user = scene.user(2)
        gone, kept = user.ids
        assert user.engine is not None
        user.engine.forget((gone,))
        await scene.engine.say(Outputs(tokens=(NewToken(gone, 65), NewToken(kept, 66))))
        await scene.engine.say(Outputs(tokens=(NewToken(gone, 65), NewToken(SequenceId(99), 66))))
        assert user.told == [[NewToken(kept, 66)]]


async def test_all_users_are_told_of_an_engines_death_and_start_on_the_next(
    folder: Path,
) -> None:
    async with up(folder) as scene:
        users = scene.user(), scene.user(0)
        await scene.engine.say(DOWN)
        assert scene.host.engine.state == "recovering" and scene.host.engine.up is None
        assert [it.told for it in users] == [[DOWN]] * 2
        await scene.engine.say(UP)
        assert scene.host.engine.state == "ok" and [it.begun for it in users] == [[UP, UP]] * 2


async def test_only_the_users_of_a_dead_replica_are_told_of_its_death(folder: Path) -> None:
    async with up(folder) as scene:
        moved, stays = scene.user(2), scene.user()
        larger = EngineResized(replace(READY, max_num_seqs=4), pid=8, has_started=True)
        await scene.engine.say(larger)
        down = replace(DOWN, lost=(*moved.ids, SequenceId(99)))
        await scene.engine.say(down)
        assert moved.told == [down, EngineUp(larger.ready, pid=8)] and not stays.told
        assert scene.host.engine.state == "ok" and scene.host.engine.num_starts == 2
        assert scene.host.ready == larger.ready


async def test_an_engine_that_is_given_up_loses_all_users(folder: Path) -> None:
    async with up(folder) as scene:
        users = scene.user(), scene.user()
        await scene.engine.say(GIVEN_UP)
        lost = [error.code for it in users for error in it.lost]
        assert lost == ["engine_failed"] * 2 and scene.host.engine.state == "dead"
        assert all(isinstance(error, RequestError) for it in users for error in it.lost)
        assert scene.life.done()


async def test_each_user_gets_one_queue_position(folder: Path) -> None:
    async with up(folder) as scene:
        one, other = scene.user(2), scene.user()
        (a, b), (c,) = one.ids, other.ids
        queue = (a, SequenceId(99), b, c)
        await scene.engine.say(replace(STATUS, queue=queue, num_waiting=4))
        assert [(it.position, it.waiting) for it in one.places] == [(1, 4)]
        assert [(it.position, it.waiting) for it in other.places] == [(4, 4)]


async def test_resize_only_accepts_an_unchanged_config_of_a_single_engine(
    folder: Path,
) -> None:
    async with up(folder) as (host, _, _):
        assert host.resize(host.config, 0.0)
        assert not host.resize(replace(host.config, replicas=2), 0.0)
        assert not host.resize(replace(host.config, max_model_len=64), 0.0)
        assert host.config.replicas == 1


def test_the_size_of_a_model_only_counts_existing_files(tmp_path: Path) -> None:
    (tmp_path / "one.safetensors").write_bytes(bytes(100))
    (tmp_path / "two.safetensors").symlink_to(tmp_path / "gone")
    host = ModelHost(ModelConfig(model=str(tmp_path)), lambda _: FakeEngine(), Metrics())
    assert host.num_bytes == 100


def test_a_new_host_of_a_known_model_keeps_the_adapters_served_now(folder: Path) -> None:
    known = ServedModel(ModelConfig(model=str(folder)))
    config = ModelConfig(model=str(folder), adapter=("unloaded=/and/removed",))
    host = ModelHost(config, lambda _: FakeEngine(), Metrics(), known)
    assert not known.adapters and host.local.adapter == ()


def test_detecting_image_support_opens_and_converts_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(GGUF, folder)
    os.mkfifo(folder / "config.json")

    def may_see_images(model: Path, lane: str = "auto") -> bool:
        config = ModelConfig(model=str(model), lane=lane)
        return ModelHost(config, lambda _: FakeEngine(), Metrics()).may_see_images

    assert not may_see_images(folder) and not may_see_images(folder / GGUF.name)
    assert not (tmp_path / "cache").exists()
    (folder / "preprocessor_config.json").touch()
    assert may_see_images(folder) and not may_see_images(folder, lane="native-text")
