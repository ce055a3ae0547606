from starlette.testclient import TestClient

from headrace.config.settings import HttpConfig, ServerConfig
from headrace.gateway.app import create_app
from tests.gateway.builders import FakeGeneration

CONFIG = ServerConfig(http=HttpConfig(allowed_host=("testserver",)))
CLIENT = TestClient(create_app(FakeGeneration(), CONFIG))  # type: ignore[arg-type]


def test_an_unknown_route_below_api_names_what_there_is() -> None:
    for path in ("/api/delete", "/api/chat/more", "/api"):
        answer = CLIENT.get(path)
        assert answer.status_code == 404 and answer.json()["code"] == "route_not_found"
        assert "/api/chat, " in answer.json()["error"] and "/v1/" not in answer.json()["error"]
    assert "/openapi.json" in CLIENT.get("/nope").json()["error"]["message"]
