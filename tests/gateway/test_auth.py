import pytest
from starlette.datastructures import Headers

from headrace.core.config import HttpConfig
from headrace.core.errors import RequestError
from headrace.gateway.auth import Auth

KEYS = HttpConfig(api_key=("one", "two"))


def verdict(config: HttpConfig, **headers: str) -> int:
    try:
        Auth(config).check(Headers({k.replace("_", "-"): v for k, v in headers.items()}))
    except RequestError as error:
        return error.kind.status
    return 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer one"}, 200),
        ({"authorization": "bearer  two "}, 200),
        ({"authorization": "Basic one"}, 401),
        ({"authorization": "Bearer three"}, 401),
        ({"authorization": "Bearer "}, 401),
        ({"x_api_key": "two"}, 200),
        ({"x_api_key": "One"}, 401),
        ({"authorization": "Bearer three", "x_api_key": "one"}, 200),
    ],
)
def test_a_key_opens_the_door(headers: dict[str, str], status: int) -> None:
    assert verdict(KEYS, **headers) == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost:8000"}, 200),
        ({"host": "127.0.0.1"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "app.localhost"}, 200),
        ({"host": "Allowed.Example:80"}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": "localhost.evil.example"}, 403),
        ({"host": "localhost@evil.example"}, 403),
        ({"host": "0.0.0.0"}, 403),
        ({"host": "["}, 403),
        ({"host": ""}, 403),
        ({"host": "localhost", "origin": "http://localhost:3000"}, 200),
        ({"host": "localhost", "origin": "https://evil.example"}, 403),
        ({"host": "localhost", "origin": "null"}, 403),
    ],
)
def test_a_keyless_server_answers_to_local_names_only(headers: dict[str, str], status: int) -> None:
    assert verdict(HttpConfig(allowed_host=("allowed.example",)), **headers) == status


def test_with_a_key_or_a_public_address_names_do_not_matter() -> None:
    assert verdict(KEYS, host="evil.example", x_api_key="one") == 200
    assert verdict(HttpConfig(host="0.0.0.0"), host="evil.example") == 200
