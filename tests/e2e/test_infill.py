"""Tests of fill-in-the-middle with a model whose tokenizer has Qwen's infill tokens."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from tools.harness.servers import ServerProcess, running_server
from tools.harness.tiny_models import make_tiny_model

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")
PREFIX, SUFFIX, MIDDLE, PROJECT, FILE = range(259, 264)
GREEDY = {"temperature": 0, "return_token_ids": True}
SIDES = {"input_prefix": "a = (", "input_suffix": ")\n", "temperature": 0, "n_predict": 12}


@pytest.fixture(scope="module")
def filler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = make_tiny_model(tmp_path_factory.mktemp("models") / "filler")
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.add_special_tokens(list(MARKS))
    tokenizer.save(file)
    with running_server(str(folder), "--threads", "1", "--max-model-len", "512") as running:
        yield running


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    answered: dict[str, Any] = answer.json()
    return answered


def ids_of(server: ServerProcess, text: str) -> list[int]:
    ids: list[int] = post(server, "/tokenize", {"content": text})["tokens"]
    return ids


def test_a_suffix_is_placed_between_infill_tokens(filler: ServerProcess) -> None:
    before, behind = ids_of(filler, "a = ("), ids_of(filler, ")\n")
    prompt = [PREFIX, *before, SUFFIX, *behind, MIDDLE]
    asked = {"prompt": "a = (", "suffix": ")\n", **GREEDY}
    (filled,) = post(filler, "/v1/completions", asked)["choices"]
    (plain,) = post(filler, "/v1/completions", {"prompt": prompt, **GREEDY})["choices"]
    assert filled["prompt_token_ids"] == prompt
    assert filled["token_ids"] == plain["token_ids"] != []
    several = post(filler, "/v1/completions", asked | {"prompt": ["a = (", "b"]})["choices"]
    assert several[0]["text"] == filled["text"] and len(several) == 2


def test_a_file_separator_token_ends_the_infill(filler: ServerProcess) -> None:
    bias = {"logit_bias": {str(FILE): 100}}
    asked = {"prompt": "a", "suffix": "b", **GREEDY, **bias}
    (choice,) = post(filler, "/v1/completions", asked)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    ended = post(filler, "/infill", SIDES | bias)
    assert (ended["content"], ended["stop_type"], ended["stop"]) == ("", "eos", True)


def test_the_infill_route_matches_completions_and_streams_the_same_text(
    filler: ServerProcess,
) -> None:
    asked = {"prompt": "a = (", "suffix": ")\n", "max_tokens": 12, **GREEDY}
    (filled,) = post(filler, "/v1/completions", asked)["choices"]
    whole = post(filler, "/infill", SIDES)
    assert whole["content"] == filled["text"] and whole["tokens"] == filled["token_ids"]
    assert whole["tokens_predicted"] == len(whole["tokens"]) and whole["stop_type"] == "limit"
    typed = SIDES | {"input_prefix": "a =", "prompt": " ("}
    assert post(filler, "/infill", typed)["content"] == whole["content"]
    url = f"{filler.url}/infill"
    told = httpx.post(url, json=SIDES | {"stream": True}, timeout=60).text
    chunks = [json.loads(line[6:]) for line in told.splitlines() if line]
    assert "".join(chunk["content"] for chunk in chunks) == whole["content"]
    assert [i for chunk in chunks for i in chunk["tokens"]] == whole["tokens"]
    assert [chunk["stop"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["timings"]["predicted_n"] == 12


def test_extra_files_precede_the_prefix(filler: ServerProcess) -> None:
    extra = [{"filename": "b.py", "text": "b = 1"}]
    told = post(filler, "/infill", SIDES | {"input_extra": extra})
    texts = ("project\n", "b.py\nb = 1\n", "current\n")
    named, other, current = (ids_of(filler, text) for text in texts)
    files = [PROJECT, *named, FILE, *other, FILE, *current]
    prompt = [*files, PREFIX, *ids_of(filler, "a = ("), SUFFIX, *ids_of(filler, ")\n"), MIDDLE]
    assert told["tokens_evaluated"] == len(prompt)
    asked = {"prompt": prompt, "max_tokens": 12, **GREEDY}
    (plain,) = post(filler, "/v1/completions", asked)["choices"]
    assert told["tokens"] == plain["token_ids"]


def test_the_requests_of_llama_cpps_editors_work_and_ignored_fields_are_named(
    filler: ServerProcess,
) -> None:
    body = SIDES | {"input_extra": [], "prompt": "", "top_k": 40, "top_p": 0.9, "stream": False}
    body |= {"samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "t_max_predict_ms": 1}
    answer = httpx.post(f"{filler.url}/infill", json=body, timeout=60)
    assert answer.status_code == 200
    ignored = answer.headers["X-Headrace-Ignored"].split(", ")
    assert set(ignored) == {"samplers.infill", "t_max_predict_ms"}


def test_a_model_without_infill_tokens_is_refused_with_a_suggestion(server: ServerProcess) -> None:
    for path, body, param in (
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("/infill", SIDES, "input_suffix"),
    ):
        refused = httpx.post(f"{server.url}{path}", json=body, timeout=60)
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, param)
        assert "Qwen2.5-Coder" in error["message"]


def test_a_missing_suffix_is_named_in_the_error(filler: ServerProcess) -> None:
    refused = httpx.post(f"{filler.url}/infill", json={"input_prefix": "a"}, timeout=60)
    assert refused.json()["error"]["param"] == "input_suffix"
