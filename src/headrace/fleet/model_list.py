"""The models a server should have: kept over restarts, and carried out by its fleet."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from headrace.fleet.fleet import Fleet
from headrace.fleet.kept_file import KeptFile
from headrace.fleet.model_host import ModelHost
from headrace.fleet.pulls import Pull, Pulls
from headrace.text.model_names import told_apart
from headrace_common.checkpoints.downloads import discard
from headrace_common.config.document import read_document, to_document
from headrace_common.config.settings import ModelConfig
from headrace_common.errors import RequestError
from headrace_common.system.state_files import read_kept

_CHECK_INTERVAL_S = 1.0
_MAX_FILE_BYTES = 64 << 20
_ONE_MODEL = (
    "This server was started with one model, which stays. POST /models takes others beside it; to "
    "replace it, start the server with --models-dir, [[models]] or --model NAME=PATH."
)
_NOT_PULLED = (
    "This model is one of the server's flags, file or folder; only what came by POST /models is "
    "deleted by a request."
)
_OWN = (
    *("model", "revision", "served_model_name", "min_replicas"),
    *("chat_template", "tool_format", "reasoning_format", "adapter"),
)
Configs = tuple[ModelConfig, ...]


class ModelSources:
    """Where a server's models come from: flags and folder, or the document that was put; and pulls.

    `reread` reads the folder again. Without `file` a document is lost with the server; `is_one`:
    the server began with one model, and takes no document.
    """

    def __init__(
        self,
        configs: Configs,
        pulls: Pulls,
        reread: Callable[[], Configs],
        file: Path | None,
        is_one: bool,
    ) -> None:
        self.configs = configs
        self.pulls = pulls
        self.reread = reread
        self.file = file
        self.is_one = is_one

    def all(self) -> Configs:
        """All of them, each with its names."""
        taken = {config.model for config in self.configs}
        names = (name for name in self.pulls.here if name not in taken)
        return told_apart((*self.configs, *(_like_all(self.configs, it) for it in names)))


def _like_all(configs: Configs, model: str) -> ModelConfig:
    """A model with the settings in which the server's own are alike, such as flags for all."""
    shared = {
        name: getattr(configs[0], name)
        for name in ModelConfig.__struct_fields__
        if name not in _OWN and len({getattr(config, name) for config in configs}) == 1
    }
    return ModelConfig(model=model, **shared)


def _repo_of(model: str) -> str:
    """The hub's id, whichever of its files was asked for."""
    return model.partition(":")[0]


class Desired:
    """The models as they should be, put as a whole or pulled one by one.

    `make` makes a host, `renew` tells those who know models by their settings.
    """

    def __init__(
        self,
        sources: ModelSources,
        make: Callable[[ModelConfig], ModelHost],
        renew: Callable[[tuple[ModelHost, ...]], None],
        fleet: Fleet,
    ) -> None:
        self.pulls = sources.pulls
        self._sources = sources
        self._make = make
        self._renew = renew
        self._fleet = fleet
        self._was_put = sources.file is not None and sources.file.exists()
        self._file = KeptFile(sources.file) if sources.file else None
        self._putting = asyncio.Lock()  # what is kept last is what is served
        self._checked_at = 0.0
        self._deleting = asyncio.Lock()  # no download begins meanwhile
        self.pulls.on_change = self._apply
        fleet.on_unknown = self.reread

    def document(self) -> dict[str, Any]:
        if self._sources.is_one:
            raise RequestError("unsupported_operation", _ONE_MODEL)
        return to_document(self._sources.configs)

    async def put(self, document: Any) -> None:
        """RequestError, and nothing is changed, if the document is not fit."""
        self.document()
        configs = read_document(document, told_apart)
        async with self._putting:
            if self._file is not None:
                content = msgspec.json.format(msgspec.json.encode(to_document(configs)))
                try:
                    await self._file.keep(content)
                except OSError as error:
                    message = f"The document cannot be kept ({error.strerror}); nothing is changed."
                    raise RequestError("internal_error", message) from None
            self._was_put = True
            self._sources.configs = configs
            self._apply()

    async def reread(self) -> None:
        """Takes up what has come into the folder of models, and drops what has left it."""
        if self._was_put or time.monotonic() < self._checked_at + _CHECK_INTERVAL_S:
            return
        self._checked_at = time.monotonic()
        configs = await asyncio.to_thread(self._sources.reread)
        if configs != self._sources.configs and not self._was_put:
            self._sources.configs = configs
            self._apply()

    async def pull(self, model: str) -> Pull | None:
        """Begins a download, or goes on; None: the model is served already."""
        if self._fleet.hosts.find(model) is not None:
            return None
        async with self._deleting:
            pull = self.pulls.begin(model)
        return await pull.answered()

    async def delete(self, model: str) -> None:
        """Stops its download, serves it no more and removes its files, once its streams ended."""
        if self.pulls.find(model) is None:
            self._fleet.hosts.get(model)  # RequestError if nobody knows it
            raise RequestError("unsupported_operation", _NOT_PULLED, "model")
        await self.pulls.forget(model)
        self._fleet.when_gone(model, lambda: self._discard(model))

    async def _discard(self, model: str) -> None:
        async with self._deleting:
            wanted = [it.model for it in self._sources.configs]
            wanted += [it.model for it in self.pulls.all()]
            if _repo_of(model) not in map(_repo_of, wanted):
                await asyncio.to_thread(discard, model)

    def _apply(self) -> None:
        hosts = tuple(self._make(config) for config in self._sources.all())
        self._renew(hosts)
        self._fleet.become(hosts)
        for host in self._fleet.hosts.all():
            if host.known is None and self.pulls.find(host.config.model) is not None:
                self._fleet.fetch(host)


def kept(file: Path) -> Configs | None:
    """The document that was put before; None if there is none that can be read."""
    return read_kept(file, _decode, _MAX_FILE_BYTES)


def _decode(content: bytes) -> Configs:
    return read_document(msgspec.json.decode(content), told_apart)
