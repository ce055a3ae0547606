"""Tests downloads of models in a separate process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from headrace.fleet.fetch_process import fetch_apart
from headrace_common.checkpoints import hub_files
from headrace_common.config.settings import ModelConfig
from headrace_common.errors import ModelError
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


def test_the_path_of_a_download_is_returned_by_the_other_process(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_hub({REPO: repo}) as hub:
        folder = fetched(hub, monkeypatch)
    assert (folder / "model.safetensors").read_bytes() == bytes(1000)


def test_a_model_that_is_not_on_the_hub_is_refused(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_hub({}) as hub, pytest.raises(ModelError, match="is not on the hub") as failed:
        fetched(hub, monkeypatch)
    assert failed.value.code == "model_not_found"


def test_a_local_model_starts_no_download_process(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere")
    assert fetch_apart(ModelConfig(model=str(repo)), lambda done, total: None) == str(repo)


@pytest.mark.parametrize("program", ["/nowhere", "/bin/false", "/bin/echo"])
def test_a_download_fails_if_its_process_does_not_report(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", program)
    with pytest.raises(ModelError, match="the downloaded part is kept") as failed:
        fetch_apart(ModelConfig(model=REPO), lambda done, total: None)
    assert failed.value.code == "download_failed"


def test_a_download_that_is_too_slow_fails_and_keeps_its_bytes(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_files, "_SLOW_S", 0.3)
    with small_hub({REPO: repo}) as hub:
        hub.drips = 20
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        file = hub_files.HubFile(
            f"{hub.url}/{REPO}/resolve/main/model.safetensors", repo / "blob", 1000
        )
        with pytest.raises(ModelError, match="less than 30 KiB") as failed:
            hub_files.fetch_file(file)
    assert failed.value.code == "download_failed" and 0 < file.num_here < 1000


def test_a_download_without_progress_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    told = '{"type":"Fetched","done":1,"total":9}'
    program.write_text(f"#!/bin/sh\nwhile echo '{told}'; do sleep 0.05; done\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr("headrace.fleet.fetch_process.MAX_SILENCE_S", 0.5)
    news: list[tuple[int, int]] = []
    with pytest.raises(ModelError, match="no progress") as failed:
        fetch_apart(ModelConfig(model=REPO), lambda *now: news.append(now))
    assert failed.value.code == "download_failed" and news == [(1, 9)]


def test_sigterm_ends_a_download_even_if_a_thread_waits_for_the_hub() -> None:
    code = (
        "import signal, threading, time\n"
        "from headrace_common.checkpoints import fetch\n"
        "threading.Thread(target=time.sleep, args=(100,)).start()\n"
        "signal.signal(signal.SIGTERM, fetch._end)\n"
        "print('begun', flush=True)\n"
        "time.sleep(100)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None and process.stdout.readline() == b"begun\n"
    process.terminate()
    process.wait(30)
