"""Tests of llama.cpp's own routes over HTTP, below an API prefix."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from headrace import Client
from tools.harness.servers import ServerProcess, running_server
from tools.harness.tiny_models import make_tiny_model

GREEDY = {"temperature": 0, "n_predict": 6, "ignore_eos": True}
FLAGS = ("--threads", "1", "--max-model-len", "256", "--alias", "tiny", "--api-prefix", "/llm")
LIMIT_S = 60


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    with running_server(str(folder), *FLAGS) as running:
        yield running


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=LIMIT_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(server: ServerProcess, body: dict[str, Any]) -> list[dict[str, Any]]:
    sent = {**body, "stream": True, "heartbeat": False}
    answer = httpx.post(f"{server.url}/completion", json=sent, timeout=LIMIT_S)
    lines = [line for line in answer.text.split("\n\n") if line]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_a_completion_has_llama_cpps_fields_and_the_text_of_openais_route(
    server: ServerProcess,
) -> None:
    whole = post(server, "/completion", {"prompt": "a b c", "seed": 7, **GREEDY})
    asked = {"prompt": "a b c", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    theirs = post(server, "/v1/completions", asked | {"return_token_ids": True})
    (choice,) = theirs["choices"]
    assert (whole["content"], whole["tokens"]) == (choice["text"], choice["token_ids"])
    assert (whole["index"], whole["stop"], whole["stop_type"]) == (0, True, "limit")
    assert (whole["model"], whole["truncated"], whole["stopping_word"]) == ("tiny", False, "")
    assert whole["tokens_evaluated"] == theirs["usage"]["prompt_tokens"]
    assert whole["tokens_predicted"] == whole["timings"]["predicted_n"] == 6
    settings = whole["generation_settings"]
    assert (settings["n_predict"], settings["seed"], settings["temperature"]) == (6, 7, 0)
    assert (settings["stop"], settings["stream"], settings["n_probs"]) == ([], False, 0)
    assert post(server, "/completions", {"prompt": "a b c", **GREEDY})["tokens"] == whole["tokens"]


def test_chunks_join_to_the_whole_answer_and_the_last_one_has_the_timings(
    server: ServerProcess,
) -> None:
    asked = {"prompt": "a b c", "return_progress": True, "cache_prompt": False, **GREEDY}
    *chunks, last = streamed(server, asked)
    whole = post(server, "/completion", {"prompt": "a b c", **GREEDY})
    assert "".join(chunk["content"] for chunk in chunks) == whole["content"]
    assert [id for chunk in chunks for id in chunk["tokens"]] == whole["tokens"]
    assert not any(chunk["stop"] for chunk in chunks) and last["stop"]
    progress = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert progress[-1]["processed"] == progress[-1]["total"] == last["tokens_evaluated"]
    assert (last["content"], last["tokens_predicted"], last["stop_type"]) == ("", 6, "limit")
    assert last["timings"]["predicted_n"] == 6


def test_an_array_of_prompts_gets_the_answers_of_single_requests(server: ServerProcess) -> None:
    prompts = ["a b c", "a longer prompt"]
    several = post(server, "/completion", {"prompt": prompts, **GREEDY})
    alone = [post(server, "/completion", {"prompt": one, **GREEDY}) for one in prompts]
    shown = ("content", "tokens", "tokens_evaluated", "tokens_predicted")
    assert [[one[key] for key in shown] for one in several] == [
        [one[key] for key in shown] for one in alone
    ]
    assert [one["index"] for one in several] == [0, 1]
    last = [chunk for chunk in streamed(server, {"prompt": prompts, **GREEDY}) if chunk["stop"]]
    assert sorted(chunk["index"] for chunk in last) == [0, 1]
    ids = post(server, "/tokenize", {"content": "a b c", "add_special": True})["tokens"]
    assert post(server, "/completion", {"prompt": ids, **GREEDY})["tokens"] == alone[0]["tokens"]


def test_n_probs_returns_the_top_logprobs_of_each_token(server: ServerProcess) -> None:
    asked = {"prompt": "a b c", "n_probs": 3, **GREEDY}
    whole = post(server, "/completion", asked)
    entries = whole["completion_probabilities"]
    told = [entry["id"] for entry in entries]
    drawn = iter(whole["tokens"])
    assert told and all(id in drawn for id in told)  # in order; tokens without text have no entry
    for entry in entries:
        assert len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0]["logprob"] >= entry["logprob"]
        assert bytes(entry["bytes"]).decode(errors="replace") == entry["token"]
    chunks = streamed(server, asked)
    found = [one for chunk in chunks for one in chunk.get("completion_probabilities", ())]
    assert [entry["id"] for entry in found] == told


def test_the_stop_word_and_an_invalid_field_are_named(server: ServerProcess) -> None:
    whole = post(server, "/completion", {"prompt": "a b c", **GREEDY})["content"]
    word = whole[2]
    cut = post(server, "/completion", {"prompt": "a b c", "stop": [word], **GREEDY})
    assert (cut["stop_type"], cut["stopping_word"]) == ("word", word)
    assert cut["content"] == whole.partition(word)[0]
    url = f"{server.url}/completion"
    wrong = httpx.post(url, json={"prompt": "a", "repeat_penalty": -1}, timeout=LIMIT_S)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "repeat_penalty")


MESSAGES = [{"role": "user", "content": "a b a b a b"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 8},
    "/v1/completions": {"prompt": "a b a b", "max_tokens": 8},
    "/v1/responses": {"input": "a b a b", "max_output_tokens": 8, "store": False},
    "/v1/messages": {"model": "tiny", "messages": MESSAGES, "max_tokens": 8},
    "/completion": {"prompt": "a b a b", "n_predict": 8},
    "/api/chat": {"model": "tiny", "messages": MESSAGES, "options": {"num_predict": 8}},
    "/api/generate": {"model": "tiny", "prompt": "a b a b", "options": {"num_predict": 8}},
}


def answered(server: ServerProcess, path: str, fields: dict[str, Any]) -> tuple[str, str]:
    """Return the answer's text field as JSON without ids, and the ignored field names."""
    body, is_ollamas = BODIES[path], path.startswith("/api/")
    body = body | ({"options": body["options"] | fields, "stream": False} if is_ollamas else fields)
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=LIMIT_S)
    assert answer.status_code == 200, answer.text
    found = json.loads(answer.text)
    for key in ("choices", "output", "content", "message", "response"):
        if key in found:
            text = json.dumps(found[key])
            return re.sub(r'"id": "[^"]*"', "", text), answer.headers.get("x-headrace-ignored", "")
    raise AssertionError(found)


@pytest.mark.parametrize("path", BODIES)
def test_every_route_accepts_llama_cpps_samplers(server: ServerProcess, path: str) -> None:
    likeliest = answered(server, path, {"temperature": 0})
    assert likeliest[1] == ""
    for one in ({"top_n_sigma": 1e-6}, {"min_p": 1, "samplers": ["min_p"]}):
        drawn = answered(server, path, {"temperature": 5, "seed": 3, **one})
        assert drawn == likeliest
    assert answered(server, path, {"temperature": 0, "repeat_penalty": 5}) != likeliest
    off = {"temperature": 0, "repeat_penalty": 5, "repeat_last_n": 0}
    assert answered(server, path, off) == likeliest
    # With a target of 0 bits, mirostat picks the likeliest token at any temperature.
    certain = {"temperature": 5, "seed": 3, "mirostat": 2, "mirostat_tau": 0}
    assert answered(server, path, certain) == likeliest
    dry = {"temperature": 0, "dry_multiplier": 100, "dry_allowed_length": 0}
    assert answered(server, path, dry)[0] != likeliest[0]
    assert answered(server, path, dry | {"dry_penalty_last_n": 0}) == likeliest
    asked = {"temperature": 0, "adaptive_target": 0.5, "samplers": "tz"}
    names = answered(server, path, asked)[1].split(", ")
    assert {name.removeprefix("options.") for name in names} == {
        "adaptive_target",
        "samplers.z",
    }


def test_generation_settings_report_the_values_that_took_effect(server: ServerProcess) -> None:
    asked = {"prompt": "a", "n_predict": 1, "samplers": ["top_k"], "top_k": 3, "min_p": 0.5}
    settings = post(server, "/completion", asked)["generation_settings"]
    assert (settings["samplers"], settings["top_k"], settings["min_p"]) == (["top_k"], 3, 0)
    asked = {"prompt": "a", "n_predict": 1, "typical_p": 0.5, "repeat_last_n": 7}
    settings = post(server, "/completion", asked)["generation_settings"]
    assert (settings["typical_p"], settings["repeat_last_n"]) == (0.5, 7)
    assert (settings["samplers"][-1], settings["xtc_threshold"]) == ("temperature", 0.1)
    assert "dry" not in settings["samplers"] and "dry_multiplier" not in settings
    asked = {"prompt": "a", "n_predict": 1, "dry_multiplier": 0.5, "dry_sequence_breakers": [":"]}
    settings = post(server, "/completion", asked)["generation_settings"]
    assert (settings["dry_multiplier"], settings["dry_sequence_breakers"]) == (0.5, [":"])
    assert settings["samplers"][:2] == ["penalties", "dry"]


def test_props_and_slots_have_the_fields_of_llama_cpp(server: ServerProcess) -> None:
    shown = httpx.get(f"{server.url}/props", timeout=LIMIT_S).json()
    params = shown["default_generation_settings"]["params"]
    assert (shown["role"], shown["total_slots"]) == ("model", 64)
    assert (params["n_predict"], params["repeat_penalty"], params["top_k"]) == (-1, 1, 0)
    assert params["samplers"][0] == "penalties"
    assert len(httpx.get(f"{server.url}/slots?model=tiny", timeout=LIMIT_S).json()) == 64
    assert httpx.get(f"{server.url}/slots?model=none", timeout=LIMIT_S).status_code == 404


def test_every_route_requires_the_api_prefix(server: ServerProcess) -> None:
    root = server.url.removesuffix("/llm")
    assert root != server.url
    for path in ("/", "/dashboard", "/web/api.js", "/health", "/v1/models", "/metrics"):
        assert httpx.get(f"{server.url}{path}", timeout=LIMIT_S).status_code == 200, path
        refused = httpx.get(f"{root}{path}", timeout=LIMIT_S)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "route_not_found")
        assert refused.headers["x-request-id"]
    assert httpx.get(server.url).headers["location"] == "/llm/"
    assert httpx.get(f"{root}/llmore/health", timeout=LIMIT_S).status_code == 404
    document = httpx.get(f"{server.url}/openapi.json", timeout=LIMIT_S).json()
    assert document["servers"] == [{"url": "/llm"}]
    with Client(server.url) as client:
        assert client.chat([{"role": "user", "content": "hi"}], max_tokens=2).text is not None
