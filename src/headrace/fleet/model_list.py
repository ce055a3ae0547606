"""Stores the list of models that a server should have, and applies changes to the fleet."""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headrace.fleet.atomic_file import NotSyncedError, StateFile
from headrace.fleet.fleet import Fleet
from headrace.fleet.model_host import ModelHost
from headrace.fleet.pulls import Pull, Pulls
from headrace.text.model_names import with_unique_names
from headrace_common.checkpoints.catalog import hub_id_of
from headrace_common.checkpoints.downloads import discard
from headrace_common.config.document import read_document, to_document
from headrace_common.config.settings import ModelConfig
from headrace_common.errors import RequestError
from headrace_common.system.state_files import read_kept

_CHECK_INTERVAL_S = 1.0
_MAX_FILE_BYTES = 64 << 20
_ONE_MODEL = (
    "This server was started with a single model, which cannot be replaced. Add models with POST "
    "/models, or start the server with --models-dir, [[models]] or --model NAME=PATH."
)
_NOT_PULLED = (
    "This model comes from the server's flags, file or folder. Only models that were added with "
    "POST /models can be deleted by a request."
)
_OWN = (
    *("model", "revision", "mmproj", "served_model_name", "min_replicas"),
    *("chat_template", "tool_format", "reasoning_format", "adapter"),
)
Configs = tuple[ModelConfig, ...]


class ModelSources:
    """Combines the configured models with the models that clients downloaded.

    `configs` come from the settings and the folder of models, or from a document that a client
    sent to replace the list. Without `file`, this document is lost when the server ends. `reread`
    reads the folder of models again. `is_one` means that the server was started with a single
    model and accepts no document.
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
        """Return the settings of all models. Each name occurs only once."""
        taken = {config.model for config in self.configs}
        names = (name for name in self.pulls.here if name not in taken)
        return with_unique_names((*self.configs, *(_like_all(self.configs, it) for it in names)))


def _like_all(configs: Configs, model: str) -> ModelConfig:
    """Return settings for one more model, with the values that all `configs` have in common."""
    shared = {
        name: getattr(configs[0], name)
        for name in ModelConfig.__struct_fields__
        if name not in _OWN and len({getattr(config, name) for config in configs}) == 1
    }
    return ModelConfig(model=model, **shared)


def _repo_of(model: str) -> str:
    """Return the hub id of a model, without the suffix that selects a file."""
    return hub_id_of(model).partition(":")[0]


class ModelChanges(NamedTuple):
    """The sources of a server's models.

    `make` creates the host of a model. `renew` passes a new list of hosts to the worker processes.
    """

    sources: ModelSources
    make: Callable[[ModelConfig], ModelHost]
    renew: Callable[[tuple[ModelHost, ...]], None]

    @classmethod
    def none(cls, hosts: tuple[ModelHost, ...]) -> "ModelChanges":
        """Return the sources and functions of a server whose models never change."""
        configs = tuple(host.config for host in hosts)

        def make(config: ModelConfig) -> ModelHost:
            raise AssertionError("the models of this server never change")

        sources = ModelSources(configs, Pulls(None), lambda: configs, None, is_one=True)
        return cls(sources, make, lambda hosts: None)


class ModelList:
    """The list of models. Clients can replace the whole list, or add a model with a download."""

    def __init__(self, changes: ModelChanges, fleet: Fleet) -> None:
        sources, self._make, self._renew = changes
        self._sources = sources
        self.pulls = sources.pulls
        self._fleet = fleet
        self._was_put = sources.file is not None and sources.file.exists()
        self._file = StateFile(sources.file) if sources.file else None
        # Held while a document is saved and applied. Otherwise two concurrent calls could save
        # one document and apply the other document.
        self._putting = asyncio.Lock()
        self._checked_at = 0.0
        # Held while files are deleted, so that no download of the same files can start.
        self._deleting = asyncio.Lock()

    async def run(self) -> None:
        """Run the downloads until cancelled.

        First, delete the files of models that were deleted during an earlier server process.
        """
        for model in self.pulls.deleted:
            self._fleet.when_removed(model, partial(self._delete_files, model))
        await self.pulls.run(self._apply)

    def document(self) -> dict[str, Any]:
        if self._sources.is_one:
            raise RequestError("unsupported_operation", _ONE_MODEL)
        return to_document(self._sources.configs)

    async def put(self, document: Any) -> None:
        """Replace the list of models; an invalid list raises RequestError and changes nothing."""
        self.document()
        configs = read_document(document, with_unique_names)
        not_synced: NotSyncedError | None = None
        async with self._putting:
            if self._file is not None:
                content = msgspec.json.format(msgspec.json.encode(to_document(configs)))
                try:
                    await self._file.keep(content)
                except NotSyncedError as error:
                    not_synced = error
                except OSError as error:
                    message = (
                        f"The document could not be saved ({error.strerror}); nothing was changed."
                    )
                    raise RequestError("internal_error", message) from None
            self._was_put = True
            self._sources.configs = configs
            self._apply()
        if not_synced is not None:
            message = "The document is in effect, but a power failure may undo the change "
            message += f"({not_synced.strerror}); send the document again."
            raise RequestError("internal_error", message)

    async def reread(self) -> None:
        """Read the folder of models again; add new models and remove missing models.

        Does nothing if a client has replaced the list, or within a second of the last check.
        """
        if self._was_put or time.monotonic() < self._checked_at + _CHECK_INTERVAL_S:
            return
        self._checked_at = time.monotonic()
        configs = await asyncio.to_thread(self._sources.reread)
        if configs != self._sources.configs and not self._was_put:
            self._sources.configs = configs
            self._apply()

    async def pull(self, model: str) -> Pull | None:
        """Start or continue a download; return None if the server already serves the model."""
        if self._fleet.hosts.find(model) is not None:
            return None
        async with self._deleting:
            pull = self.pulls.begin(model)
        return await pull.wait_until_started()

    async def delete(self, model: str) -> None:
        """Stop serving and downloading a model. Its files are deleted once its streams have ended.

        Raises RequestError if the model does not exist or was not added by POST /models.
        """
        if self.pulls.find(model) is None:
            # `get` raises RequestError if the model does not exist.
            self._fleet.hosts.get(model)
            raise RequestError("unsupported_operation", _NOT_PULLED, "model")
        if await self.pulls.forget(model):
            self._apply()
        self._fleet.when_removed(model, partial(self._delete_files, model))

    async def _delete_files(self, model: str) -> None:
        async with self._deleting:
            configs = self._sources.configs
            wanted = [it.model for it in configs] + [it.model for it in self.pulls.all()]
            wanted += [it.draft for it in configs if it.draft is not None]
            if _repo_of(model) not in map(_repo_of, wanted):
                await asyncio.to_thread(discard, model)
            await self.pulls.note_deletion(model)

    def _apply(self) -> None:
        hosts = tuple(self._make(config) for config in self._sources.all())
        self._renew(hosts)
        self._fleet.become(hosts)
        for host in self._fleet.hosts.all():
            if host.known is None and self.pulls.find(host.config.model) is not None:
                self._fleet.fetch(host)


def kept(file: Path) -> Configs | None:
    """Return the models of the saved document, or None if there is no readable document."""
    return read_kept(file, _decode, _MAX_FILE_BYTES)


def _decode(content: bytes) -> Configs:
    return read_document(msgspec.json.decode(content), with_unique_names)
