"""Tests of answers over HTTP from quantized weights: a GGUF file and int4."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tools.harness.servers import ServerProcess, running_server
from tools.harness.tiny_models import make_tiny_model

FILE = Path(__file__).parent.parent / "checkpoints" / "data" / "llama-Q4_K_M.gguf"
SHAPE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "initializer_range": 0.05}
PROMPTS = ["Once upon a time", "the wheel turns " * 20, "x", "A river is"]


def answer(server: ServerProcess, prompt: str) -> tuple[str, str, int]:
    body = {"prompt": prompt, "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    choice, usage = response.json()["choices"][0], response.json()["usage"]
    return choice["text"], choice["finish_reason"], usage["completion_tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gguf", "int4"])
def test_answers_are_the_same_alone_and_in_a_batch(tmp_path: Path, kind: str) -> None:
    flags = ["--threads", "1", "--max-model-len", "512"]
    if kind == "gguf":
        model = str(FILE)
    else:
        model = str(make_tiny_model(tmp_path / "tiny", **SHAPE))
        flags += ["--quantize", "int4"]
    with running_server(model, *flags, environment={"XDG_CACHE_HOME": str(tmp_path)}) as server:
        alone = [answer(server, prompt) for prompt in PROMPTS]
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(lambda prompt: answer(server, prompt), PROMPTS))
    assert alone == together
    assert len({text for text, *_ in alone}) > 1
    assert all(rest == ("length", 30) for _, *pair in alone for rest in [tuple(pair)])
