"""Tests the normalization of request paths."""

import pytest
from starlette.testclient import TestClient

from headrace.gateway.middleware import canonical
from headrace_common.config.settings import HttpConfig, ServerConfig
from tests.gateway.builders import FakeGeneration, app_of


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("//v1/models", "/v1/models"),
        ("/v1//chat///completions/", "/v1/chat/completions"),
        ("/v1/models/", "/v1/models"),
        ("/messages/count_tokens", "/v1/messages/count_tokens"),
        ("/responses/resp_1/cancel/", "/v1/responses/resp_1/cancel"),
        ("/embeddings", "/v1/embeddings"),
        ("/completions", "/completions"),
        ("/messagesque", "/messagesque"),
        ("/v1/stream/a//b/", "/v1/stream/a//b/"),
        ("/v1/models//srv/models/a", "/v1/models//srv/models/a"),
        ("/batches/", "/batches/"),
        ("//", "/"),
        ("/", "/"),
        ("", "/"),
    ],
)
def test_a_path_is_normalized(path: str, expected: str) -> None:
    assert canonical(path) == expected


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_a_base_url_may_end_in_a_slash_or_lack_v1(prefix: str) -> None:
    config = ServerConfig(http=HttpConfig(api_prefix=prefix))
    client = TestClient(app_of(FakeGeneration(), config), base_url="http://localhost")
    assert client.get(f"http://localhost{prefix}//v1/models/").status_code == 200
    for path in ("/messages", "/messages/count_tokens", "/responses/", "//embeddings"):
        answer = client.post(f"http://localhost{prefix}{path}", json={})
        assert answer.status_code == 400, path
    assert client.post(f"{prefix}/messages", json={}).json()["type"] == "error"
