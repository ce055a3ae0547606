"""A model whose experts do not fit memory: they lie in a mapped file, and nothing else changes."""

from pathlib import Path

import msgspec
import pytest
import torch

from headrace_common.checkpoints.spec import read_spec
from headrace_common.config.settings import ModelConfig, SchedulerConfig
from headrace_common.errors import ModelError
from headrace_common.system.file_systems import kind_of
from headrace_engine.runner import mapped_file
from headrace_engine.runner.footprint import footprint
from headrace_engine.runner.load import load_runner
from tests.kernels.own_kernels import OWN_SETS, needs_own_kernels
from tools.harness.drive import random_prompt, row_logits
from tools.harness.tiny_models import make_tiny_model

PROMPT = random_prompt(60)
CONFIG = ModelConfig(
    device="cpu", threads=1, max_model_len=64, scheduler=SchedulerConfig(max_num_seqs=1)
)
pytestmark = needs_own_kernels


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(
        mapped_file, "kind_of", lambda path: "ext4"
    )  # also where tests run in memory
    sizes = {"num_experts": 16, "moe_intermediate_size": 256}
    dtype = torch.bfloat16
    return make_tiny_model(tmp_path / "tiny", "Qwen3MoeForCausalLM", dtype=dtype, **sizes)


def have(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr("headrace_engine.runner.load.free_bytes", lambda device: num_bytes)


@pytest.mark.parametrize("quantize", ["none", "int4"])
def test_experts_on_disk_compute_the_same_in_the_memory_that_was_worked_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch, quantize: str
) -> None:
    config = msgspec.structs.replace(CONFIG, quantize=quantize)
    whole, ready = load_runner(config, folder)
    assert ready.mapped_bytes == 0
    needed, least = (
        footprint(read_spec(folder), torch.bfloat16, OWN_SETS[0], quantize, is_mapped)  # type: ignore[arg-type]
        for is_mapped in (False, True)
    )
    assert least.peak < needed.peak // 2 and least.mapped > needed.held // 2
    have(monkeypatch, needed.peak - 1)
    mapped, ready = load_runner(config, folder)
    assert ready.mapped_bytes == least.mapped
    assert ready.weight_bytes == least.held
    assert torch.equal(row_logits(mapped, PROMPT), row_logits(whole, PROMPT))
    assert list(mapped_file.folder().iterdir()) == []  # its file has no name


def test_what_would_not_fit_beside_them_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have(monkeypatch, 100 << 10)
    with pytest.raises(ModelError, match="0 MiB are free; use a smaller model"):
        load_runner(CONFIG, folder)


def test_a_dense_model_is_refused_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = make_tiny_model(tmp_path / "dense", dtype=torch.bfloat16)
    have(monkeypatch, 100 << 10)
    with pytest.raises(ModelError, match="use a smaller model"):
        load_runner(CONFIG, dense)


def test_a_disk_without_room_or_in_memory_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = footprint(read_spec(folder), torch.bfloat16, OWN_SETS[0], "none")
    have(monkeypatch, needed.peak - 1)
    monkeypatch.setattr(mapped_file, "kind_of", lambda path: "tmpfs")
    with pytest.raises(ModelError, match=r"experts cannot be kept on disk: .* is in memory"):
        load_runner(CONFIG, folder)
    monkeypatch.undo()
    assert "MiB free for" in str(mapped_file.objection(1 << 60))


@pytest.mark.skipif(not Path("/dev/shm").is_mount(), reason="no file system in memory here")
def test_a_file_system_in_memory_is_known() -> None:
    assert kind_of(Path("/dev/shm/nothing")) == "tmpfs"
