"""Tests the list of configured and downloaded models, over a fleet without models."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.fleet import atomic_file, model_list
from headrace.fleet.model_host import ModelHost
from headrace.fleet.model_list import ModelChanges, ModelList, ModelSources, kept
from headrace.fleet.pulls import Pulls, StoredPull
from headrace.text.model_names import Models
from headrace_common.config.settings import ModelConfig
from headrace_common.errors import RequestError


class NoFleet:
    """A fake fleet without models."""

    def __init__(self, config: ModelConfig | None = None) -> None:
        pass

    def when_removed(self, name: str, then: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.then = then()

    def become(self, hosts: object) -> None:
        pass

    @property
    def hosts(self) -> Models[ModelHost]:
        return Models(())


REPO = "unsloth/Qwen3-0.6B-GGUF"
"""The repository of the catalog's qwen3-0.6b."""


@pytest.mark.parametrize(
    ("config", "deleted", "is_removed"),
    [
        (ModelConfig(model="owner/other"), "owner/name:Q4_0", True),
        (ModelConfig(model="owner/name:Q8_0"), "owner/name:Q4_0", False),
        (ModelConfig(model="owner/name"), "owner/name:Q4_0", False),
        (ModelConfig(model=f"{REPO}:Q4_0"), "qwen3-0.6b", False),
        (ModelConfig(model="qwen3-0.6b"), f"{REPO}:Q4_0", False),
        (ModelConfig(model="owner/other", draft=f"{REPO}:Q8_0"), "qwen3-0.6b", False),
    ],
)
async def test_the_files_of_a_deleted_model_stay_if_a_configured_model_uses_them(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: ModelConfig,
    deleted: str,
    is_removed: bool,
) -> None:
    discarded: list[str] = []
    monkeypatch.setattr(model_list, "discard", discarded.append)
    kept = tmp_path / "pulled.json"
    kept.write_bytes(msgspec.json.encode([StoredPull(deleted, "stopped")]))
    configs = (config,)
    sources = ModelSources(configs, Pulls(kept), lambda: configs, None, False)
    fleet = NoFleet()
    desired = ModelList(ModelChanges(sources, NoFleet, len), fleet)  # type: ignore[arg-type]
    await desired.delete(deleted)
    await fleet.then
    assert discarded == [deleted] * is_removed


async def test_the_next_server_deletes_files_whose_deletion_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    discarded: list[str] = []
    monkeypatch.setattr(model_list, "discard", discarded.append)
    file = tmp_path / "pulled.json"
    file.write_bytes(msgspec.json.encode([StoredPull("owner/name", "here")]))

    def next_server() -> tuple[ModelList, NoFleet]:
        sources = ModelSources((), Pulls(file), tuple, None, False)
        fleet = NoFleet()
        return ModelList(ModelChanges(sources, NoFleet, len), fleet), fleet  # type: ignore[arg-type]

    first, ended = next_server()
    await first.delete("owner/name")
    # A stream of the model still ran when the server ended.
    ended.then.close()

    second, fleet = next_server()
    assert second.pulls.all() == () and second.pulls.find("owner/name") is None
    running = asyncio.create_task(second.run())
    await asyncio.sleep(0)
    await fleet.then
    assert discarded == ["owner/name"]
    running.cancel()
    assert next_server()[0].pulls.deleted == ()


def test_a_pulled_model_gets_the_common_flags_but_no_adapter(tmp_path: Path) -> None:
    kept = tmp_path / "pulled.json"
    kept.write_bytes(msgspec.json.encode([StoredPull("owner/name", "here")]))
    configs = (ModelConfig(model="./base", threads=1, adapter=("sql=./sql",)),)
    pulled = ModelSources(configs, Pulls(kept), lambda: configs, None, False).all()[1]
    assert (pulled.threads, pulled.adapter) == (1, ())


async def test_the_document_saved_last_by_concurrent_puts_is_served(
    tmp_path: Path,
) -> None:
    file = tmp_path / "desired.json"
    sources = ModelSources((), Pulls(None), tuple, file, False)
    desired = ModelList(ModelChanges(sources, NoFleet, len), NoFleet())  # type: ignore[arg-type]
    documents = [{"models": [{"model": f"{i} {j}"} for j in range(1 + i % 7)]} for i in range(40)]
    await asyncio.gather(*map(desired.put, documents))
    assert sources.configs == kept(file)


async def test_a_document_that_could_not_be_synced_takes_effect_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_to_sync(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic_file, "sync_folder", fail_to_sync)
    file = tmp_path / "models.json"
    sources = ModelSources((), Pulls(None), tuple, file, False)
    models = ModelList(ModelChanges(sources, NoFleet, len), NoFleet())  # type: ignore[arg-type]
    document = {"models": [{"model": "headrace-mini", "served_model_name": ["a"]}]}
    with pytest.raises(RequestError, match="in effect, but a power failure may undo"):
        await models.put(document)
    assert models.document() == document == msgspec.json.decode(file.read_bytes())
