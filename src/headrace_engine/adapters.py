"""Adapters of the engine's sequences: read beside the steps, put in between two of them."""

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
    """The part of the runner that keeps adapters; what `read_adapter` gives is its own."""

    def read_adapter(self, adapter: Adapter) -> Any: ...

    def put_adapter(self, read: Any) -> None: ...

    def drop_adapter(self, fingerprint: str) -> None: ...


class Reading(NamedTuple):
    """News in the engine's inbox: the reading of an adapter has ended."""

    fingerprint: str
    done: "Future[Any]"


class AdapterShelf:
    """The adapters that an engine has. Used by its thread alone, but for what it starts."""

    def __init__(self, runner: AdapterRunner | None) -> None:
        """None: no adapter is ever named."""
        self._runner = runner
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapter")
        self._here: set[str] = set()
        self._waiting: dict[str, list[Submit]] = {}  # for those that are being read

    def missing(self, submit: Submit) -> Adapter | None:
        """The adapter that must be read before its sequences may begin."""
        adapter = submit.adapter
        return None if adapter is None or adapter.fingerprint in self._here else adapter

    def load(self, adapter: Adapter) -> None:
        """Reads one now; ModelError if it cannot be had."""
        assert self._runner is not None
        self._runner.put_adapter(self._runner.read_adapter(adapter))
        self._here.add(adapter.fingerprint)

    def read(
        self, adapter: Adapter, put: Callable[[Reading], None], waits: Submit | None = None
    ) -> None:
        """Puts a Reading when it has ended, perhaps at once; what `waits` comes back with it."""
        assert self._runner is not None
        own = adapter.fingerprint
        is_read = own in self._waiting
        self._waiting.setdefault(own, []).extend(() if waits is None else (waits,))
        if is_read:
            return
        if own in self._here:
            done: Future[Any] = Future()
            done.set_result(None)
        else:
            done = self._thread.submit(self._runner.read_adapter, adapter)
        done.add_done_callback(lambda done: put(Reading(own, done)))

    def take(self, reading: Reading) -> tuple[AdapterRead, list[Submit]]:
        """The outcome, and who waited for it."""
        assert self._runner is not None
        own = reading.fingerprint
        answer = AdapterRead(own)
        try:
            if (read := reading.done.result()) is not None:
                self._runner.put_adapter(read)
                self._here.add(own)
        except ModelError as error:
            logger.error("An adapter could not be read: %s", error)
            code = error.code if error.code == "model_changed" else "load_failed"
            answer = AdapterRead(own, code, str(error))
        except STEERING:
            raise
        except BaseException as error:  # a library's panic is not an Exception
            logger.exception("An adapter could not be read")
            words = f"The adapter could not be read: {type(error).__name__}."
            answer = AdapterRead(own, "internal_error", words)
        return answer, self._waiting.pop(own)

    def drop(self, fingerprint: str) -> None:
        """Nobody uses it any more."""
        if fingerprint in self._here and self._runner is not None:
            self._here.remove(fingerprint)
            self._runner.drop_adapter(fingerprint)
