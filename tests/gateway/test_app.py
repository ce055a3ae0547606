import json
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from headrace.streams.events import Finish, Timings, Usage
from headrace.streams.log import LogGone
from headrace_common.config.settings import HttpConfig, ServerConfig
from headrace_common.errors import RequestError
from headrace_common.messages import Loading
from tests.gateway.builders import FakeGeneration, FakeModel, app_of, ended, tokens

FINISH = Finish(seq=0, at_ms=0, ends=(ended().end,), usage=Usage(2, 1), timings=Timings())
HI = (tokens("Hi", 5), ended(), FINISH)
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def client_of(generation: FakeGeneration | None = None, **http: Any) -> TestClient:
    config = ServerConfig(http=HttpConfig(**http))
    app = app_of(generation or FakeGeneration(*HI), config)
    return TestClient(app, base_url="http://localhost", raise_server_exceptions=False)


def error_of(response: Any) -> tuple[int, str]:
    body = response.json()
    assert list(body) == ["error"]
    assert list(body["error"])[:4] == ["message", "type", "param", "code"]
    assert response.headers["x-should-retry"] in ("true", "false")
    assert response.headers["x-request-id"]
    return response.status_code, body["error"]["code"]


def test_a_chat_is_answered_as_json_or_as_a_stream() -> None:
    client = client_of()
    whole = client.post("/v1/chat/completions", json=CHAT)
    assert whole.json()["choices"][0]["message"]["content"] == "Hi"
    assert whole.headers["content-type"] == "application/json"
    assert whole.headers["x-stream-id"] == whole.json()["id"]
    streamed = client.post("/v1/chat/completions", json=CHAT | {"stream": True})
    assert streamed.headers["content-type"] == "text/event-stream"
    assert streamed.text.endswith("data: [DONE]\n\n")


def test_a_completion_answers() -> None:
    answer = client_of().post("/v1/completions", json={"prompt": "hi"}).json()
    assert (answer["object"], answer["choices"][0]["text"]) == ("text_completion", "Hi")


def test_a_request_is_checked_in_a_fixed_order() -> None:
    generation = FakeGeneration()
    generation.refusal = RequestError("model_loading", "Loading model")
    client = client_of(generation, api_key=("k",))
    path, json_type = "/v1/chat/completions", {"content-type": "application/json"}
    key = {"x-api-key": "k"}
    wrong_model, bad = {"model": "x"}, {"n": 0, "model": "x"}
    found = [
        error_of(client.post("/v1/nothing")),
        error_of(client.get(path)),
        error_of(client.post(path, content=b"{")),
        error_of(client.post(path, content=b"{", headers=key | {"content-type": "text/plain"})),
        error_of(client.post(path, content=b"{", headers=key | json_type)),
        error_of(client.post(path, json=CHAT | bad, headers=key)),
        error_of(client.post(path, json=CHAT | wrong_model, headers=key)),
        error_of(client.post(path, json=CHAT, headers=key)),
    ]
    assert found == [
        (404, "route_not_found"),
        (405, "method_not_allowed"),
        (401, "invalid_api_key"),
        (415, "unsupported_media_type"),
        (400, "invalid_json"),
        (400, "invalid_value"),
        (404, "model_not_found"),
        (503, "model_loading"),
    ]


def test_a_refusal_has_headers_for_whether_and_when_to_retry() -> None:
    generation = FakeGeneration()
    generation.refusal = RequestError("server_overloaded", "Full.", retry_after_s=2.5)
    response = client_of(generation).post("/v1/chat/completions", json=CHAT)
    assert error_of(response) == (429, "server_overloaded")
    assert response.headers["x-should-retry"] == "true"
    assert response.headers["retry-after"] == "3"
    assert response.headers["retry-after-ms"] == "2500"


def test_a_query_with_too_many_fields_is_refused_before_parsing() -> None:
    client = client_of()
    assert client.get("/v1/models?" + "&" * 99).status_code == 200
    refused = client.get("/v1/models?" + "&" * 100)
    assert error_of(refused) == (400, "invalid_value")
    assert "101 fields; the limit is 100. Send fewer." in refused.json()["error"]["message"]


def test_a_405_lists_the_allowed_methods() -> None:
    response = client_of().get("/v1/completions")
    assert response.headers["allow"] == "POST"
    assert "retry-after" not in response.headers
    response = client_of().put("/v1/streams/some")
    assert response.headers["allow"] == "DELETE, GET, HEAD"


def test_an_error_includes_its_figures() -> None:
    generation = FakeGeneration()
    extra = {"n_prompt_tokens": 200, "n_ctx": 128}
    generation.refusal = RequestError("context_length_exceeded", "Too long.", "messages", extra)
    body = client_of(generation).post("/v1/chat/completions", json=CHAT).json()
    assert (
        body["error"]
        == {
            "message": "Too long.",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
        }
        | extra
    )


def test_an_internal_error_does_not_expose_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    generation = FakeGeneration()
    generation.refusal = OSError("/secret/path")  # type: ignore[assignment]
    response = client_of(generation).post("/v1/chat/completions", json=CHAT)
    assert error_of(response) == (500, "internal_error")
    assert "secret" not in response.text
    assert "/secret/path" in caplog.text


def test_a_stream_deleted_during_its_request_is_not_found() -> None:
    generation = FakeGeneration()
    generation.refusal = LogGone()  # type: ignore[assignment]
    found = error_of(client_of(generation).post("/v1/chat/completions", json=CHAT))
    assert found == (404, "stream_not_found")


@pytest.mark.parametrize("given", ["abc", "a b~", "x" * 128])
def test_the_clients_request_id_is_returned(given: str) -> None:
    response = client_of().get("/health", headers={"X-Request-Id": given})
    assert response.headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "x" * 129, "\xe9"])
def test_an_invalid_request_id_is_replaced(given: str) -> None:
    headers = {"X-Request-Id": given.encode("latin-1")}
    answer = client_of().get("/health", headers=headers)  # type: ignore[arg-type]
    assert len(answer.headers["x-request-id"]) == 32


def test_a_large_body_is_refused() -> None:
    response = client_of(max_body_bytes=100).post("/v1/completions", json={"prompt": "x" * 100})
    assert error_of(response) == (413, "request_too_large")
    assert response.headers["connection"] == "close"


@pytest.mark.parametrize(
    ("state", "status"),
    [("ok", 200), ("recovering", 200), ("loading", 503), ("draining", 503), ("dead", 503)],
)
def test_health_reports_the_state_and_its_status_code(state: str, status: int) -> None:
    generation = FakeGeneration()
    generation.state = state
    client = client_of(generation, api_key=("k",))
    for path in ("/health", "/v1/health"):
        response = client.get(path)
        assert (response.status_code, response.json()["status"]) == (status, state)
        assert ("error" in response.json()) == (status == 503)
    assert client.get("/health/live").json() == {"status": "ok"}


def test_health_while_loading_uses_the_error_that_llama_clients_expect() -> None:
    generation = FakeGeneration()
    generation.state = "loading"
    generation.fleet.hosts.first.loading.tell(Loading(0.4))
    response = client_of(generation).get("/health")
    error = {"code": 503, "message": "Loading model", "type": "unavailable_error"}
    assert response.json()["error"] == error
    now = response.json()["loading"]
    assert (now["stage"], now["progress"], now["detail"]) == ("loading weights", 0.4, "")
    assert response.headers["retry-after"] == "1"


def test_every_served_name_is_a_model() -> None:
    models = client_of().get("/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["headrace-mini", "org/other"]
    assert models[0]["meta"] == {
        "n_ctx_train": 64,
        "n_embd": 32,
        "n_params": 1000,
        "n_vocab": 256,
        "size": 4000,
    }
    assert models[0]["max_model_len"] == 128


def test_models_are_listed_while_loading() -> None:
    generation = FakeGeneration(model=FakeModel(ready=None))
    generation.state = "loading"
    assert client_of(generation).get("/v1/models").json()["data"][0]["meta"]["size"] is None


def test_a_model_id_may_contain_a_slash() -> None:
    client = client_of()
    for path in ("/v1/models/org/other", "/v1/models/org%2Fother"):
        assert client.get(path).json()["id"] == "org/other"
    assert error_of(client.get("/v1/models/org")) == (404, "model_not_found")
    assert client.get("/v1/models/").json() == client.get("/v1/models").json()


def test_props_have_what_llama_clients_read() -> None:
    props = client_of().get("/props").json()
    assert props["total_slots"] == 8
    assert props["default_generation_settings"]["n_ctx"] == 128
    assert props["chat_template"] == "{{ role }}: {{ content }}"
    assert props["bos_token"] == "<s>"


def test_tokenizer_info_has_the_fields_that_lm_eval_reads_and_requires_a_key() -> None:
    client = client_of(api_key=("k",))
    assert client.get("/tokenizer_info").status_code == 401
    told = client.get("/tokenizer_info", headers={"x-api-key": "k"}).json()
    assert (told["bos_token"], told["eos_token"]) == ("<s>", "</s>")
    assert told["chat_template"] == "{{ role }}: {{ content }}"
    assert told["tokenizer_class"] and told["model_max_length"] == 128


def tokenize(**body: Any) -> Any:
    return client_of().post("/tokenize", json=body)


def test_tokenize_takes_content_prompt_or_messages() -> None:
    assert tokenize(content="ab").json() == {
        "tokens": [97, 98],
        "count": 2,
        "max_model_len": 128,
    }
    assert tokenize(content="a", add_special=True).json()["tokens"] == [1, 97]
    assert tokenize(prompt="a").json()["tokens"] == [1, 97]
    assert tokenize(prompt="a", add_special_tokens=False).json()["tokens"] == [97]
    assert tokenize(**CHAT).json()["tokens"] == list(b"user: hi\n")


def test_tokenize_can_return_the_text_of_each_token() -> None:
    tokens = tokenize(content="aé", with_pieces=True).json()["tokens"]
    assert tokens[0] == {"id": 97, "piece": "a"}
    assert tokens[1] == {"id": 0xC3, "piece": [0xC3]}
    strings = tokenize(prompt="aé", return_token_strs=True).json()["token_strs"]
    assert strings == ["\x01", "a", "\ufffd", "\ufffd"]


def test_tokenize_requires_exactly_one_input() -> None:
    assert error_of(tokenize()) == (400, "missing_required_parameter")
    assert error_of(tokenize(content="a", prompt="b")) == (400, "invalid_value")
    assert error_of(tokenize(content="a", parse_special=False)) == (400, "unsupported_parameter")


def test_detokenize_returns_the_text_in_two_fields() -> None:
    client = client_of()
    body = client.post("/detokenize", json={"tokens": [104, 105]}).json()
    assert body == {"content": "hi", "prompt": "hi"}
    assert error_of(client.post("/detokenize", json={"tokens": [256]})) == (400, "invalid_value")
    assert error_of(client.post("/detokenize", json={}))[1] == "missing_required_parameter"


def test_apply_template_returns_the_text_that_tokenize_encodes() -> None:
    client = client_of()
    text = client.post("/apply-template", json=CHAT).json()["prompt"]
    assert text == "user: hi\n"
    assert tokenize(**CHAT).json()["tokens"] == list(text.encode())


def test_the_request_body_sets_the_model_and_sampling_options() -> None:
    generation = FakeGeneration(*HI)
    asked = CHAT | {"seed": 5, "max_tokens": 3, "stop": "x", "model": "org/other"}
    client_of(generation).post("/v1/chat/completions", json=asked)
    (request,) = generation.requests
    assert (request.model, request.stop) == ("org/other", ("x",))
    assert (request.sampling.seed, request.sampling.max_tokens) == (5, 3)


def test_an_error_is_compact_json() -> None:
    response = client_of().post("/v1/completions", json={"prompt": 5})
    assert response.content == msgspec.json.encode(json.loads(response.content))


def test_fields_without_effect_are_named_in_a_header() -> None:
    body = CHAT | {"n_predict": 5, "options": {}, "max_tokens": 5}
    for more in ({}, {"stream": True}):
        answer = client_of().post("/v1/chat/completions", json=body | more)
        assert answer.headers["x-headrace-ignored"] == "n_predict, options"
    assert "x-headrace-ignored" not in client_of().post("/v1/chat/completions", json=CHAT).headers


TOOL = {"type": "function", "function": {"name": "now"}}


@pytest.mark.parametrize(
    ("form", "header", "value"),
    [("", "x-headrace-ignored", "tools"), ("generic", "x-headrace-tools", "generic")],
)
def test_a_template_without_tools_is_reported_in_a_header_and_once_in_the_log(
    form: str, header: str, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = client_of(FakeGeneration(*HI, model=FakeModel(tool_format=form)))
    for _ in range(2):
        answer = client.post("/v1/chat/completions", json=CHAT | {"tools": [TOOL]})
        assert (answer.status_code, answer.headers[header]) == (200, value)
    said = [record for record in caplog.records if "headrace-mini has" in record.getMessage()]
    assert len(said) == 1
    plain = client.post(
        "/v1/chat/completions", json=CHAT | {"tools": [TOOL], "tool_choice": "none"}
    )
    assert header not in plain.headers


def test_no_header_is_sent_if_the_template_supports_tools() -> None:
    answer = client_of().post("/v1/chat/completions", json=CHAT | {"tools": [TOOL]})
    assert not {"x-headrace-ignored", "x-headrace-tools"} & set(answer.headers)
