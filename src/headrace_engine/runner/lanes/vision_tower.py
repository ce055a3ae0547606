"""The vision side of our own models, by transformers' module, block by block."""

from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from headrace_common.checkpoints.headers import VISION, read_headers
from headrace_common.checkpoints.spec import ModelSpec
from headrace_common.errors import ModelError
from headrace_engine.runner.lanes.foreign import until_called


@dataclass(slots=True)
class TowerRun:
    """An image between two blocks."""

    hidden: Tensor  # [patches, hidden]
    arguments: list[Any]  # of a block, after the hidden states
    keywords: dict[str, Any]


class VisionTower:
    """Blocks, and behind them one that merges patches: as many units as that."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        config = AutoConfig.from_pretrained(spec.folder, trust_remote_code=False).vision_config
        with torch.device("meta"):
            tower: Any = AutoModel.from_config(config, attn_implementation="sdpa")
        tower.rotary_pos_emb = type(tower.rotary_pos_emb)(config)  # a table that no file holds
        _load(tower, spec, dtype)
        self.module = tower.to(device).eval()
        self.num_units = len(tower.blocks) + 1
        self._device, self._dtype = device, dtype

    def begin(self, tensors: dict[str, Tensor]) -> TowerRun:
        """Patches and their places, as the processor made them."""
        pixels = tensors["pixel_values"].to(self._device, self._dtype)
        grid = tensors["image_grid_thw"].to(self._device)
        (hidden, *arguments), keywords = until_called(
            self.module.blocks[0], lambda: self.module(pixels, grid_thw=grid)
        )
        return TowerRun(hidden, arguments, keywords)

    def advance(self, run: TowerRun, start: int, end: int) -> Tensor | None:
        """Units [start, end); rows [placeholders, hidden] behind the last."""
        for block in self.module.blocks[start:end]:
            run.hidden = block(run.hidden, *run.arguments, **run.keywords)
        if end < self.num_units:
            return None
        rows: Tensor = self.module.merger(run.hidden)
        return rows


def _load(tower: nn.Module, spec: ModelSpec, dtype: torch.dtype) -> None:
    """Gives every parameter its values; ModelError names a tensor that does not fit."""
    headers = {
        name.removeprefix(VISION): header
        for name, header in read_headers(spec).items()
        if name.startswith(VISION)
    }
    own = dict(tower.named_parameters())
    for name in sorted(headers.keys() ^ own.keys()):
        fault = "is missing" if name in own else "is unknown to the model"
        raise _corrupt(spec, name, fault)
    for file in sorted({header.file for header in headers.values()}):
        with safe_open(spec.folder / file, framework="pt") as tensors:
            for name, header in headers.items():
                if header.file != file:
                    continue
                if header.shape != tuple(own[name].shape):
                    raise _corrupt(spec, name, "has another shape than the model's")
                values = tensors.get_tensor(VISION + name).to(dtype)
                path, _, kind = name.rpartition(".")
                setattr(tower.get_submodule(path), kind, nn.Parameter(values, requires_grad=False))


def _corrupt(spec: ModelSpec, name: str, fault: str) -> ModelError:
    return ModelError(
        f"Tensor {VISION}{name} of {spec.name} {fault}; check config.json against the weights.",
        "model_corrupt",
    )
