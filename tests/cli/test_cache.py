"""`headrace cache`: what is on disk, and that clearing leaves the rest."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from headrace.cli.cache import cache
from headrace_common.errors import ConfigError
from tests.prefixes.builders import make_folder, make_segment, numbers_of


def said(*words: str, variable: str | None = None) -> Result:
    return CliRunner().invoke(cache, words, env={"HEADRACE_PREFIX_CACHE_DIR": variable})


def test_it_shows_each_model_and_clears_all(tmp_path: Path) -> None:
    folder, run = make_folder(tmp_path), make_segment()
    folder.write(run, numbers_of(run, 3 << 20))
    (tmp_path / "mine").touch()
    shown = said("show", "--prefix-cache-dir", str(tmp_path)).output.splitlines()
    assert shown[0].split()[:5] == ["model", "lane", "dtype", "kernels", "files"]
    assert shown[1].split()[:7] == ["tiny", "native-text", "bfloat16", "avx2", "1", "3", "MiB"]
    assert said("clear", variable=str(tmp_path)).output == "Removed 1 files, 3 MiB.\n"
    assert said("show", variable=str(tmp_path)).output.splitlines()[1:] == []
    assert (tmp_path / "mine").exists()


def test_without_a_name_it_is_the_default_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert said("clear").output == "Removed 0 files, 0 MiB.\n"
    folder, run = make_folder(tmp_path / "headrace" / "prefixes"), make_segment()
    folder.write(run, numbers_of(run, 3 << 20))
    assert said("show").output.splitlines()[1].split()[0] == "tiny"
    assert said("clear", variable="none").output == "Removed 1 files, 3 MiB.\n"


def test_a_folder_that_is_named_must_be_there(tmp_path: Path) -> None:
    result = said("clear", variable=str(tmp_path / "nowhere"))
    assert isinstance(result.exception, ConfigError)
