"""A run in which the server has several models, and operators change them."""

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

from detangle import choice, randint
from huggingface_hub import constants

from headrace.fleet.fleet import pinned_model
from headrace.fleet.served_model import ServedModel
from headrace.text.model_names import with_unique_names
from headrace_common.config.document import read_document, to_document
from headrace_common.config.settings import (
    BatchConfig,
    HttpConfig,
    LoadingConfig,
    ServerConfig,
    StreamConfig,
)
from stress.simulated_server.downloads import HUB_MODELS, NUM_PIECES
from stress.simulated_server.operators import ADMIN_KEY, Asked, call_until_answered
from stress.simulated_server.processes import SimChild
from stress.simulated_server.requests import MODEL
from stress.simulated_server.server import SimServer
from stress.simulated_server.world import World

NAMES = ("a", "b", "c", "d")
KEYS = ("key-1", "key-2", "key-3")
CACHE_BYTES = 4 << 20
MEMORY_BYTES = 24_000_000
"""Enough for three engines that were never loaded. An engine that was loaded has a known size."""
ENGINE_BYTES = CACHE_BYTES + 4000
QUOTA_BYTES = 1000
"""The bytes that the files of one key may have."""
SETTLED_S = 1300.0
"""The longest time without an operator until nothing changes. A download may hang for 600 s."""


class FleetWorld(World):
    """A world with several models. Operators record in `asked` what they asked for."""

    def __init__(self, folder: Path, model: ServedModel) -> None:
        self.keys: tuple[str, ...] = choice(((), KEYS))
        self.key_file = folder / "keys"
        self.write_keys(self.keys)
        self.asked = Asked()
        self.is_stopping = False
        super().__init__(folder, model)
        # The server deletes models here.
        constants.HF_HUB_CACHE = str(self.machine.hub.folder)
        # The ids of the streams that each key has started.
        self.streams: dict[str, list[str]] = {}
        # When a request was sent and answered, for each key and server process.
        self.accepted: dict[tuple[str, str], list[tuple[float, float]]] = {}
        # The vectors that the server returned, by input.
        self.vectors: dict[str, list[float]] = {}

    def write_keys(self, keys: tuple[str, ...]) -> None:
        self.key_file.write_text("".join(f"name-{key}:{key}\n" for key in keys))

    def tables(self) -> list[dict[str, Any]]:
        """Choose models for a document. The first model is in all documents."""
        names = [name for name in NAMES if name == NAMES[0] or randint(0, 3)]
        return [self._table(name) for name in names]

    def _table(self, name: str) -> dict[str, Any]:
        table = {
            "model": MODEL,
            "served_model_name": [name],
            "kv_cache_memory_bytes": CACHE_BYTES,
        }
        replicas = choice((1, 1, 2, 3))
        fewest = choice((None, None, 1, 0))
        if replicas > 1:
            table["replicas"] = replicas
        return table if fewest is None else table | {"min_replicas": fewest}

    def _config(self) -> ServerConfig:
        tables = self.tables()
        if not randint(0, 7):
            tables = tables[:1]
        streams = StreamConfig(
            linger_s=choice((0.0, 10.0)),
            drain_s=choice((0.0, 2.0, 30.0)),
            max_num_queued_reqs=choice((512, 2)),
            key_requests_per_minute=choice((None, None, 6, 30)),
            key_tokens_per_minute=choice((None, None, 3000)),
        )
        loading = LoadingConfig(
            max_models=choice((None, 1, 2)),
            models_memory_bytes=choice((None, MEMORY_BYTES, 2 * MEMORY_BYTES)),
            idle_unload_s=choice((None, 3.0, 30.0)),
        )
        http = HttpConfig(
            api_key_file=str(self.key_file) if self.keys else None,
            admin_key=ADMIN_KEY if self.keys else None,
        )
        models = read_document({"models": tables}, with_unique_names)
        batches = BatchConfig(key_file_bytes=QUOTA_BYTES)
        return ServerConfig(
            models=models, streams=streams, loading=loading, http=http, batches=batches
        )

    def change_settings(self) -> None:
        """Give the next server process other settings."""
        self.machine.config = self._config()
        self.faults.note("operator: other settings")

    def served_names(self) -> tuple[str, ...]:
        """Return the models that the running server has; empty if no server runs."""
        server = self.server
        if not self.is_up or server is None:
            return ()
        return tuple(host.name for host in server.generation.fleet.hosts.all())

    def may_be_missing(self, name: str) -> bool:
        """Return whether some list of models in this run does not have this model."""
        return name != NAMES[0]

    def may_fail(self, code: str) -> bool:
        happened = self.faults.injected
        reasons: dict[str, tuple[str, ...]] = {
            "load_failed": (
                "engine: death while loading",
                "engine: cannot be started",
                "download: failure",
            ),
            "model_changed": ("operator: models replaced", "operator: other settings"),
            # The list of models cannot be saved.
            "internal_error": ("disk: single error",),
            "engine_failed": ("engine: cannot be started", "engine: killed from outside"),
        }
        return super().may_fail(code) or any(happened[it] for it in reasons.get(code, ()))

    def engine_starts(self, engine: SimChild) -> None:
        """Check that the running engines fit into the limits on models in memory."""
        server = self.server
        assert server is not None
        fleet, limits = server.generation.fleet, server.generation.fleet._config.loading
        if fleet.pinned is not None:
            return
        running = Counter(
            it.config.served_model_name[0] for it in server.engines() if it.has_started
        )
        assert len(running) <= (limits.max_models or 99), f"too many models: {running}"
        known = {host.name: host.config.replicas for host in fleet.roster.all()}
        # While an engine is replaced, there is one more.
        num_engines = sum(min(number, known.get(name, 99)) for name, number in running.items())
        most = limits.models_memory_bytes or 1 << 60
        assert num_engines * ENGINE_BYTES <= most, f"too little memory: {running}"
        self.counts["engines within the limits"] += 1

    async def _finish(self) -> None:
        server = self.server
        assert server is not None
        if self.is_stopping:
            await self.ended(server)
        if server.has_ended.is_set():
            server = self.machine.start()
        await server.accepts.wait()
        await self._check_document(server)
        await self._check_pulls(server)
        await self._check_unloading(server)
        self._check_quotas()
        await super()._finish()
        running = [it for it in self.machine.hub.running if it.is_running]
        assert not running, "downloads outlive the server"
        assert not server.engines(), "engines outlive the server"

    async def _check_document(self, server: SimServer) -> None:
        """Check that the server serves what the last operator has put."""
        if pinned_model(server.config) is not None:
            status, _ = await call_until_answered(self, "GET", "/manage/desired")
            assert status == 400, f"a list of models with status {status}"
            return
        _, shown = await call_until_answered(self, "GET", "/manage/desired")
        expected = [to_document(server.config.models)] if self.asked.has_no_document else []
        for tables in self.asked.documents:
            expected.append(to_document(read_document({"models": tables}, with_unique_names)))
        assert shown in expected, f"{shown} instead of {expected}"
        self.counts["lists of models"] += 1

    def check_downloads(self) -> None:
        """Check that a model whose download runs is shown as being downloaded."""
        server = self.server
        if server is None or not self.is_up:
            return
        for process in self.machine.hub.running:
            if process.is_running:
                pull = server.generation.desired.pulls.find(process.model)
                state = pull.state if pull is not None else "absent"
                assert state == "downloading", f"{process.model} is {state}, but a process runs"
        self.counts["looks at downloads"] += 1

    async def _check_pulls(self, server: SimServer) -> None:
        """Check the downloads, and that the files of deleted models are gone."""
        pulls, hub = server.generation.desired.pulls, self.machine.hub
        await self._until(
            lambda: not any(it.state == "downloading" for it in pulls.all()), "downloads end"
        )
        for model in HUB_MODELS:
            pull = pulls.find(model)
            state = pull.state if pull is not None else "absent"
            allowed = self.asked.pulls.get(model, {"absent"})
            if self.faults.injected["disk: single error"]:
                # The list of downloads could not be saved before the server ended.
                allowed = allowed | {"absent"}
            assert state in allowed, f"{model} is {state} instead of {allowed}"
            if state == "here":
                await self._until(
                    lambda one=model: hub.num_pieces(one) == NUM_PIECES,  # type: ignore[misc]
                    f"the files of {model} are here",
                )
            self.counts["downloads"] += 1
        for model in self.asked.deleted:
            repo = model.partition(":")[0]
            is_wanted = any(it.model.startswith(repo) for it in pulls.all())
            if is_wanted:
                continue
            if server is not self.asked.deleted[model]:
                # The server ended before it could delete the files.
                self.counts["deleted models that are left"] += hub.file(model).parent.exists()
            else:
                await self._until(
                    lambda one=model: not hub.file(one).parent.exists(),  # type: ignore[misc]
                    f"the files of {model} are deleted",
                )
                self.counts["deleted models"] += 1

    async def _check_unloading(self, server: SimServer) -> None:
        """Unload all models without streams, and check that their engines end."""
        fleet = server.generation.fleet
        await self._until(lambda: not len(server.generation.streams), "streams end")
        if fleet.pinned is not None:
            return
        for host in fleet.hosts.all():
            status, body = await call_until_answered(
                self, "POST", "/models/unload", {"model": host.name}
            )
            assert status == 200, f"{host.name} is not unloaded: {status} {body}"
        await self._until(lambda: not server.engines(), "engines of unloaded models end")
        self.counts["unloaded fleets"] += 1

    async def _until(self, is_so: Any, what: str) -> None:
        ends = time.monotonic() + SETTLED_S
        while not is_so():
            assert time.monotonic() < ends, f"not within {SETTLED_S:g} s: {what}"
            await asyncio.sleep(0.5)

    def _check_quotas(self) -> None:
        """Check that no key got more requests than its limit in any time."""
        for (key, name), spans in self.accepted.items():
            limit = self.asked.request_limits.get(name)
            if not limit:
                continue
            for first, _ in spans:
                ends = sorted(end for begin, end in spans if begin >= first)
                for number, end in enumerate(ends, 1):
                    most = limit * (1 + (end - first) / 60.0) + 1e-6
                    assert number <= most, f"{key}: {number} requests in {end - first:.1f} s"
            self.counts["keys within their limits"] += 1
