"""Loads LoRA adapters: a thread reads an adapter, and the step loop installs it between steps."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

from headrace_common.adapter import Adapter
from headrace_common.errors import ModelError
from headrace_common.messages import AdapterRead, Submit
from headrace_common.system.panics import STEERING

logger = logging.getLogger(__name__)


class AdapterRunner(Protocol):
    """The adapter methods of a runner; only the runner interprets what `read_adapter` returns."""

    def read_adapter(self, adapter: Adapter) -> Any: ...

    def put_adapter(self, read: Any) -> None: ...

    def drop_adapter(self, fingerprint: str) -> None: ...


class AdapterReadDone(NamedTuple):
    """A message to the engine's inbox: the thread has finished reading an adapter, or failed."""

    fingerprint: str
    done: "Future[Any]"


class AdapterLoader:
    """Tracks the adapters of an engine. Only the engine's thread may call the methods."""

    def __init__(self, runner: AdapterRunner | None) -> None:
        """Without a runner, no request may name an adapter."""
        self._runner = runner
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapter")
        self._loaded: set[str] = set()
        # Submits that wait for an adapter, keyed by the adapter's fingerprint. An adapter that is
        # being read has an entry even if no submit waits.
        self._waiting: dict[str, list[Submit]] = {}

    def missing(self, submit: Submit) -> Adapter | None:
        """Return the adapter that must be read before the submit's sequences can start, or None."""
        adapter = submit.adapter
        return None if adapter is None or adapter.fingerprint in self._loaded else adapter

    def load(self, adapter: Adapter) -> None:
        """Read and install an adapter now; ModelError if it cannot be read."""
        assert self._runner is not None
        self._runner.put_adapter(self._runner.read_adapter(adapter))
        self._loaded.add(adapter.fingerprint)

    def read(
        self, adapter: Adapter, put: Callable[[AdapterReadDone], None], waits: Submit | None = None
    ) -> None:
        """Read an adapter in the thread, then pass an AdapterReadDone to `put`.

        `put` is called immediately if the adapter is already loaded. `waits` is a submit that needs
        the adapter; `take` returns this submit together with the result.
        """
        assert self._runner is not None
        fingerprint = adapter.fingerprint
        is_read = fingerprint in self._waiting
        self._waiting.setdefault(fingerprint, []).extend(() if waits is None else (waits,))
        if is_read:
            return
        if fingerprint in self._loaded:
            done: Future[Any] = Future()
            done.set_result(None)
        else:
            done = self._thread.submit(self._runner.read_adapter, adapter)
        done.add_done_callback(lambda done: put(AdapterReadDone(fingerprint, done)))

    def take(self, reading: AdapterReadDone) -> tuple[AdapterRead, list[Submit]]:
        """Install an adapter that was read; return the result and all waiting submits."""
        assert self._runner is not None
        fingerprint = reading.fingerprint
        answer = AdapterRead(fingerprint)
        try:
            if (read := reading.done.result()) is not None:
                self._runner.put_adapter(read)
                self._loaded.add(fingerprint)
        except ModelError as error:
            logger.error("An adapter could not be read: %s", error)
            code = error.code if error.code == "model_changed" else "load_failed"
            answer = AdapterRead(fingerprint, code, str(error))
        except STEERING:
            raise
        # Not `except Exception`: a panic in a Rust library is a BaseException.
        except BaseException as error:
            logger.exception("An adapter could not be read")
            words = f"The adapter could not be read ({type(error).__name__}); see the server's log."
            answer = AdapterRead(fingerprint, "internal_error", words)
        return answer, self._waiting.pop(fingerprint)

    def drop(self, fingerprint: str) -> None:
        """Unload an adapter that no request uses any more."""
        if fingerprint in self._loaded and self._runner is not None:
            self._loaded.remove(fingerprint)
            self._runner.drop_adapter(fingerprint)
