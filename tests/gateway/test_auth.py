import contextlib
from pathlib import Path

import pytest
from starlette.datastructures import Headers

from headrace.gateway.auth import Auth
from headrace.workers.job_queue import OWNER
from headrace_common.config.settings import HttpConfig
from headrace_common.errors import ConfigError, RequestError
from headrace_common.log_context import KEY_NAME
from headrace_common.worker_jobs import CheckedBody

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
def test_a_valid_api_key_is_accepted_in_either_header(headers: dict[str, str], status: int) -> None:
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
def test_a_server_without_keys_only_accepts_local_and_allowed_hosts(
    headers: dict[str, str], status: int
) -> None:
    assert verdict(HttpConfig(allowed_host=("allowed.example",)), **headers) == status


def test_the_host_name_is_not_checked_with_a_key_or_a_public_address() -> None:
    assert verdict(KEYS, host="evil.example", x_api_key="one") == 200
    assert verdict(HttpConfig(host="0.0.0.0"), host="evil.example") == 200


def test_a_key_file_names_its_keys_and_can_be_reloaded(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("ann:one\n")
    auth = Auth(HttpConfig(api_key=("two",), api_key_file=str(file)))
    for key, name in (("one", "ann"), ("two", "")):
        auth.check(Headers({"x-api-key": key}))
        assert KEY_NAME.get() == name
        assert OWNER.get() == auth.owner(Headers({"x-api-key": key}))
    file.write_text("bob:three\n")
    auth.check(Headers({"x-api-key": "one"}))
    auth.reload()
    with pytest.raises(RequestError):
        auth.check(Headers({"x-api-key": "one"}))
    auth.check(Headers({"x-api-key": "three"}))
    assert KEY_NAME.get() == "bob"


@pytest.mark.parametrize(
    ("config", "key", "sent", "taken"),
    [
        (HttpConfig(api_key=("one",), admin_key="boss"), "one", -1, 0),
        (HttpConfig(api_key=("one",), admin_key="boss"), "one", 5, 5),
        (HttpConfig(api_key=("one",), admin_key="boss"), "boss", -1, -1),
        (HttpConfig(), "", -1, -1),
    ],
)
def test_a_client_key_cannot_send_a_negative_priority(
    config: HttpConfig, key: str, sent: int, taken: int
) -> None:
    body = CheckedBody({"priority": sent}, (), b"", ignored=("wish",))
    limited = Auth(config).limit_priority(Headers({"x-api-key": key}), body)
    assert limited.fields["priority"] == taken
    assert limited.ignored == (("wish",) if sent == taken else ("wish", "priority"))


def test_a_request_whose_key_is_removed_after_the_check_gets_no_owner(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\ntwo\n")
    auth = Auth(HttpConfig(api_key_file=str(file)))
    removed = Headers({"x-api-key": "two"})
    auth.check(removed)
    file.write_text("one\n")
    auth.reload()
    with pytest.raises(RequestError) as refused:
        auth.owner(removed)
    assert refused.value.code == "invalid_api_key"


def test_a_bad_key_file_leaves_the_old_keys_valid(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n")
    auth = Auth(HttpConfig(api_key_file=str(file), admin_key_file=str(file)))
    file.write_text("# none\n")
    with pytest.raises(ConfigError):
        auth.reload()
    auth.check(Headers({"x-api-key": "one"}))
    auth.check_admin(Headers({"x-api-key": "one"}))


@pytest.mark.parametrize("allowed", ["https://a.example", "*"])
def test_an_allowed_origin_may_use_a_server_without_keys(allowed: str) -> None:
    config = HttpConfig(allowed_origins=(allowed,))
    assert verdict(config, host="localhost", origin="https://a.example") == 200
    assert verdict(config, host="evil.example", origin="https://a.example") == 403


@pytest.mark.parametrize(
    ("origin", "is_let_in"),
    [
        (None, True),
        ("https://api.example", True),  # the server's own page
        ("http://localhost:3000", True),
        ("https://known.example", True),
        ("https://allowed.example", True),
        ("https://evil.example", False),
        ("https://evil.example:8000", False),
        ("http://allowed.example", False),
        ("null", False),
        ("", False),
    ],
)
@pytest.mark.parametrize("keys", [("one",), ()])
def test_a_web_socket_refuses_pages_of_other_hosts(
    keys: tuple[str, ...], origin: str | None, is_let_in: bool
) -> None:
    config = HttpConfig(
        host="0.0.0.0",
        api_key=keys,
        allowed_host=("known.example",),
        allowed_origins=("https://allowed.example",),
    )
    headers = {"host": "api.example:8000"} | ({"origin": origin} if origin is not None else {})
    refused = pytest.raises(RequestError, match="--allowed-origins")
    with contextlib.nullcontext() if is_let_in else refused:
        Auth(config).check_page(Headers(headers))
