"""Tests that a draft model is checked before weights are read, and that its memory counts."""

import shutil
from pathlib import Path

import msgspec
import pytest
import torch

from headrace_common.checkpoints.find import find_model
from headrace_common.checkpoints.spec import read_spec
from headrace_common.config.settings import ModelConfig, SchedulerConfig
from headrace_common.errors import ModelError
from headrace_engine.load import load
from headrace_engine.runner.footprint import Footprint
from headrace_engine.runner.load import LoadPlan, plan_load
from tests.kernels.own_kernels import needs_own_kernels
from tools.harness.tiny_models import add_mtp_layer, make_tiny_model

MINI = find_model("headrace-mini")
DRAFTING = ModelConfig(
    model=str(MINI), draft="headrace-mini", dtype="bfloat16", device="cpu", threads=1
)


def test_the_draft_model_must_be_on_this_machine() -> None:
    config = msgspec.structs.replace(DRAFTING, draft="/nowhere/at/all")
    with pytest.raises(ModelError, match="draft model '/nowhere/at/all' is not on this machine"):
        plan_load(config, MINI, checks_kernels=False)


def test_the_draft_model_needs_the_same_tokenizer(tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "tiny", head_dim=32)
    config = msgspec.structs.replace(DRAFTING, draft=str(other))
    with pytest.raises(ModelError, match="draft model tiny does not have the tokenizer of mini"):
        plan_load(config, MINI, checks_kernels=False)


def test_a_draft_model_with_states_is_refused(tmp_path: Path) -> None:
    size = read_spec(MINI).vocab_size
    hybrid = make_tiny_model(
        tmp_path / "hybrid",
        "Qwen3_5ForCausalLM",
        head_dim=32,
        pad_token_id=0,
        vocab_size=size,
        dtype=torch.bfloat16,
    )
    shutil.copy(MINI / "tokenizer.json", hybrid)
    config = msgspec.structs.replace(DRAFTING, draft=str(hybrid))
    with pytest.raises(ModelError, match="hybrid cannot be a draft model"):
        plan_load(config, MINI, checks_kernels=False)


def test_both_models_must_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = msgspec.structs.replace(DRAFTING, draft=None)
    weights = plan_load(alone, MINI, checks_kernels=False).weights

    # The cache and a step of the served model alone take less than 4 MiB.
    free = weights.peak + (4 << 20)
    monkeypatch.setattr("headrace_engine.runner.load.free_bytes", lambda device: free)
    plan_load(alone, MINI, checks_kernels=False)
    with pytest.raises(ModelError, match="MiB are free"):
        plan_load(DRAFTING, MINI, checks_kernels=False)


@needs_own_kernels
def test_both_caches_share_the_memory_of_the_cache() -> None:
    config = msgspec.structs.replace(DRAFTING, kv_cache_memory_bytes=1 << 24, max_model_len=1024)
    loaded = load(config)
    alone = load(msgspec.structs.replace(config, draft=None))
    assert loaded.ready.layout.num_blocks == alone.ready.layout.num_blocks // 2
    assert loaded.ready.draft is not None and alone.ready.draft is None
    assert loaded.ready.draft.weight_bytes == loaded.ready.weight_bytes
    assert loaded.runner.numbers is not None and alone.runner.numbers is not None
    assert loaded.runner.numbers.block_bytes == 2 * alone.runner.numbers.block_bytes
    assert loaded.scheduler._budget.draft.is_measured


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"scheduler": SchedulerConfig(guess="off")}, "--draft has no effect, because guessing"),
        ({"kernels": "plain"}, "--draft is not possible: torch rounds differently"),
    ],
)
def test_a_draft_model_without_guesses_is_an_error(
    changed: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load(msgspec.structs.replace(DRAFTING, **changed))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mtp") / "tiny"
    options = {"head_dim": 32, "dtype": torch.bfloat16, "pad_token_id": 0}
    return make_tiny_model(folder, "Qwen3_5ForCausalLM", **options)


@needs_own_kernels
def test_the_models_own_mtp_layer_is_used_unless_it_is_switched_off(
    hybrid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(hybrid, tmp_path / "tiny")
    add_mtp_layer(folder)

    def draft(**changed: object) -> LoadPlan | None:
        config = msgspec.structs.replace(
            DRAFTING, **{"model": str(folder), "draft": None} | changed
        )
        return plan_load(config, folder, checks_kernels=False).draft

    found = draft()
    assert found is not None and found == draft(draft="mtp")
    assert found.name == "MTP layer of tiny" and found.weights.held > 0
    # One attention layer: keys and values of 2 heads with 32 numbers of 2 bytes.
    assert found.position_bytes == 2 * 2 * 32 * 2
    assert draft(draft="off") is draft(scheduler=SchedulerConfig(guess="off")) is None
    assert draft(dtype="float32") is draft(kernels="plain") is None
    with pytest.raises(ModelError, match="--draft mtp needs --guess auto"):
        draft(draft="mtp", dtype="float32")

    def fits(*arguments: object) -> Footprint:
        if arguments[-1] is not None:
            raise ModelError("The weights take too much memory.")
        return Footprint(1, 1)

    monkeypatch.setattr("headrace_engine.runner.load._check_fits", fits)
    assert draft() is None
    with pytest.raises(ModelError, match="too much memory"):
        draft(draft="mtp")


@needs_own_kernels
def test_a_model_without_an_mtp_layer_cannot_be_asked_to_use_it(hybrid: Path) -> None:
    config = msgspec.structs.replace(DRAFTING, model=str(hybrid), draft="mtp")
    with pytest.raises(ModelError, match="tiny has no MTP layer that Headrace supports"):
        plan_load(config, hybrid, checks_kernels=False)
