"""The model of `headrace serve` on a terminal if no model was named."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from huggingface_hub import constants

from headrace.cli.default_model import with_best_model
from headrace.cli.main import cli
from headrace_common.checkpoints.find import MINI
from headrace_common.checkpoints.package_index import PACKAGED
from headrace_common.config.settings import ModelConfig, ServerConfig
from tools.harness.gguf_files import to_gguf
from tools.harness.tiny_models import make_tiny_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf")
    folder = make_tiny_model(path / "tiny")
    return to_gguf(folder, path / "tiny.gguf", "Q8_0", chat_template=TEMPLATE)


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty caches."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("HEADRACE_MODEL", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def add(caches: Path, repo: str, name: str, content: bytes) -> None:
    """Put a file into the hub's cache, as a download does."""
    folder = caches / "hub" / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True, exist_ok=True)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / "main").write_text(COMMIT)
    (snapshot / name).write_bytes(content)


def add_smollm2(caches: Path, content: bytes) -> None:
    found = PACKAGED["smollm2"]
    file = caches / f"headrace/packages/{found.package}-{found.version}" / Path(found.path).name
    file.parent.mkdir(parents=True)
    file.write_bytes(content)


def chosen(capfd: pytest.CaptureFixture[str]) -> tuple[str, list[str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.stderr, "isatty", lambda: True)
        config = with_best_model(ServerConfig())
    lines = capfd.readouterr().err.replace("\r\x1b[K", "").splitlines()
    assert len(lines) <= 12 and all(len(line) <= 80 for line in lines)
    return config.models[0].model, lines


def test_without_a_model_the_test_model_is_served(capfd: pytest.CaptureFixture[str]) -> None:
    name, lines = chosen(capfd)
    assert name == MINI
    assert "found no usable chat model" in lines[0] and "serve smollm2 (93 MB" in lines[1]
    assert "qwen3-0.6b" in lines[2]


def test_a_cache_that_cannot_be_read_counts_as_empty(
    caches: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (caches / "hub").write_text("a file in place of the folder")
    assert chosen(capfd)[0] == MINI


def test_the_largest_usable_chat_model_is_served(
    caches: Path, gguf: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = gguf.read_bytes()
    add_smollm2(caches, whole)
    assert chosen(capfd)[0] == "smollm2"
    add(caches, "Qwen/Qwen3-4B-GGUF", "Qwen3-4B-Q4_K_M.gguf", whole + bytes(10))
    add(caches, "someone/Embedding-GGUF", "embedding-Q8_0.gguf", whole + bytes(20))
    add(caches, "someone/cut-GGUF", "cut-Q8_0.gguf", whole[: len(whole) // 2] + bytes(99))
    add(caches, "someone/part", "model.safetensors", bytes(len(whole) + 30))
    name, lines = chosen(capfd)
    assert name == "qwen3-4b"
    assert any("someone/part" in line and "(cannot be read)" in line for line in lines)
    assert "serving qwen3-4b;" in " ".join(lines) and "someone/Embedding" not in " ".join(lines)
    # A model on this machine is not offered for download.
    assert "qwen3-4b," not in " ".join(lines)


def test_damaged_and_too_large_models_are_passed_over(
    caches: Path,
    gguf: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = gguf.read_bytes()
    add_smollm2(caches, whole[:-1000])
    for number in range(5):
        add(caches, f"someone/part-{number}", "model.safetensors", bytes(len(whole)))
    assert chosen(capfd)[0] == MINI
    shutil.rmtree(caches / "hub")
    add(caches, "someone/large-GGUF", "large-Q8_0.gguf", whole)
    monkeypatch.setattr("headrace.cli.default_model.installed_bytes", lambda: 1_500_000_000)
    # The model and its server need 1.2 GB, which is more than three quarters of the memory.
    name, lines = chosen(capfd)
    assert name == MINI and "(too large)" in " ".join(lines)


@pytest.mark.parametrize("reason", ["no terminal", "named", "variable", "adapter"])
def test_nothing_changes_otherwise(
    reason: str,
    caches: Path,
    gguf: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    add_smollm2(caches, gguf.read_bytes())
    config = ServerConfig()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: reason != "no terminal")
    match reason:
        case "named":
            config = ServerConfig(models=(ModelConfig(model="./mine"),))
        case "variable":
            monkeypatch.setenv("HEADRACE_MODEL", MINI)
        case "adapter":
            config = ServerConfig(models=(ModelConfig(adapter=("a=./a",)),))
    assert with_best_model(config) is config
    assert capfd.readouterr().err == ""


def test_pull_and_ls_name_the_folder_of_a_gguf_file_alike(caches: Path, gguf: Path) -> None:
    add_smollm2(caches, gguf.read_bytes())
    pulled = CliRunner().invoke(cli, ["pull", "smollm2"], catch_exceptions=False)
    (listed,) = json.loads(CliRunner().invoke(cli, ["ls", "--json"]).stdout)
    assert pulled.stdout == f"{listed['folder']}\n"
    assert [file.suffix for file in Path(listed["folder"]).iterdir()] == [".gguf"]
