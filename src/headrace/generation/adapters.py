"""Adapters that come and go while streams run: each is asked for as a model by its name."""

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


class AdapterDesk:
    """Loads and unloads adapters of served models. `on_names` is called when names have changed."""

    def __init__(self, fleet: Fleet, streams: Registry) -> None:
        self._fleet, self._streams = fleet, streams
        self.on_names: Callable[[], None] = lambda: None
        self._turn = asyncio.Lock()  # one at a time, so that no name is taken twice

    async def load(self, name: str, path: str, base: str | None) -> None:
        """Has it in memory, to be asked for by its name; RequestError says why not."""
        if not 0 < len(name) <= _LONGEST_NAME or "=" in name or not name.isprintable():
            message = f"lora_name takes 1 to {_LONGEST_NAME} printable characters, none of them =."
            raise RequestError("invalid_value", message, "lora_name")
        async with self._fleet.using(base) as host, self._turn:
            if self._fleet.hosts.find(name) is not None:
                message = f"{name!r} is served already; unload it first, or give another name."
                raise RequestError("invalid_value", message, "lora_name")
            architecture = host.model.spec.architecture
            try:
                adapter = await in_thread(
                    lambda: name_adapter(name, Path(path), architecture, host.name)
                )
                await host.tenants.read_adapter(adapter)
            except ModelError as error:
                raise RequestError("invalid_value", str(error), "lora_path") from error
            host.add_adapter(adapter)
        self.on_names()

    async def unload(self, name: str) -> None:
        """Takes no more requests for it at once, and returns when its streams have ended."""
        host = self._fleet.hosts.find(name)
        adapter = host.remove_adapter(name) if host else None
        if host is None or adapter is None:
            raise RequestError("model_not_found", f"No adapter {name!r} is loaded.", "lora_name")
        self.on_names()
        while users := self._users(adapter):
            await asyncio.gather(*users)
        others = host.known.adapters.values() if host.known else ()
        if all(it.fingerprint != adapter.fingerprint for it in others):
            host.tenants.drop_adapter(adapter)

    def _users(self, adapter: Adapter) -> list[asyncio.Task[bool]]:
        """The ends of its streams, to be waited for."""
        return [
            asyncio.create_task(stream.ended.wait(), name="end of a stream")
            for stream in self._streams
            if stream.record.adapter is not None
            and stream.record.adapter.fingerprint == adapter.fingerprint
            and not stream.ended.is_set()
        ]
