"""Files of sentence-transformers that a folder's maker damaged, by accident or not."""

import json
import os
import shutil
from pathlib import Path

import pytest

from headrace_common.checkpoints.find import MINI, find_model
from headrace_common.checkpoints.sentence_transformers import read_sentences
from headrace_common.checkpoints.spec import read_spec
from headrace_common.errors import ModelError


def write_modules(folder: Path, path: str) -> Path:
    shutil.copytree(find_model(MINI), folder, dirs_exist_ok=True)
    modules = [
        {"idx": n, "name": str(n), "path": path * n, "type": f"sentence_transformers.{kind}"}
        for n, kind in enumerate(("Transformer", "Pooling"))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder


def test_a_module_whose_path_no_disk_can_store_is_missed(tmp_path: Path) -> None:
    folder = write_modules(tmp_path, 300 * "x")
    with pytest.raises(ModelError, match=r"which its modules\.json asks for"):
        read_sentences(read_spec(folder))


@pytest.mark.timeout(30)
def test_a_pipe_in_the_place_of_a_module_is_not_waited_for(tmp_path: Path) -> None:
    folder = write_modules(tmp_path, "1_Pooling")
    (folder / "modules.json").unlink()
    os.mkfifo(folder / "modules.json")
    read_sentences(read_spec(folder))


def test_a_module_that_cannot_be_read_is_damaged(tmp_path: Path) -> None:
    folder = write_modules(tmp_path, "1_Pooling")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").symlink_to("/proc/self/mem")
    with pytest.raises(ModelError, match="is damaged"):
        read_sentences(read_spec(folder))
