"""Loads and unloads adapters while streams run.

To use an adapter, a request gives the adapter's name as its model.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

from headrace.fleet.fleet import Fleet
from headrace.fleet.in_thread import in_thread
from headrace.generation.registry import Registry
from headrace_common.adapter import Adapter
from headrace_common.checkpoints.adapters import name_adapter
from headrace_common.errors import ModelError, RequestError

_LONGEST_NAME = 256


class AdapterService:
    """Loads and unloads adapters; calls `on_names` when the list of adapter names has changed."""

    def __init__(self, fleet: Fleet, streams: Registry, on_names: Callable[[], None]) -> None:
        self._fleet, self._streams, self._on_names = fleet, streams, on_names
        # Load adapters one after another, so that two load requests cannot take the same name.
        self._turn = asyncio.Lock()

    async def load(self, name: str, path: str, base: str | None) -> None:
        """Load the adapter at `path` and serve the adapter under `name`.

        Raises RequestError if the adapter cannot be loaded.
        """
        if not 0 < len(name) <= _LONGEST_NAME or "=" in name or not name.isprintable():
            message = f"lora_name must have 1 to {_LONGEST_NAME} printable characters and no =."
            raise RequestError("invalid_value", message, "lora_name")
        async with self._fleet.using(base) as host, self._turn:
            if self._fleet.hosts.find(name) is not None:
                message = f"{name!r} is already served; unload it first, or choose another name."
                raise RequestError("invalid_value", message, "lora_name")
            architecture = host.model.spec.architecture
            try:
                adapter = await in_thread(
                    lambda: name_adapter(name, Path(path), architecture, host.name)
                )
                await host.users.read_adapter(adapter)
            except ModelError as error:
                raise RequestError("invalid_value", str(error), "lora_path") from error
            host.add_adapter(adapter)
        self._on_names()

    async def unload(self, name: str) -> None:
        """Immediately refuse new requests for the adapter; return when the adapter's streams have
        ended.
        """
        host = self._fleet.hosts.find(name)
        adapter = host.remove_adapter(name) if host else None
        if host is None or adapter is None:
            raise RequestError("model_not_found", f"No adapter {name!r} is loaded.", "lora_name")
        self._on_names()
        while users := self._users(adapter):
            await asyncio.gather(*users)
        others = host.known.adapters.values() if host.known else ()
        if all(it.fingerprint != adapter.fingerprint for it in others):
            host.users.drop_adapter(adapter)

    def _users(self, adapter: Adapter) -> list[asyncio.Task[bool]]:
        """Return one task per unfinished stream of the adapter; the task ends when the stream
        ends.
        """
        return [
            asyncio.create_task(stream.ended.wait(), name="end of a stream")
            for stream in self._streams
            if stream.record.adapter is not None
            and stream.record.adapter.fingerprint == adapter.fingerprint
            and not stream.ended.is_set()
        ]
