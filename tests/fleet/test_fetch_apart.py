"""Downloads of models by name, which a process of their own makes."""

import json
import sys
from pathlib import Path

import pytest

from headrace.config.settings import ModelConfig
from headrace.core.errors import ModelError
from headrace.fleet.fetch_apart import fetch_apart
from tests.checkpoints.small_hub import SmallHub, small_hub

REPO = "someone/tiny"


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    folder = tmp_path / "repo"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (folder / "model.safetensors").write_bytes(bytes(1000))
    return folder


def fetched(hub: SmallHub, monkeypatch: pytest.MonkeyPatch, model: str = REPO) -> Path:
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    return Path(fetch_apart(ModelConfig(model=model), lambda done, total: None))


def test_a_download_is_found_where_the_other_process_put_it(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_hub({REPO: repo}) as hub:
        folder = fetched(hub, monkeypatch)
    assert (folder / "model.safetensors").read_bytes() == bytes(1000)


def test_a_model_that_no_hub_has_is_refused_as_before(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_hub({}) as hub, pytest.raises(ModelError, match="is not on the hub") as failed:
        fetched(hub, monkeypatch)
    assert failed.value.code == "model_not_found"


def test_a_model_on_the_disk_starts_no_process(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere")
    assert fetch_apart(ModelConfig(model=str(repo)), lambda done, total: None) == str(repo)


@pytest.mark.parametrize("program", ["/nowhere", "/bin/false", "/bin/echo"])
def test_a_process_that_does_not_report_is_a_failed_download(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", program)
    with pytest.raises(ModelError, match="the downloaded part is kept") as failed:
        fetch_apart(ModelConfig(model=REPO), lambda done, total: None)
    assert failed.value.code == "download_failed"
