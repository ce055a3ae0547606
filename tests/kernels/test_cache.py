import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace_kernels import cache
from headrace_kernels.cache import KernelCache, digest, kept_code
from headrace_kernels.compiler import compiled


def kernel(a: Any) -> None:
    a[0] = 7


def made(folder: Path | None) -> Any:
    return compiled(kernel, folder)


def fresh_folder() -> Path | None:
    return cache.kernel_folder.__wrapped__()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache directory."""
    monkeypatch.setattr(cache.config, "CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path))
    return tmp_path / "home"


def test_stored_code_is_found_and_loaded(tmp_path: Path) -> None:
    assert not KernelCache(kernel, tmp_path).has_code
    made(tmp_path)
    (file,) = tmp_path.iterdir()
    before = file.read_bytes()
    made(tmp_path)
    assert file.read_bytes() == before


LOAD = """
import sys
from pathlib import Path
from tests.kernels.test_cache import made
assert made(Path(sys.argv[1])).address
print("numba.np.arrayobj" in sys.modules)
"""


def test_stored_code_is_loaded_without_importing_the_compiler(tmp_path: Path) -> None:
    made(tmp_path)
    command = [sys.executable, "-c", LOAD, str(tmp_path)]
    assert subprocess.check_output(command, text=True).strip() == "False"


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "gone"])
def test_damaged_code_is_compiled_again(damage: str, tmp_path: Path) -> None:
    made(tmp_path)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    bytes_of = {"cut": whole[:-9], "changed": whole[:-1] + bytes([whole[-1] ^ 1]), "empty": b""}
    file.unlink() if damage == "gone" else file.write_bytes(bytes_of[damage])
    assert not KernelCache(kernel, tmp_path).has_code
    assert made(tmp_path).address
    assert KernelCache(kernel, tmp_path).has_code


def test_a_kernel_is_compiled_although_it_cannot_be_stored(tmp_path: Path) -> None:
    assert made(None).address
    assert made(tmp_path / "a-folder-that-is-gone").address


def test_the_folder_belongs_to_the_user_and_not_to_the_owner_of_the_sources(home: Path) -> None:
    found = fresh_folder()
    assert found is not None and found.parent == home / "headrace_kernels"


def test_a_temporary_folder_is_used_if_the_home_is_read_only(home: Path, tmp_path: Path) -> None:
    home.write_text("a file")
    own = tmp_path / f"headrace_kernels-{os.getuid()}"
    found = fresh_folder()
    assert found is not None and found.parent == own
    own.chmod(0o777)  # anyone could put code there
    assert fresh_folder() is None


@pytest.mark.parametrize("changed", ["sources", "compiler", "processor"])
def test_each_source_compiler_and_processor_has_its_own_folder(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernel.py").write_text("x = 1")
    before = cache._key(tmp_path)
    assert cache._key(tmp_path) == before
    if changed == "sources":
        (tmp_path / "kernel.py").write_text("x = 2")
    elif changed == "compiler":
        monkeypatch.setattr(cache.numba, "__version__", "0.1")
    else:
        monkeypatch.setattr(cache.llvm, "get_host_cpu_features", lambda: {"sse2": True})
    assert cache._key(tmp_path) != before


def test_the_least_recently_used_folders_are_removed(home: Path) -> None:
    base = home / "headrace_kernels"
    for number in range(18):
        folder = base / f"old-{number:02}"
        folder.mkdir(parents=True)
        (folder / "code.kernel").write_bytes(bytes(100))
        os.utime(folder, (number, number))
    own = fresh_folder()
    assert own is not None and own.is_dir()
    assert sorted(it.name for it in base.iterdir() if it != own) == [
        f"old-{number:02}" for number in range(3, 18)
    ]


def test_the_stored_code_is_described(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fresh_folder()
    assert folder is not None
    monkeypatch.setattr(cache, "kernel_folder", lambda: folder)
    other = folder.parent / "other"
    other.mkdir()
    (other / "code.kernel").write_bytes(bytes(100))
    made(folder)
    size = next(folder.iterdir()).stat().st_size
    assert kept_code() == (folder, 1, size, 100)


def test_the_digest_covers_the_content_of_every_file(tmp_path: Path) -> None:
    def written(**files: str) -> str:
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text)
        return digest(tmp_path)

    first = written(kernel="import helper", helper="x = 1")
    assert written(helper="x = 2") != first
    assert written(helper="x = 1") == first
    assert written(another="") != first


def test_code_with_addresses_of_this_process_is_not_stored(tmp_path: Path) -> None:
    result = SimpleNamespace(library=SimpleNamespace(has_dynamic_globals=True))
    KernelCache(kernel, tmp_path).save_overload(None, result)
    assert list(tmp_path.iterdir()) == []
