"""Makes LoRA adapters with random numbers, as folders in PEFT's format."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def make_adapter(
    folder: Path, base: Path, rank: int, targets: tuple[str, ...], seed: int = 0, **config: Any
) -> Path:
    """Makes an adapter for the model in `base`, with factors large enough to change its text.

    `config` has additional keys of adapter_config.json. If `config` has a rank_pattern, the ranks
    follow this pattern.
    """
    folder.mkdir(parents=True)
    options = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(targets),
        "bias": "none",
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(options))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (outputs, inputs) in sorted(_linears(base).items()):
        if not module.endswith(tuple(f".{target}" for target in targets)):
            continue
        patterns = options.get("rank_pattern", {}).items()
        own = next((r for p, r in patterns if re.fullmatch(rf"(.*\.)?({p})", module)), rank)
        down = torch.randn(own, inputs, generator=generator) * inputs**-0.5
        up = torch.randn(outputs, own, generator=generator) * 0.5 * own**-0.5
        name = f"base_model.model.{module}"
        tensors |= {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def _linears(base: Path) -> dict[str, tuple[int, int]]:
    """Return the shape of each matrix in the layers, by module name."""
    found = {}
    for file in base.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                shape = tensors.get_slice(name).get_shape()
                if ".layers." in name and name.endswith(".weight") and len(shape) == 2:
                    found[name.removesuffix(".weight")] = tuple(shape)
    return found
