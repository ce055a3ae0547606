"""Tests of a hybrid model over HTTP: batching, saved states and an engine kill."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.kernels.own_kernels import HAS_OWN
from tools.harness.servers import ServerProcess, running_server, stream_text
from tools.harness.sse import data_of
from tools.harness.tiny_models import make_tiny_model

PROMPT = "Once upon a time there was a river that drove a mill, and the mill had a headrace. "
BODY = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Serve bfloat16 if our own kernels compute it, since those do not depend on the batch."""
    folder: Path = tmp_path_factory.mktemp("hybrid") / "tiny"
    dtype = torch.bfloat16 if HAS_OWN else torch.float32
    make_tiny_model(folder, "Qwen3_5ForConditionalGeneration", dtype=dtype, head_dim=32)
    with running_server(str(folder), "--threads", "1") as running:
        yield running


def post(server: ServerProcess, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}/v1/completions", json=BODY | body, timeout=60)
    result: dict[str, Any] = answer.raise_for_status().json()
    return result


def test_a_repeated_prompt_resumes_from_a_saved_state_with_the_same_text(
    server: ServerProcess,
) -> None:
    first, second = post(server, prompt=PROMPT * 2), post(server, prompt=PROMPT * 2)
    cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in (first, second)]
    assert cached == [0, (2 * len(PROMPT) - 1) // 32 * 32]
    assert first["choices"][0]["text"] == second["choices"][0]["text"]


def test_concurrent_requests_get_the_same_texts_as_single_ones(server: ServerProcess) -> None:
    prompts = [PROMPT[number:] for number in range(6)]
    alone = [post(server, prompt=prompt)["choices"][0]["text"] for prompt in prompts]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda prompt: post(server, prompt=prompt), prompts))
    assert [each["choices"][0]["text"] for each in together] == alone


def test_a_chat_streams_progress_and_two_choices(server: ServerProcess) -> None:
    messages = [{"role": "user", "content": PROMPT * 8}]
    body = {"messages": messages, "max_tokens": 5, "n": 2, "stream": True, "return_progress": True}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as answer:
        frames = list(data_of(answer.iter_lines()))
    progress = [frame["prompt_progress"] for frame in frames if "prompt_progress" in frame]
    assert len(progress) > 2 and progress[-1]["processed"] == progress[-1]["total"]
    ends = {c["index"] for frame in frames for c in frame["choices"] if c["finish_reason"]}
    assert ends == {0, 1}


def test_a_stream_loses_no_token_when_its_engine_is_killed(server: ServerProcess) -> None:
    body = BODY | {"max_tokens": 120}
    assert stream_text(server, body, kill_after=20) == stream_text(server, body)
