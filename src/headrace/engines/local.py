"""Runs the engine's usual loop in a thread of the caller's process, for LLM and tests."""

import asyncio
import logging
import queue
import threading

from headrace.engines.client import EngineDown, EngineUp, NewsQueue
from headrace_common.config.settings import ModelConfig
from headrace_common.messages import (
    AdapterRead,
    Cancel,
    DropAdapter,
    LoadAdapter,
    Message,
    Outputs,
    Ready,
    Shutdown,
    Status,
    Submit,
)
from headrace_common.system.panics import STEERING
from headrace_engine.engine import Engine, Inbox

logger = logging.getLogger(__name__)


class LocalEngine:
    """An EngineClient that runs the engine in a thread; created by `start`."""

    def __init__(self) -> None:
        self._inbox: Inbox = queue.SimpleQueue()
        self.news = NewsQueue()
        self._loop = asyncio.get_running_loop()
        self._thread: threading.Thread | None = None
        self._is_closing = False

    @classmethod
    async def start(cls, config: ModelConfig) -> tuple["LocalEngine", Ready]:
        """Load the model in a worker thread. Raises ModelError if the model cannot be served."""
        from headrace_engine.load import load

        client = cls()
        loaded = await asyncio.to_thread(load, config)
        client._thread = threading.Thread(
            target=client._run, args=(loaded.engine(client),), name="engine", daemon=True
        )
        client._thread.start()
        client.news.put(EngineUp(loaded.ready))
        return client, loaded.ready

    def submit(self, submit: Submit) -> None:
        self._inbox.put(submit)

    def cancel(self, cancel: Cancel) -> None:
        self._inbox.put(cancel)

    def adapt(self, message: LoadAdapter | DropAdapter) -> None:
        self._inbox.put(message)

    async def close(self) -> None:
        self._is_closing = True
        if self._thread is not None:
            self._inbox.put(Shutdown())
            await asyncio.to_thread(self._thread.join)
        self.news.end(None)

    # The methods below are the engine's outbox. The engine calls them from the engine's thread.

    def put(self, message: Message) -> None:
        if isinstance(message, Outputs | Status | AdapterRead):
            self._loop.call_soon_threadsafe(self.news.put, message)

    def num_unsent(self) -> int:
        return 0

    def _run(self, engine: Engine) -> None:
        message = "The engine's loop ended unexpectedly."
        try:
            engine.run(self._inbox)
        except STEERING:
            raise
        # A panic in a native library is not an Exception.
        except BaseException as error:
            logger.exception("The engine's loop failed")
            message = f"The engine's loop failed: {error}"
        if not self._is_closing:
            down = EngineDown("engine_failed", message, given_up=True)
            self._loop.call_soon_threadsafe(self.news.put, down)
