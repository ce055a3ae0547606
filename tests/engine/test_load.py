import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace_common.config.settings import ModelConfig, PrefixCacheConfig, SchedulerConfig
from headrace_common.errors import ModelError
from headrace_common.layout import MemoryLayout
from headrace_common.messages import Ready
from headrace_engine.load import load, max_guess
from tools.harness.tiny_models import make_tiny_model


@pytest.mark.parametrize("lane", ["native-text", "generic-text"])
def test_an_engine_has_measured_steps_when_it_starts(lane: str, tmp_path: Path) -> None:
    config = ModelConfig(model=str(make_tiny_model(tmp_path)), device="cpu", threads=1, lane=lane)
    for _ in range(3):  # real times: a neighbour may slow down one step of a few milliseconds
        model = load(config)[1]._budget.model
        assert model.is_measured and model.largest_measured == 64
        if model.coefficients.cost(0, 64) > model.coefficients.cost(0, 1) > 0:
            return
    pytest.fail("64 tokens never cost more than one")


def test_a_model_with_a_short_context_is_timed_within_it(tmp_path: Path) -> None:
    config = ModelConfig(model=str(make_tiny_model(tmp_path)), device="cpu", max_model_len=20)
    assert load(config)[1]._budget.model.largest_measured == 16


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, 8),
        ({"layout": MemoryLayout(num_slots=4, num_snapshots=8)}, 8),
        ({"kernels": "plain"}, 0),
        ({"dtype": "float32"}, 0),
        ({"dtype": "float32", "quantize": "int8"}, 8),
        ({"layout": MemoryLayout(num_blocks=9, num_slots=2)}, 0),
        ({"tasks": ("embed",)}, 0),
    ],
)
def test_guesses_are_on_only_if_they_do_not_change_the_text(
    changed: dict[str, Any], expected: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    ready = msgspec.structs.replace(
        Ready(
            "native-text", "cpu", "bfloat16", 9, 99, 4, 5, 6, MemoryLayout(), "f", kernels="avx2"
        ),
        **changed,
    )
    assert max_guess(SchedulerConfig(guess="auto"), ready) == expected
    assert max_guess(SchedulerConfig(guess="off"), ready) == 0
    if expected:
        assert max_guess(SchedulerConfig(guess=3), ready) == 3
    elif "generate" in ready.tasks:
        assert "Speculative decoding (--guess) is off" in caplog.text
        with pytest.raises(
            ModelError, match=r"--guess 3 is not possible: .* Use --guess auto or --guess off"
        ):
            max_guess(SchedulerConfig(guess=3), ready)


def test_an_unusable_default_prefix_folder_does_not_stop_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    model = str(make_tiny_model(tmp_path / "tiny"))
    config = ModelConfig(model=model, device="cpu", threads=1, kernels="plain")
    for folder in ("auto", "none", ""):
        prefix_cache = PrefixCacheConfig(prefix_cache_dir=folder)
        with caplog.at_level("INFO"):
            assert load(msgspec.structs.replace(config, prefix_cache=prefix_cache)).prefixes is None
    assert caplog.text.count("Cached prefixes are not stored: [Errno 20]") == 1
    named = PrefixCacheConfig(prefix_cache_dir=str(tmp_path / "file" / "mine"))
    with pytest.raises(
        ModelError, match=r"--prefix-cache-dir: .* cannot be used \(Not a directory"
    ):
        load(msgspec.structs.replace(config, prefix_cache=named))


def test_rewritten_weights_share_no_prefixes_with_the_old_ones(tmp_path: Path) -> None:
    """The fingerprint samples the files, so it may miss a changed tensor."""
    model, disk = make_tiny_model(tmp_path / "tiny"), tmp_path / "disk"
    config = ModelConfig(
        model=str(model),
        device="cpu",
        threads=1,
        kernels="plain",
        prefix_cache=PrefixCacheConfig(prefix_cache_dir=str(disk)),
    )
    for num_folders, changed_at in ((1, None), (1, 1e9), (2, None)):
        assert load(config).prefixes is not None
        assert len(list(disk.iterdir())) == num_folders
        if changed_at is not None:
            os.utime(model / "model.safetensors", (changed_at, changed_at))
