import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace_common.checkpoints.spec import read_spec
from headrace_engine.runner.lanes.foreign import Signature, load_pretrained, tensor_bytes
from tools.harness.tiny_models import make_tiny_model

OFFERED = {"input_ids": 1, "position_ids": 2}


def test_only_accepted_arguments_are_passed() -> None:
    def forward(input_ids: int, use_cache: bool = True) -> None: ...

    assert Signature.of(forward).accepted(OFFERED) == {"input_ids": 1}


def test_a_function_that_takes_any_keyword_gets_everything() -> None:
    def forward(input_ids: int, **others: Any) -> None: ...

    assert Signature.of(forward).accepted(OFFERED) == OFFERED


def test_a_signature_that_cannot_be_read_gets_everything(monkeypatch: Any) -> None:
    def unreadable(_: Any) -> None:
        raise ValueError

    monkeypatch.setattr(inspect, "signature", unreadable)
    assert Signature.of(print).accepted(OFFERED) == OFFERED


def test_tensors_are_counted_once_wherever_they_hang() -> None:
    x = torch.zeros(10)
    cache = SimpleNamespace(layers=[SimpleNamespace(keys=x, values=x[:2]), {"state": (x,)}])
    cache.itself = cache
    assert tensor_bytes(cache) == 40 + 8


def test_a_load_draws_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = make_tiny_model(tmp_path / "tiny", "GemmaForCausalLM")
    capfd.readouterr()
    load_pretrained(AutoModelForCausalLM, read_spec(folder), torch.float32)
    assert capfd.readouterr().err == ""
    AutoModelForCausalLM.from_pretrained(folder)  # whoever wants the bar keeps it
    assert "Loading weights" in capfd.readouterr().err
