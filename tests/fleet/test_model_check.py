"""Hostile model folders: a process with limits meets them first, and only that process suffers."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.checkpoints.find import MINI, find_model
from headrace.config.settings import ModelConfig
from headrace.core.errors import ModelError
from headrace.fleet import model_check
from headrace.fleet.model_check import CheckFailed, check_model
from headrace.fleet.model_host import ModelHost
from headrace.metrics.metrics import Metrics

Spoil = Callable[[Path], None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(find_model(MINI), tmp_path / "model"))


def changed(name: str, **fields: object) -> Spoil:
    def spoil(folder: Path) -> None:
        content = json.loads((folder / name).read_bytes())
        (folder / name).write_text(json.dumps(content | fields))

    return spoil


def written(name: str, text: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).write_text(text)

    return spoil


CATASTROPHE = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}
MULTIPLIED = {"type": "Replace", "pattern": {"String": "a"}, "content": 200 * "a"}
SPOILED: dict[str, Spoil] = {
    "a normalizer that makes the library panic": changed(
        "tokenizer.json", normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    ),
    "a decoder with a regular expression": changed("tokenizer.json", decoder=CATASTROPHE),
    "a decoder that multiplies text": changed(
        "tokenizer.json", decoder={"type": "Sequence", "decoders": 8 * [MULTIPLIED]}
    ),
    "a tokenizer that is none": written("tokenizer.json", "[" * 100_000),
    "a config that is none": written("config.json", "[" * 100_000),
    "a config of other types": changed("config.json", vocab_size="many", hidden_size=[]),
    "a template that is none": written("chat_template.jinja", "{{ " + 20_000 * "("),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_a_folder_that_cannot_be_read_is_refused_in_a_sentence(folder: Path, spoil: Spoil) -> None:
    spoil(folder)
    with pytest.raises(ModelError) as refused:
        check_model(ModelConfig(model=str(folder)))
    assert str(refused.value).endswith((".", "chat-template.")) and len(str(refused.value)) < 400
    assert "\n" not in str(refused.value) and str(folder) not in str(refused.value)


def test_a_sound_model_is_found_in_its_folder_and_its_weights_are_counted(folder: Path) -> None:
    assert check_model(ModelConfig(model=str(folder))) == (folder.resolve(), 1_599_392)


def test_weights_whose_header_is_damaged_are_not_counted(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"more")
    assert check_model(ModelConfig(model=str(folder))) == (folder.resolve(), None)


def test_reading_that_never_ends_is_killed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "tokenizer_config.json").unlink(missing_ok=True)
    os.mkfifo(folder / "tokenizer_config.json")
    monkeypatch.setattr(model_check, "_MAX_WALL_S", 5)
    with pytest.raises(ModelError):
        check_model(ModelConfig(model=str(folder)))


async def test_a_model_whose_reading_failed_is_read_again_once_its_files_change(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = ModelHost(ModelConfig(model=str(folder)), lambda _: None, Metrics())  # type: ignore[arg-type,return-value]
    num_checks = 0

    def fail(config: ModelConfig) -> Path:
        nonlocal num_checks
        num_checks += 1
        raise CheckFailed("It takes too long.", "load_failed")

    monkeypatch.setattr("headrace.fleet.model_host.check_model", fail)
    for _ in range(3):
        with pytest.raises(CheckFailed):
            await host.read()
    assert num_checks == 1
    (folder / "another").write_text("")
    with pytest.raises(CheckFailed):
        await host.read()
    assert num_checks == 2
