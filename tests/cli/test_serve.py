"""Starts that fail, and ends of a server over a generation and an engine that only wait."""

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace import server
from headrace.cli import exit_codes
from headrace.cli import serve as module
from headrace.cli.load_lines import LoadLines
from headrace.metrics.metrics import Metrics
from headrace.streams.stores.memory import MemoryStore
from headrace.text.model_names import Models
from headrace_common.config.settings import HttpConfig, ModelConfig, ServerConfig
from headrace_common.errors import ModelError
from headrace_common.loading import STARTING


class Engine:
    def __init__(self, *_: object) -> None: ...

    async def close(self) -> None: ...


class Generation:
    """Runs until it is told to end."""

    newest: "Generation"

    def __init__(self, *_: object) -> None:
        self.work, self.metrics = None, Metrics()
        self.fleet = self
        self.pinned = Host()
        self.hosts = Models((self.pinned,))  # type: ignore[type-var]
        self.streams = ["one", "two"]
        self.died = asyncio.Event()
        self.ended = asyncio.Event()
        self.last_words = "It would not start."
        Generation.newest = self

    async def run(self) -> None:
        await self.ended.wait()

    async def drain(self, seconds: float) -> None:
        self.ended.set()

    async def close(self) -> None: ...


class Host:
    """A model that never loads."""

    def __init__(self) -> None:
        self.engine = self

    async def wait_until_ready(self) -> None:
        await asyncio.Event().wait()


class Model:
    folder, names, paths = Path(), ("tiny",), frozenset[str]()
    adapters: Mapping[str, Any] = {}
    load_notes = ()
    has_vision = False
    ready = object()

    def read_adapters(self, config: object) -> None: ...


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Serves, does something to the server, and returns the exit code."""
    monkeypatch.setattr(module, "Supervisor", Engine)
    monkeypatch.setattr(server, "Generation", Generation)
    monkeypatch.setattr(module, "_end_within", lambda *_: None)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)

    def run(act: Callable[[], Any], host: str = "127.0.0.1") -> int:
        async def scene() -> int:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                config = ServerConfig(http=HttpConfig(host=host))
                serving = module._Serving(config, Model(), listener, MemoryStore())  # type: ignore[arg-type]
                asyncio.get_running_loop().call_soon(act)
                async with asyncio.timeout(20):
                    return await serving.run(LoadLines(STARTING), Metrics())

        return asyncio.run(scene())

    return run


def lose_a_thread() -> None:
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("act", [lose_a_thread, lambda: Generation.newest.ended.set()])
def test_a_part_that_ends_by_itself_ends_the_server(
    act: Callable[[], None], run: Callable[..., int]
) -> None:
    assert run(act) == exit_codes.BROKEN


def test_an_engine_given_up_ends_the_server(run: Callable[..., int]) -> None:
    def give_up() -> None:
        Generation.newest.died.set()
        Generation.newest.ended.set()

    assert run(give_up) == exit_codes.ENGINE


def test_a_closed_terminal_is_a_stop_that_says_how_long_it_takes(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.signal(signal.SIGHUP, lambda *_: None)
    try:
        assert run(lambda: os.kill(os.getpid(), signal.SIGHUP)) == exit_codes.DONE
    finally:
        signal.signal(signal.SIGHUP, before)
    line = "headrace: 2 streams have up to 30 s to finish; press Ctrl-C again to stop now.\n"
    assert capsys.readouterr().err == line


def test_a_server_for_other_machines_without_a_key_says_so(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    run(lambda: os.kill(os.getpid(), signal.SIGTERM), host="0.0.0.0")
    assert "other machines can use this server (0.0.0.0) without a key" in capsys.readouterr().err


def test_a_model_that_does_not_exist_is_reported_before_a_used_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        http = HttpConfig(port=taken.getsockname()[1])
        config = ServerConfig(models=(ModelConfig(model="smolm2"),), http=http)
        with pytest.raises(ModelError, match="did you mean smollm2"):
            module.serve(config, LoadLines(STARTING))
