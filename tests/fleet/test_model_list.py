"""The models that a server should have, over a fleet that has none."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.fleet import model_list
from headrace.fleet.model_host import ModelHost
from headrace.fleet.model_list import ModelChanges, ModelList, ModelSources, kept
from headrace.fleet.pulls import Pulls, StoredPull
from headrace.text.model_names import Models
from headrace_common.config.settings import ModelConfig


class NoFleet:
    """Nothing runs of any model."""

    def __init__(self, config: ModelConfig | None = None) -> None:
        pass

    def when_removed(self, name: str, then: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.then = then()

    def become(self, hosts: object) -> None:
        pass

    @property
    def hosts(self) -> Models[ModelHost]:
        return Models(())


@pytest.mark.parametrize(
    ("flag", "removed"),
    [("owner/other", ["owner/name:Q4_0"]), ("owner/name:Q8_0", []), ("owner/name", [])],
)
async def test_a_deleted_models_files_stay_if_a_model_of_the_flags_lies_among_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str, removed: list[str]
) -> None:
    discarded: list[str] = []
    monkeypatch.setattr(model_list, "discard", discarded.append)
    kept = tmp_path / "pulled.json"
    kept.write_bytes(msgspec.json.encode([StoredPull("owner/name:Q4_0", "stopped")]))
    configs = (ModelConfig(model=flag),)
    sources = ModelSources(configs, Pulls(kept), lambda: configs, None, False)
    fleet = NoFleet()
    desired = ModelList(ModelChanges(sources, NoFleet, len), fleet)  # type: ignore[arg-type]
    await desired.delete("owner/name:Q4_0")
    await fleet.then
    assert discarded == removed


def test_a_pulled_model_has_the_flags_of_all_but_no_adapter_of_another(tmp_path: Path) -> None:
    kept = tmp_path / "pulled.json"
    kept.write_bytes(msgspec.json.encode([StoredPull("owner/name", "here")]))
    configs = (ModelConfig(model="./base", threads=1, adapter=("sql=./sql",)),)
    pulled = ModelSources(configs, Pulls(kept), lambda: configs, None, False).all()[1]
    assert (pulled.threads, pulled.adapter) == (1, ())


async def test_of_documents_that_are_put_at_once_the_one_that_is_kept_is_served(
    tmp_path: Path,
) -> None:
    file = tmp_path / "desired.json"
    sources = ModelSources((), Pulls(None), tuple, file, False)
    desired = ModelList(ModelChanges(sources, NoFleet, len), NoFleet())  # type: ignore[arg-type]
    documents = [{"models": [{"model": f"{i} {j}"} for j in range(1 + i % 7)]} for i in range(40)]
    await asyncio.gather(*map(desired.put, documents))
    assert sources.configs == kept(file)
