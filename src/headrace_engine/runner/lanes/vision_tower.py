"""Runs the vision encoders of native models block by block, with transformers' code."""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from headrace_common.checkpoints.gguf_names import SECOND_FRAME
from headrace_common.checkpoints.headers import VISION, read_headers
from headrace_common.checkpoints.spec import ModelSpec
from headrace_common.errors import ModelError
from headrace_engine.runner.lanes.foreign import capture_first_call
from headrace_engine.weights.weights import Checkpoint

_PATCHES = "patch_embed.proj.weight"


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
    headers = {name: it for name, it in read_headers(spec).items() if name.startswith(VISION)}
    parameters = dict(tower.named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    # GGUF files store the kernel of the patch embedding as two kernels, one for each frame.
    if spec.is_gguf and len(shapes.get(_PATCHES, ())) == 5:
        rows, colours, _, *sides = shapes[_PATCHES]
        shapes[_PATCHES] = shapes[_PATCHES + SECOND_FRAME] = (rows, colours, *sides)
    for name in sorted({name.removeprefix(VISION) for name in headers} ^ shapes.keys()):
        fault = "is missing" if name in shapes else "is unknown to the model"
        raise _corrupt(spec, name, fault)
    for name, shape in shapes.items():
        if headers[VISION + name].shape != shape:
            raise _corrupt(spec, name, "has a different shape in the model")
    with ExitStack() as files:
        checkpoint = Checkpoint(spec, files, headers)

        def read(name: str) -> Tensor:
            size = torch.Size(shapes[name])
            return checkpoint.stack([VISION + name], size, dtype, torch.device("cpu"))

        for name in parameters:
            values = read(name)
            if name + SECOND_FRAME in shapes:
                values = torch.stack([values, read(name + SECOND_FRAME)], dim=2)
            path, _, kind = name.rpartition(".")
            setattr(tower.get_submodule(path), kind, nn.Parameter(values, requires_grad=False))


def _corrupt(spec: ModelSpec, name: str, fault: str) -> ModelError:
    return ModelError(
        f"Tensor {VISION}{name} of {spec.name} {fault}; check config.json against the weights.",
        "model_corrupt",
    )
