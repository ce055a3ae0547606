"""Runs the vision encoders of native models block by block, with transformers' code."""

from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from headrace_common.checkpoints.headers import VISION, read_headers
from headrace_common.checkpoints.spec import ModelSpec
from headrace_common.errors import ModelError
from headrace_engine.runner.lanes.foreign import capture_first_call


@dataclass(slots=True)
class TowerState:
    """The state of the vision encoder between two blocks."""

    hidden: Tensor  # [patches, hidden]
    # The positional arguments of a block after the hidden states.
    arguments: list[Any]
    keywords: dict[str, Any]


class VisionTower:
    """Runs a vision encoder in units: one unit per block, and a last unit that merges patches."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        config = AutoConfig.from_pretrained(spec.folder, trust_remote_code=False).vision_config
        with torch.device("meta"):
            tower: Any = AutoModel.from_config(config, attn_implementation="sdpa")
        # No file stores this table, so it is computed here.
        tower.rotary_pos_emb = type(tower.rotary_pos_emb)(config)
        _load(tower, spec, dtype)
        self.module = tower.to(device).eval()
        self.num_units = len(tower.blocks) + 1
        self._device, self._dtype = device, dtype

    def begin(self, tensors: dict[str, Tensor]) -> TowerState:
        """Start an image from the patches and grid that the processor made."""
        pixels = tensors["pixel_values"].to(self._device, self._dtype)
        grid = tensors["image_grid_thw"].to(self._device)
        (hidden, *arguments), keywords = capture_first_call(
            self.module.blocks[0], lambda: self.module(pixels, grid_thw=grid)
        )
        return TowerState(hidden, arguments, keywords)

    def advance(self, state: TowerState, start: int, end: int) -> Tensor | None:
        """Run the units [start, end); the last unit returns features [placeholders, hidden]."""
        for block in self.module.blocks[start:end]:
            state.hidden = block(state.hidden, *state.arguments, **state.keywords)
        if end < self.num_units:
            return None
        rows: Tensor = self.module.merger(state.hidden)
        return rows


def _load(tower: nn.Module, spec: ModelSpec, dtype: torch.dtype) -> None:
    """Load every parameter; ModelError if a tensor is missing, unknown or of the wrong shape."""
    headers = {
        name.removeprefix(VISION): header
        for name, header in read_headers(spec).items()
        if name.startswith(VISION)
    }
    parameters = dict(tower.named_parameters())
    for name in sorted(headers.keys() ^ parameters.keys()):
        fault = "is missing" if name in parameters else "is unknown to the model"
        raise _corrupt(spec, name, fault)
    for file in sorted({header.file for header in headers.values()}):
        with safe_open(spec.folder / file, framework="pt") as tensors:
            for name, header in headers.items():
                if header.file != file:
                    continue
                if header.shape != tuple(parameters[name].shape):
                    raise _corrupt(spec, name, "has a different shape in the model")
                values = tensors.get_tensor(VISION + name).to(dtype)
                path, _, kind = name.rpartition(".")
                setattr(tower.get_submodule(path), kind, nn.Parameter(values, requires_grad=False))


def _corrupt(spec: ModelSpec, name: str, fault: str) -> ModelError:
    return ModelError(
        f"Tensor {VISION}{name} of {spec.name} {fault}; check config.json against the weights.",
        "model_corrupt",
    )
