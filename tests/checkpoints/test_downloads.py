"""Models that were downloaded, as the command line lists and removes them."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from huggingface_hub import constants

from headrace.cli.models import models
from headrace_common.checkpoints.package_index import PACKAGED
from headrace_common.errors import ModelError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One model of each kind, and a data set."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    found = PACKAGED["smollm2"]
    packaged = tmp_path / f"headrace/packages/{found.package}-{found.version}"
    packaged.mkdir(parents=True)
    (packaged / Path(found.path).name).write_bytes(bytes(3 << 20))
    for repo in ("models--owner--small", "datasets--owner--words"):
        snapshot = tmp_path / "hub" / repo / "snapshots" / COMMIT
        snapshot.mkdir(parents=True)
        (snapshot / "model.safetensors").write_bytes(bytes(2 << 20))
    return tmp_path


def said(*words: str) -> Result:
    return CliRunner().invoke(models, words)


def names() -> list[str]:
    return sorted(line.split()[0] for line in said("downloaded").output.splitlines()[1:])


def test_models_are_listed_with_sizes_and_days(caches: Path) -> None:
    header, *rows = said("downloaded").output.splitlines()
    assert header.split() == ["name", "size", "since", "folder"]
    sizes = {row.split()[0]: row.split()[1:3] for row in rows}
    assert sizes == {"smollm2": ["3", "MiB"], "owner/small": ["2", "MiB"]}
    assert all(str(caches) in row for row in rows)


@pytest.mark.parametrize(("name", "size"), [("smollm2", 3), ("owner/small", 2)])
def test_one_is_removed_and_the_other_stays(name: str, size: int) -> None:
    before = names()
    assert said("rm", name).output == f"Removed {name}, {size} MiB.\n"
    assert names() == [other for other in before if other != name]


def test_a_short_name_removes_its_repository(caches: Path) -> None:
    hub = caches / "hub"
    (hub / "models--owner--small").rename(hub / "models--Qwen--Qwen3-4B-GGUF")
    assert said("rm", "qwen3-4b").output == "Removed Qwen/Qwen3-4B-GGUF, 2 MiB.\n"


def test_a_quantization_takes_no_other_with_it(caches: Path) -> None:
    snapshot = caches / "hub" / "models--owner--small" / "snapshots" / COMMIT
    (snapshot / "small-Q8_0.gguf").touch()
    (snapshot / "small-Q4_0.gguf").touch()
    refused = said("rm", "owner/small:Q8_0").exception
    assert isinstance(refused, ModelError) and "Q4_0, Q8_0" in str(refused)
    (snapshot / "small-Q4_0.gguf").unlink()
    assert said("rm", "owner/small:Q8_0").output == "Removed owner/small, 2 MiB.\n"


@pytest.mark.parametrize("name", ["owner/words", "..", "headrace-mini", "smollm"])
def test_nothing_else_is_removed(name: str, caches: Path) -> None:
    result = said("rm", name)
    assert isinstance(result.exception, ModelError) and repr(name) in str(result.exception)
    assert names() == ["owner/small", "smollm2"]
    assert (caches / "hub/datasets--owner--words").is_dir()


def test_without_caches_the_list_is_empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "none"))
    assert names() == []
