"""Tests of an encoder-decoder over HTTP, whose source text is the prompt."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from tools.harness.servers import ServerProcess, running_server
from tools.harness.sse import data_of
from tools.harness.tiny_models import make_tiny_seq2seq

TEXT = "The mill wheel turns while the water runs."
BODY = {"prompt": TEXT, "max_tokens": 40, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_seq2seq(tmp_path_factory.mktemp("seq2seq") / "t5", "GatedT5")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with running_server(str(folder), "--threads", "1") as running:
        yield running


def post(server: ServerProcess, body: dict[str, Any], route: str = "completions") -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{route}", json=body, timeout=60)


def stream(server: ServerProcess, body: dict[str, Any], on_text: Any = None) -> list[dict]:
    frames = []
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=body | {"stream": True}, timeout=60
    ) as answer:
        for frame in data_of(answer.iter_lines()):
            frames.append(frame)
            if on_text and any(choice["text"] for choice in frame["choices"]):
                on_text()
    return frames


def text_of(frames: list[dict]) -> str:
    return "".join(choice["text"] for frame in frames for choice in frame["choices"])


@torch.inference_mode()
def expected(folder: Path, num: int) -> str:
    """Return the greedy output of transformers, computed token by token."""
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    source = torch.tensor([tokenizer.encode(TEXT).ids])
    tokens = [257]
    for _ in range(num):
        logits = model(input_ids=source, decoder_input_ids=torch.tensor([tokens])).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokenizer.decode(tokens[1:], skip_special_tokens=True)


def test_the_answer_equals_transformers_and_usage_counts_the_source(server, folder):
    answer = post(server, BODY).json()
    assert len(set(answer["choices"][0]["text"])) > 10
    assert answer["choices"][0]["text"] == expected(folder, 40)
    assert answer["usage"]["prompt_tokens"] == len(TEXT) + 1  # plus the end token
    assert answer["usage"]["completion_tokens"] == 40


def test_progress_counts_the_source_up_to_its_end(server):
    frames = stream(server, BODY | {"return_progress": True})
    progress = [frame["prompt_progress"] for frame in frames if frame.get("prompt_progress")]
    assert {each["total"] for each in progress} == {len(TEXT) + 1}
    assert progress[-1]["processed"] == len(TEXT) + 1


def test_the_first_of_several_choices_equals_a_single_request(server):
    body = BODY | {"temperature": 1, "seed": 3, "n": 3}
    several = [choice["text"] for choice in post(server, body).json()["choices"]]
    assert len(set(several)) == 3
    assert several[0] == post(server, body | {"n": 1}).json()["choices"][0]["text"]
    again = [choice["text"] for choice in post(server, body).json()["choices"]]
    assert again == several


@pytest.mark.slow
def test_an_answer_loses_no_text_when_its_engine_is_killed(server, folder):
    killed = []

    def kill() -> None:
        if not killed:
            killed.append(True)
            server.kill_engine()

    # Source and answer together are longer than the context length of either.
    frames = stream(server, BODY | {"max_tokens": 240}, on_text=kill)
    assert killed and text_of(frames) == expected(folder, 240)


@pytest.mark.parametrize(
    ("body", "route", "code"),
    [
        ({"prompt": "x" * 300}, "completions", "context_length_exceeded"),
        ({"prompt": "", "add_special_tokens": False}, "completions", "empty_prompt"),
        ({"prompt": TEXT, "echo": True}, "completions", "unsupported_parameter"),
        ({"messages": [{"role": "user", "content": TEXT}]}, "chat/completions",
         "unsupported_operation"),
    ],
)  # fmt: skip
def test_unsupported_requests_are_refused(server, body, route, code):
    refused = post(server, body, route)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, code)


def test_a_source_may_fill_the_context(server):
    answer = post(server, {"prompt": "x" * 255, "max_tokens": 4, "ignore_eos": True}).json()
    assert answer["usage"] == {"prompt_tokens": 256, "completion_tokens": 4} | {
        key: value
        for key, value in answer["usage"].items()
        if key not in ("prompt_tokens", "completion_tokens")
    }


def test_the_ingestion_record_describes_the_encoding_of_the_source(server):
    record = post(server, BODY | {"return_ingestion": True}).json()["headrace"]["ingestion"]
    assert (record["strategy"], record["encoder"]) == ("generic-seq2seq-source", "pieces")
    assert (record["boundary"], record["mask"], record["memory"]) == (
        "encoder-piece", "bidirectional", "slot",
    )  # fmt: skip
    num = record["chunks"]
    assert record["eligible"] and record["applied"] == (num > 1)
    assert record["reason"] == f"Source encoded in {f'{num} pieces' if num > 1 else 'one piece'}."
