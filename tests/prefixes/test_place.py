"""Tests the size of the default folder, and on which file systems it is not used."""

import logging
from pathlib import Path

import pytest

from headrace_common.config.settings import PrefixCacheConfig
from headrace_engine.memory.disk import DiskPrefixes
from headrace_engine.prefixes import place
from headrace_engine.prefixes.folder import make_own
from headrace_engine.prefixes.keeper import DiskSite, PrefixKeeper
from headrace_engine.prefixes.place import objection, size_limit
from tests.prefixes.builders import BLOCK, make_folder, make_segment, numbers_of
from tools.harness.eventually import eventually

GIB = 1 << 30


def test_the_default_folder_may_use_a_tenth_of_the_free_space() -> None:
    assert size_limit(True, None, 40 * GIB, 0) == 4 * GIB
    assert size_limit(True, None, 36 * GIB, 4 * GIB) == 4 * GIB, "its own files count as free space"
    assert size_limit(True, None, 1000 * GIB, 0) == 10 * GIB
    assert size_limit(True, None, 5 * GIB - 1000, 0) == 0
    assert size_limit(True, 3 * GIB, GIB, 0) == 3 * GIB, "the user's setting"
    assert size_limit(False, None, GIB, 0) == 20 * GIB


def test_file_systems_in_memory_or_on_networks_are_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert objection(Path("/dev/shm/headrace/prefixes")) == "is in memory, not on a disk"
    monkeypatch.setattr(place, "kind_of", lambda path: "nfs4")
    assert objection(Path("/home/me/.cache/headrace/prefixes")) == "is on a network file system"


def test_without_free_space_stored_prefixes_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(place, "_LEAST_BYTES", 1 << 60)
    folder, run = make_folder(tmp_path), make_segment()
    folder.write(run, numbers_of(run))
    config = PrefixCacheConfig(prefix_cache_dir="auto")
    site = DiskSite(folder, config, DiskPrefixes(BLOCK, 2, 8), False)
    with caplog.at_level(logging.INFO):
        keeper = PrefixKeeper(site, None, None)  # type: ignore[arg-type]
        keeper.start(lambda news: None)
        eventually(lambda: not folder.stored())
        keeper.close()
    assert sum("are not stored while the disk" in line for line in caplog.messages) == 1


def test_other_users_cannot_read_an_existing_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").touch()
    tmp_path.chmod(0o777)
    make_own(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr("os.getuid", lambda: -2)
    with pytest.raises(PermissionError, match="another user"):
        make_own(tmp_path)
