"""Tests that a process with limits checks a model folder before the server reads it."""

import asyncio
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.fleet import model_check
from headrace.fleet.model_check import Checked, NotChecked, check_model
from headrace.fleet.model_host import ModelHost
from headrace.metrics.metrics import Metrics
from headrace_common.checkpoints.find import MINI, find_model
from headrace_common.config.settings import ModelConfig
from headrace_common.errors import ModelError

Spoil = Callable[[Path], None]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
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
def test_an_unreadable_folder_is_refused_with_a_short_message(folder: Path, spoil: Spoil) -> None:
    spoil(folder)
    with pytest.raises(ModelError) as refused:
        check_model(ModelConfig(model=str(folder)))
    assert str(refused.value).endswith((".", "chat-template.")) and len(str(refused.value)) < 400
    assert "\n" not in str(refused.value) and str(folder) not in str(refused.value)


def test_a_valid_model_is_accepted_and_its_weights_are_counted(folder: Path) -> None:
    assert check_model(ModelConfig(model=str(folder))) == (folder.resolve(), 1_599_392)


def test_weights_that_do_not_match_their_header_are_not_counted(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"more")
    assert check_model(ModelConfig(model=str(folder))) == (folder.resolve(), None)


def test_a_check_that_never_ends_is_killed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "tokenizer_config.json").unlink(missing_ok=True)
    os.mkfifo(folder / "tokenizer_config.json")
    monkeypatch.setattr(model_check, "_MAX_WALL_S", 5)
    with pytest.raises(ModelError):
        check_model(ModelConfig(model=str(folder)))


def counted(
    monkeypatch: pytest.MonkeyPatch, error: ModelError, folder: Path
) -> tuple[ModelHost, list[str]]:
    """Return a host whose checks fail with the error, and a list of the checks."""
    checks = []

    def fail(config: ModelConfig) -> Checked:
        checks.append(config.model)
        raise error

    monkeypatch.setattr(model_check, "check_model", fail)
    host = ModelHost(ModelConfig(model=str(folder)), lambda _: None, Metrics())  # type: ignore[arg-type,return-value]
    return host, checks


async def refused(host: ModelHost) -> ModelError:
    with pytest.raises(ModelError) as failed:
        await host.read()
    return failed.value


@pytest.mark.parametrize("code", ["load_failed", "model_corrupt", "tokenizer_invalid"])
async def test_an_unreadable_model_is_only_checked_again_once_its_files_change(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    host, checks = counted(monkeypatch, ModelError("It is damaged.", code), folder)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("[")
    errors = [await refused(host) for _ in range(3)]
    assert len(checks) == 1
    assert {(str(it), it.code) for it in errors} == {("It is damaged.", code)}
    assert len(set(map(id, errors))) == 3  # one that is raised again grows with each raise
    (folder / "1_Pooling" / "config.json").write_text("{}")
    await refused(host)
    assert len(checks) == 2


async def test_a_check_that_could_not_be_started_is_repeated(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, checks = counted(monkeypatch, NotChecked("No process.", "load_failed"), folder)
    for _ in range(2):
        await refused(host)
    assert len(checks) == 2


async def test_cancelled_requests_share_one_check_that_continues(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, checks = threading.Event(), []

    def check(config: ModelConfig) -> Checked:
        checks.append(config.model)
        may_go_on.wait(30)
        return Checked(folder, None)

    monkeypatch.setattr(model_check, "check_model", check)
    host = ModelHost(ModelConfig(model=str(folder)), lambda _: None, Metrics())  # type: ignore[arg-type,return-value]
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(host.read(), 0.01)
    may_go_on.set()
    await host.read()
    assert host.known is not None and len(checks) == 1


def test_a_checked_model_is_only_checked_again_once_its_files_change(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig(model=str(folder))
    checked = check_model(config)
    with monkeypatch.context() as without:
        without.setattr(model_check.sys, "executable", "/nowhere")
        assert check_model(config) == checked
        (folder / "tokenizer_config.json").write_text("{}")
        with pytest.raises(NotChecked):
            check_model(config)


def test_a_model_is_checked_again_once_the_conversion_of_gguf_files_changes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig(model=str(folder))
    check_model(config)
    monkeypatch.setattr(model_check.sys, "executable", "/nowhere")
    monkeypatch.setattr(model_check, "conversion", lambda: b"another")
    with pytest.raises(NotChecked):
        check_model(config)


def test_the_number_of_remembered_checks_is_bounded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(model_check, "_MAX_REMEMBERED", 2)
    for nice in range(4):
        check_model(ModelConfig(model=str(folder), nice=nice))
    assert len(list((tmp_path / "cache" / "headrace" / "checked").iterdir())) == 2
