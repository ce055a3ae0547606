"""The stages that makers of an embedding model put behind its pooling, read from its folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from headrace_common.checkpoints.sentences import VectorStage, read_sentences
from headrace_common.checkpoints.spec import ModelSpec
from headrace_common.errors import ModelError
from headrace_common.sampling import PoolingMode
from headrace_engine.runner.lanes.lane import LaneTraits
from headrace_engine.runner.pooling import VectorHead, to_unit

_ACTIVATIONS = {
    "Identity": nn.Identity,
    "Tanh": nn.Tanh,
    "ReLU": nn.ReLU,
    "GELU": nn.GELU,
    "SiLU": nn.SiLU,
    "Sigmoid": nn.Sigmoid,
}


def vector_head(spec: ModelSpec, traits: LaneTraits, pooling: Any) -> VectorHead:
    """The way to a vector that the files describe, or that `pooling` names; "auto": the files'.

    ModelError if a stage's weights are damaged or do not fit.
    """
    if "embed" not in traits.tasks:
        return VectorHead(("score",), (), 0)
    sentences = read_sentences(spec)
    if pooling != "auto" or sentences.objection:  # then nothing is embedded without it
        named: PoolingMode = "mean" if pooling == "auto" else pooling
        return VectorHead((named,), (to_unit,), traits.vector_size)
    usual: PoolingMode = "mean" if traits.is_whole else "last"
    modes = sentences.pooling or (usual,)
    size, stages = traits.vector_size * len(modes), list[Callable[[Tensor], Tensor]]()
    for stage in sentences.stages:
        if stage.kind == "Normalize":
            stages.append(to_unit)
            continue
        if stage.size[0] != size:
            raise ModelError(
                f"{stage.path} of {spec.name} takes vectors of {stage.size[0]} numbers, and what "
                f"comes before it makes {size}; download the model again.",
                "model_corrupt",
            )
        stages.append(_dense(sentences.root, stage, spec))
        size = stage.size[1]
    return VectorHead(modes, stages, size)


def _dense(root: Path, stage: VectorStage, spec: ModelSpec) -> Callable[[Tensor], Tensor]:
    """The layer in float32, in which vectors are."""
    file = root / stage.path / "model.safetensors"
    if not file.is_file():
        raise ModelError(
            f"{spec.name} has no {stage.path}/model.safetensors, and pickled weights are never "
            "read; save the model anew by sentence-transformers, which writes that file."
        )
    layer = nn.Linear(*stage.size, bias=stage.has_bias)
    try:
        found = {name.removeprefix("linear."): value for name, value in load_file(file).items()}
        layer.load_state_dict(found)
    except (SafetensorError, RuntimeError) as error:
        raise ModelError(
            f"{stage.path}/model.safetensors of {spec.name} is damaged, or has other tensors than "
            f"a layer of {stage.size[0]} to {stage.size[1]} numbers; download it again.",
            "model_corrupt",
        ) from error
    return nn.Sequential(layer.requires_grad_(False), _ACTIVATIONS[stage.activation]())
