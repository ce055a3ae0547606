import asyncio
import contextlib
import gc
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from headrace.workers import process
from headrace.workers.job_queue import OWNER
from headrace.workers.pool import JobRunner, ThreadJobRunner, WorkerPool
from headrace_common.config.settings import ModelConfig
from headrace_common.errors import RequestError
from headrace_common.request import Chat, Text
from headrace_common.system import framing
from headrace_common.worker_jobs import AnyJob, Detokenize, EncodePrompts, ReadBody, encode_job
from tools.harness import processes
from tools.harness.eventually import settle

TEMPLATE = """
{%- if messages[0].content == "slow" %}{{ ("ab" * 2000000)|list|map("upper")|list|length }}
{%- elif messages[0].content == "large" %}{{ ("ab" * 15000000)|list|length }}{% endif %}ok"""


@pytest.fixture
def config(folder: Path, tmp_path: Path) -> ModelConfig:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    return ModelConfig(model=str(folder), chat_template=str(template))


@contextlib.asynccontextmanager
async def pool_of(config: ModelConfig) -> AsyncIterator[WorkerPool]:
    pool = WorkerPool("tests.generation.quick_worker", msgspec.msgpack.encode(((config,), ())))
    running = asyncio.create_task(pool.run())
    try:
        yield pool
    finally:
        running.cancel()
        await asyncio.wait([running])


async def render(pool: WorkerPool, content: str) -> str:
    """Return the number of rendered tokens, or the code and message of the refusal."""
    packed = msgspec.msgpack.encode((Chat(({"role": "user", "content": content},)),))
    try:
        encoded = await pool.do(EncodePrompts(1000), [packed])
    except RequestError as error:
        return f"{error.code}: {error.message}"
    assert encoded.tokenization == "one-shot"
    return f"{len(encoded.prompts[0]) // 4} tokens"


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def workers() -> list[int]:
    """Return the ids of the worker processes that are alive."""
    return [
        pid for pid in processes.children(os.getpid()) if b"quick_worker" in processes.command(pid)
    ]


def test_a_template_overrun_does_not_affect_other_jobs(config: ModelConfig) -> None:
    async def run() -> list[str]:
        async with pool_of(config) as pool:
            asked = ("slow", "large", "slow", "fine", "fine")
            return await asyncio.gather(*(render(pool, content) for content in asked))

    found = asyncio.run(run())
    assert all(text.startswith("template_failed: The chat template overran") for text in found[:3])
    assert found[3:] == ["2 tokens", "2 tokens"]


async def test_jobs_still_run_after_all_workers_were_killed(config: ModelConfig) -> None:
    async with pool_of(config) as pool:
        for _ in range(2):
            assert await render(pool, "fine") == "2 tokens"
            for pid in workers():
                os.kill(pid, signal.SIGKILL)
        assert await render(pool, "fine") == "2 tokens"
    assert not workers()


async def test_a_job_does_not_wait_for_a_stopped_worker(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pool_of(config) as pool:
        assert await render(pool, "fine") == "2 tokens"
        monkeypatch.setattr(process, "STILL_S", 0.5)
        for pid in workers():
            os.kill(pid, signal.SIGSTOP)
        assert await render(pool, "fine") == "2 tokens"


async def test_workers_are_not_replaced_after_the_whole_server_was_suspended(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pool_of(config) as pool:
        assert await render(pool, "fine") == "2 tokens"
        before = workers()
        monkeypatch.setattr(process, "STILL_S", 0.5)
        for pid in before:
            os.kill(pid, signal.SIGSTOP)
        rendering = asyncio.create_task(render(pool, "fine"))
        await asyncio.sleep(0.7)  # one look at the worker has found it still
        time.sleep(3)  # noqa: ASYNC251 - the loop is stopped with it
        for pid in before:
            os.kill(pid, signal.SIGCONT)
        assert await rendering == "2 tokens" and set(before) <= set(workers())


async def test_a_job_is_refused_while_no_file_descriptors_are_left(
    config: ModelConfig,
) -> None:
    async with pool_of(config) as pool:
        assert await render(pool, "fine") == "2 tokens"
        found = workers()
        with no_descriptors():
            for pid in found:
                os.kill(pid, signal.SIGKILL)
            assert (await render(pool, "fine")).startswith("server_overloaded")
        assert await render(pool, "fine") == "2 tokens"


async def test_small_jobs_overtake_large_ones(config: ModelConfig) -> None:
    done: list[str] = []
    async with pool_of(config) as pool:

        async def do(name: str, text: str) -> None:
            packed = msgspec.msgpack.encode((Text(text),))
            await pool.do(EncodePrompts(1 << 30), [packed])
            done.append(name)

        large = [do(f"large {i}", "many words " * 200_000) for i in range(2)]
        small = [do("small", "a word") for _ in range(3)]
        await asyncio.gather(*large, *small)
    assert done[:3] == ["small"] * 3


async def test_a_cancelled_job_is_not_executed(config: ModelConfig) -> None:
    async with pool_of(config) as pool:
        assert await render(pool, "fine") == "2 tokens"
        slow = [asyncio.create_task(render(pool, "slow")) for _ in range(50)]
        await settle()
        for task in slow:
            task.cancel()
        assert await render(pool, "fine") == "2 tokens"
        async with asyncio.timeout(30):  # 50 slow ones would take minutes
            while len(pool._queue):
                await asyncio.sleep(0.01)


async def test_cancelling_a_running_job_ends_its_worker(config: ModelConfig) -> None:
    async with pool_of(config) as pool:
        assert await render(pool, "fine") == "2 tokens"
        packed = msgspec.msgpack.encode((Text("many words " * 3_000_000),))
        asking = asyncio.create_task(pool.do(EncodePrompts(1 << 30), [packed]))
        while not pool._queue._running:
            await asyncio.sleep(0)
        before = workers()
        asking.cancel()
        packed = msgspec.msgpack.encode((Text("many words " * 10_000),))
        await pool.do(EncodePrompts(1 << 30), [packed])
        assert len(set(before) - set(workers())) == 1


def test_an_unreadable_model_is_reported_without_ending_a_worker(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "nowhere")

    async def run() -> None:
        async with pool_of(ModelConfig(model=missing, served_model_name=("lost",))) as pool:
            refused = await render(pool, "hello")
            assert refused.startswith("load_failed: The model 'lost' could not be read (")
            assert tmp_path.name not in refused
            before = workers()
            assert await render(pool, "hello") == refused and set(before) <= set(workers())

    asyncio.run(run())
    told = capfd.readouterr().err
    assert f"lost could not be read. No model folder {missing!r}" in told
    assert "Traceback" not in told


def test_a_worker_exits_silently_when_its_server_is_gone(folder: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = subprocess.Popen(
            [sys.executable, "-m", "headrace.protocols.worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
        )
        theirs.close()
        start = msgspec.msgpack.encode(((ModelConfig(model=str(folder)),), ()))
        framing.send(ours, b"", start)
        assert ours.recv(8)
        body = msgspec.msgpack.encode((Text("on and on " * 10_000),))
        framing.send(ours, encode_job(EncodePrompts(10)), body)
    assert worker.communicate(timeout=60)[1] == b"" and worker.returncode == 0


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_worker_gets_the_owner_of_each_job(kind: str) -> None:
    class Naming:
        def do(self, job: AnyJob, body: bytes) -> bytes:
            return job.owner.encode()

    async def run() -> list[bytes]:
        runner: JobRunner = ThreadJobRunner(Naming())
        if kind == "processes":
            runner = WorkerPool("tests.workers.naming_worker", b"")
        running, found = asyncio.create_task(runner.run()), []
        for owner in ("ann", "bob"):
            OWNER.set(owner)
            found.append(await runner.do(Detokenize()))
        running.cancel()
        await asyncio.wait([running])
        return found

    assert asyncio.run(run()) == [b"ann", b"bob"]


def test_a_refused_body_is_freed(config: ModelConfig) -> None:
    class Piece(bytearray):
        """A piece of a body that supports weak references."""

    async def run() -> bool:
        async with pool_of(config) as pool:
            pieces = [Piece(b"{")]
            seen = weakref.ref(pieces[0])
            with pytest.raises(RequestError):
                await pool.do(ReadBody("/v1/completions"), pieces)
            pieces.clear()
            await settle()
            return seen() is None

    gc.disable()  # which would find it in the end, when much has come to nothing
    try:
        assert asyncio.run(run())
    finally:
        gc.enable()
