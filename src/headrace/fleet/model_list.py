"""The models a server should have: kept over restarts, and carried out by its fleet."""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from headrace.config.document import read_document, to_document
from headrace.config.settings import ModelConfig
from headrace.core.errors import RequestError
from headrace.fleet.fleet import Fleet
from headrace.fleet.model_host import ModelHost
from headrace.fleet.model_names import told_apart

logger = logging.getLogger(__name__)

_CHECK_INTERVAL_S = 1.0
ONE_MODEL = (
    "This server was started with one model, which stays. Start it with --models-dir, [[models]] "
    "or --model NAME=PATH to change its models."
)
Configs = tuple[ModelConfig, ...]


class Desired:
    """One document, put as a whole. Until one was, the models are those of flags and folder.

    `make` makes a host, `renew` tells those who know models by their settings, `reread` reads the
    folder again. Without a file the document is lost with the server.
    """

    def __init__(
        self,
        configs: Configs,
        make: Callable[[ModelConfig], ModelHost],
        renew: Callable[[tuple[ModelHost, ...]], None],
        reread: Callable[[], Configs],
        file: Path | None,
    ) -> None:
        self._configs = configs
        self._make = make
        self._renew = renew
        self._reread = reread
        self._file = file
        self._was_put = file is not None and file.exists()
        self._checked_at = 0.0

    def document(self) -> dict[str, Any]:
        return to_document(self._configs)

    async def put(self, document: Any, fleet: Fleet) -> None:
        """RequestError, and nothing is changed, if the document is not fit."""
        configs = read_document(document, told_apart)
        if self._file is not None:
            try:
                await asyncio.to_thread(_keep, self._file, to_document(configs))
            except OSError as error:
                message = f"The document cannot be kept ({error.strerror}); nothing is changed."
                raise RequestError("internal_error", message) from None
        self._was_put = True
        self._apply(configs, fleet)

    async def reread(self, fleet: Fleet) -> None:
        """Takes up what has come into the folder of models, and drops what has left it."""
        if self._was_put or time.monotonic() < self._checked_at + _CHECK_INTERVAL_S:
            return
        self._checked_at = time.monotonic()
        configs = await asyncio.to_thread(self._reread)
        if configs != self._configs and not self._was_put:
            self._apply(configs, fleet)

    def _apply(self, configs: Configs, fleet: Fleet) -> None:
        self._configs = configs
        hosts = tuple(self._make(config) for config in told_apart(configs))
        self._renew(hosts)
        fleet.become(hosts)


def kept(file: Path) -> Configs | None:
    """The document that was put before; None if there is none that can be read."""
    try:
        return read_document(msgspec.json.decode(file.read_bytes()), told_apart)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RequestError) as error:
        logger.error("%s is passed over, since it cannot be read: %s", file, error)
        return None


def _keep(file: Path, document: dict[str, Any]) -> None:
    """Whole or not at all, whatever ends the server meanwhile."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # where streams lie elsewhere
    beside = file.with_suffix(".new")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as out:
        out.write(msgspec.json.format(msgspec.json.encode(document)))
        out.flush()
        os.fsync(out.fileno())
    beside.replace(file)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
