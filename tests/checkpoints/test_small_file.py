"""Model folders in which a small file is replaced by a pipe, a device or the like."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.fleet.model_host import ModelHost
from headrace.fleet.served_model import ServedModel
from headrace.metrics.metrics import Metrics
from headrace_common.checkpoints.find import may_have_images, place_of
from headrace_common.checkpoints.small_file import read_small
from headrace_common.checkpoints.spec import read_spec
from headrace_common.config.settings import ModelConfig
from headrace_common.errors import ModelError

CONFIG = {"architectures": ["LlamaForCausalLM"], "vocab_size": 8}


def make_long(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a hole, which takes no room


ODD: dict[str, Callable[[Path], object]] = {
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "a file that cannot be read": lambda path: path.symlink_to("/proc/self/mem"),
    "endless zeros": lambda path: path.symlink_to("/dev/zero"),
    "a broken link": lambda path: path.symlink_to("/nowhere/at/all"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a file of a tebibyte": make_long,
}


@pytest.mark.parametrize("what", ODD)
def test_what_is_no_small_file_is_refused_without_waiting(what: str, tmp_path: Path) -> None:
    ODD[what](tmp_path / "config.json")
    with pytest.raises(OSError):
        read_small(tmp_path / "config.json")
    with pytest.raises(ModelError):
        read_spec(tmp_path)
    assert may_have_images(str(tmp_path)) is False


def write_index(folder: Path, name: str) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    index = json.dumps({"weight_map": {"x": name}})
    (folder / "model.safetensors.index.json").write_text(index)


@pytest.mark.parametrize("name", ["x" * 5_000, "é" * 200, "a\0b", "a\nb"])
def test_a_shard_that_no_disk_can_store_is_missing(name: str, tmp_path: Path) -> None:
    write_index(tmp_path, name)
    with pytest.raises(ModelError, match="lacks the shard") as failed:
        read_spec(tmp_path)
    assert len(str(failed.value)) < 1_500 and str(failed.value).isprintable()


def test_a_shard_named_by_half_a_surrogate_pair_makes_the_index_no_json(tmp_path: Path) -> None:
    write_index(tmp_path, "\ud800")
    with pytest.raises(ModelError, match="is not JSON"):
        read_spec(tmp_path)


@pytest.mark.parametrize("to", ["no such file", "model.gguf"])
def test_a_gguf_file_that_is_a_broken_link_cannot_be_read(to: str, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").symlink_to(to)
    with pytest.raises(ModelError, match=r"^model\.gguf cannot be read \(") as failed:
        ServedModel(ModelConfig(model=str(tmp_path)))
    assert failed.value.code == "model_corrupt" and str(tmp_path) not in str(failed.value)


@pytest.mark.parametrize("model", ["x" * 5_000, "o/" + "x" * 5_000, "~nosuchuser/x", "a\0b"])
def test_a_path_that_cannot_be_is_a_model_that_is_missing(model: str) -> None:
    place_of(model)
    host = ModelHost(ModelConfig(model=model), lambda _: None, Metrics())  # type: ignore[arg-type, return-value]
    assert not host.is_here and host.num_bytes == 0
    assert isinstance(host.may_see_images, bool)
