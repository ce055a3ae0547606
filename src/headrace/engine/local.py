"""The engine in the caller's process: the same loop in a thread; for LLM and for tests."""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator

from headrace.core.config import ModelConfig
from headrace.core.messages import Cancel, Message, Outputs, Ready, Shutdown, Status, Submit
from headrace.engine.client import IDLE, EngineNews, EngineUp, News
from headrace.engine.engine import Engine, Inbox


class _ToLoop:
    """An outbox that hands messages to the event loop's thread."""

    def __init__(self, client: "LocalEngine") -> None:
        self._client = client
        self._loop = asyncio.get_running_loop()

    def put(self, message: Message) -> None:
        self._loop.call_soon_threadsafe(self._client.receive, message)

    def num_unsent(self) -> int:
        return 0


class LocalEngine:
    """An EngineClient whose engine is a thread. Made by `start`."""

    def __init__(self) -> None:
        self._inbox: Inbox = queue.SimpleQueue()
        self._news = News()
        self._status = IDLE
        self._thread: threading.Thread | None = None

    @classmethod
    async def start(cls, config: ModelConfig) -> tuple["LocalEngine", Ready]:
        """Loads the model in a worker thread; ModelError if it cannot be served."""
        from headrace.engine.load import load

        client = cls()
        runner, scheduler, ready = await asyncio.to_thread(load, config)
        engine = Engine(scheduler, runner, _ToLoop(client))
        client._thread = threading.Thread(
            target=engine.run, args=(client._inbox,), name="engine", daemon=True
        )
        client._thread.start()
        client._news.put(EngineUp(ready))
        return client, ready

    def receive(self, message: Message) -> None:
        """Called on the event loop's thread with each message of the engine."""
        if isinstance(message, Status):
            self._status = message
        elif isinstance(message, Outputs):
            self._news.put(message)

    def submit(self, submit: Submit) -> None:
        self._inbox.put(submit)

    def cancel(self, cancel: Cancel) -> None:
        self._inbox.put(cancel)

    def outputs(self) -> AsyncIterator[EngineNews]:
        return aiter(self._news)

    @property
    def status(self) -> Status:
        return self._status

    async def close(self) -> None:
        if self._thread is not None:
            self._inbox.put(Shutdown())
            await asyncio.to_thread(self._thread.join)
        self._news.end()
