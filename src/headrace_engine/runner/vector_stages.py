"""Loads the stages that an embedding model runs after pooling, from the model's folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from headrace_common.checkpoints.sentence_transformers import VectorStage, read_sentences
from headrace_common.checkpoints.spec import ModelSpec
from headrace_common.errors import ModelError
from headrace_common.sampling import PoolingMode
from headrace_engine.runner.lanes.lane import LaneTraits
from headrace_engine.runner.pooling import VectorHead, normalize

_ACTIVATIONS = {
    "Identity": nn.Identity,
    "Tanh": nn.Tanh,
    "ReLU": nn.ReLU,
    "GELU": nn.GELU,
    "SiLU": nn.SiLU,
    "Sigmoid": nn.Sigmoid,
}


def vector_head(spec: ModelSpec, traits: LaneTraits, pooling: Any) -> VectorHead:
    """Return the vector head that the model's files describe, or that uses `pooling` instead.

    Raises ModelError if a stage's weights are damaged or do not fit.
    """
    if "embed" not in traits.tasks:
        return VectorHead(("score",), (), 0)
    sentences = read_sentences(spec)
    # If the files describe something unsupported, the server embeds only with an explicit pooling.
    if pooling != "auto" or sentences.objection:
        named: PoolingMode = "mean" if pooling == "auto" else pooling
        return VectorHead((named,), (normalize,), traits.vector_size)
    usual: PoolingMode = "mean" if traits.is_whole else "last"
    modes = sentences.pooling or (usual,)
    size, stages = traits.vector_size * len(modes), list[Callable[[Tensor], Tensor]]()
    for stage in sentences.stages:
        if stage.kind == "Normalize":
            stages.append(normalize)
            continue
        if stage.size[0] != size:
            raise ModelError(
                f"{stage.path} of {spec.name} expects vectors of {stage.size[0]} numbers, but the "
                f"stage before it returns {size}; download the model again.",
                "model_corrupt",
            )
        stages.append(_dense(sentences.root, stage, spec))
        size = stage.size[1]
    return VectorHead(modes, stages, size)


def _dense(root: Path, stage: VectorStage, spec: ModelSpec) -> Callable[[Tensor], Tensor]:
    """Return the layer in float32, the dtype of vectors."""
    file = root / stage.path / "model.safetensors"
    if not file.is_file():
        raise ModelError(
            f"{spec.name} has no {stage.path}/model.safetensors, and Headrace never reads pickled "
            "weights; save the model again with sentence-transformers, which writes that file."
        )
    layer = nn.Linear(*stage.size, bias=stage.has_bias)
    try:
        found = {name.removeprefix("linear."): value for name, value in load_file(file).items()}
        layer.load_state_dict(found)
    except (SafetensorError, RuntimeError) as error:
        raise ModelError(
            f"{stage.path}/model.safetensors of {spec.name} is damaged, or is not a layer of "
            f"{stage.size[0]} inputs and {stage.size[1]} outputs; download it again.",
            "model_corrupt",
        ) from error
    return nn.Sequential(layer.requires_grad_(False), _ACTIVATIONS[stage.activation]())
