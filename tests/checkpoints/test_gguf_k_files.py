"""Files that llama.cpp has quantized: make_k_files.py writes them, and one set is committed."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf.quants import dequantize

from headrace_common.checkpoints.find import find_model
from headrace_common.checkpoints.gguf_names import original_name
from headrace_common.checkpoints.headers import read_headers
from headrace_common.checkpoints.spec import read_spec
from headrace_engine.runner.footprint import footprint
from headrace_engine.weights.gguf_weights import GgufFile
from tests.kernels.own_kernels import needs_own_kernels
from tools.harness.drive import (
    assert_close,
    assert_greedy,
    generate,
    random_prompt,
    row_logits,
    tiny_runner,
)

FILES = sorted((Path(__file__).parent / "data").glob("*.gguf"))
PROMPT = random_prompt(40, vocab_size=260)


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def file(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return request.param


def unpacked(file: Path) -> dict[str, torch.Tensor]:
    """By the gguf package alone; for Llama the rows of q and k go back to transformers' order."""
    found = {}
    for tensor in gguf.GGUFReader(file).tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        heads = {"attn_q": 4, "attn_k": 2}.get(tensor.name.split(".")[-2])
        if file.stem.startswith("llama") and heads:
            values = np.stack(
                [part[place::2] for part in np.split(values, heads) for place in (0, 1)]
            ).reshape(values.shape)
        found[original_name(tensor.name, "")] = torch.from_numpy(values.copy())
    return found


def reference(file: Path) -> Any:
    """transformers' model of the dequantized weights."""
    config = json.loads((find_model(str(file)) / "config.json").read_text())
    make = getattr(transformers, config["architectures"][0])
    model = make(make.config_class(**config, attn_implementation="eager")).float().eval()
    model.load_state_dict(unpacked(file), strict=False)
    model.tie_weights()
    return model


def test_the_files_have_every_type_that_the_package_cannot_write() -> None:
    kinds = {t.tensor_type.name for file in FILES for t in gguf.GGUFReader(file).tensors}
    assert kinds == {"F32", "Q4_K", "Q5_K", "Q6_K"}


def test_weights_are_what_the_package_makes_of_them(file: Path) -> None:
    spec = read_spec(find_model(str(file)))
    headers, expected = read_headers(spec), unpacked(file)
    assert headers.keys() == expected.keys()
    with GgufFile(spec.folder / spec.weight_files[0], spec, headers) as content:
        for name, values in expected.items():
            assert torch.equal(content.get_tensor(name), values), name


@torch.inference_mode()
def test_logits_are_those_of_transformers_with_the_dequantized_weights(file: Path) -> None:
    runner = tiny_runner(find_model(str(file)), dtype="float32")
    model = reference(file)
    expected = model(torch.tensor([PROMPT])).logits[0]
    assert float(expected.std()) > 0.01
    assert_close(row_logits(runner, PROMPT), expected, tolerance=1e-4)
    assert_greedy(PROMPT + generate(runner, PROMPT, 64), len(PROMPT), model)


@pytest.mark.slow  # it compiles every kernel of packed weights, as test_gguf.py does
@needs_own_kernels
@torch.inference_mode()
def test_in_its_own_bits_it_computes_as_well_as_unpacked_to_bfloat16(file: Path) -> None:
    folder = find_model(str(file))
    packed, plain = tiny_runner(folder), tiny_runner(folder, quantize="none", kernels="plain")
    exact = reference(file)(torch.tensor([PROMPT])).logits[0]
    errors = [float((row_logits(r, PROMPT) - exact).norm()) for r in (packed, plain)]
    assert errors[0] < 1.2 * errors[1]
    for chunk in (1, 7, 30):
        assert torch.equal(row_logits(packed, PROMPT, chunk), row_logits(packed, PROMPT))
    held = {
        kind: footprint(read_spec(folder), torch.bfloat16, "avx512", kind).held
        for kind in ("own", "none")
    }
    assert packed.lane.weight_bytes == held["own"] < 0.75 * held["none"]
