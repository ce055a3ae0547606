"""Tests which linear layers of each family receive the step and can have adapters."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headrace_common.checkpoints.spec import SEEING, read_spec
from headrace_engine.models.registry import FAMILIES, family
from headrace_engine.runner.adapters import ADAPTABLE
from tools.harness.tiny_models import make_tiny_model


class Recorder:
    """A fake step that computes only linear layers and records their names."""

    positions = torch.arange(3)

    def __init__(self) -> None:
        self.seen: list[nn.Module] = []

    def linear(self, layer: nn.Module, x: Tensor) -> Any:
        self.seen.append(layer)
        return layer(x)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, cap: Any = None) -> Tensor:
        return q.new_zeros(*q.shape[:2], v.shape[2])

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        return x.float()

    def delta_rule(self, layer: int, qkv: Any, decay: Tensor, beta: Tensor) -> Any:
        return qkv[2]


@pytest.mark.parametrize("architecture", [it for it in FAMILIES if it not in SEEING])
@torch.inference_mode()
def test_the_layers_that_can_be_adapted_see_the_step(architecture: str, tmp_path: Path) -> None:
    spec = read_spec(make_tiny_model(tmp_path / "model", architecture))
    make = family(architecture)
    model = make(make.read(spec.config))
    for parameter in model.parameters():
        parameter.normal_(std=0.1)
    step = Recorder()
    model(torch.tensor([1, 2, 3]), step)
    names = {layer: path for path, layer in model.named_modules()}
    adaptable = {path for path in names.values() if ADAPTABLE.fullmatch(path)}
    assert {names[layer] for layer in step.seen} == adaptable
    assert len(step.seen) == len(adaptable) > 0
