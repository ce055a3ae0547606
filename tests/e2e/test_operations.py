"""Tests of a server with HTTPS, named API keys, an admin key, a JSON log and drains."""

import json
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace_common.version import __version__
from tools.harness.eventually import eventually
from tools.harness.servers import ServerProcess

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
ADMIN = {"x-api-key": "the-admin"}


class Operated(ServerProcess):
    """A server process with its folder of key files and its log as JSON objects."""

    folder: Path
    tls: ssl.SSLContext

    @property
    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]

    def client(self, key: str = "") -> httpx.Client:
        headers = {"x-api-key": key} if key else {}
        return httpx.Client(base_url=self.url, verify=self.tls, headers=headers, timeout=60)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    folder = tmp_path_factory.mktemp("operated")
    certificate, key, keys = folder / "cert.pem", folder / "key.pem", folder / "keys"
    make_certificate(certificate, key)
    keys.touch(0o600)
    keys.write_text("ann:first\n")
    running = Operated(
        *("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)),
        *("--api-key-file", str(keys), "--log-format", "json", "--state-dir", "none"),
        environment={"HEADRACE_ADMIN_KEY": "the-admin"},
    )
    running.folder = folder
    running.tls = ssl.create_default_context(cafile=certificate)
    try:
        # With --log-format json, the ready message is a line of the JSON log.
        eventually(lambda: "Headrace is ready at https://" in "".join(running.lines), within_s=120)
        messages = [line["message"] for line in running.log]
        ready = next(message for message in messages if message.startswith("Headrace is ready"))
        running.url = ready.split()[4].rstrip(":")
        yield running
    finally:
        running.stop()


def make_certificate(certificate: Path, key: Path) -> None:
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    files = ["-out", str(certificate), "-keyout", str(key)]
    subprocess.run(
        [*command, *files, "-subj", "/CN=localhost", "-addext", names],
        check=True,
        capture_output=True,
    )


def test_a_request_is_logged_in_one_line_with_its_id_and_key_name(
    server: Operated,
) -> None:
    with server.client("first") as client:
        answer = client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "mine"})
        assert answer.status_code == 200 and answer.headers["x-request-id"] == "mine"

    def lines() -> list[dict[str, Any]]:
        return [line for line in server.log if line.get("request_id") == "mine"]

    eventually(lambda: len(lines()) == 1, within_s=60)
    line = lines()[0]
    assert (line["level"], line["logger"], line["key"]) == ("info", "headrace.requests", "ann")
    assert (line["route"], line["outcome"]) == ("/v1/chat/completions", "finished")
    usage = answer.json()["usage"]
    assert line["prompt_tokens"] == usage["prompt_tokens"]
    assert line["completion_tokens"] == usage["completion_tokens"] == 4
    assert (line["readers"], line["resumes"]) == (1, 0)
    whole_log = "".join(server.lines)
    assert "first" not in whole_log and answer.json()["id"] not in whole_log


def refused_line(server: Operated, body: dict[str, Any], path: str = "/v1/completions") -> Any:
    """Send a request that is refused, and return its log line."""
    id = f"refused-{len(server.lines)}"
    with server.client("first") as client:
        assert client.post(path, json=body, headers={"x-request-id": id}).status_code >= 400
    found: list[dict[str, Any]] = []

    def is_logged() -> bool:
        found[:] = [line for line in server.log if line.get("request_id") == id]
        return bool(found)

    eventually(is_logged, within_s=60)
    return found[-1]


def test_a_refused_request_is_logged_with_its_model_tokens_and_limit(server: Operated) -> None:
    long = refused_line(server, {"prompt": "word " * 40_000})
    assert (long["outcome"], long["model"]) == ("context_length_exceeded", "headrace-mini")
    assert long["prompt_tokens"] > long["limit"] > 1000
    wrong = refused_line(server, CHAT | {"temperature": "hot"}, "/v1/chat/completions")
    assert (wrong["outcome"], wrong["model"]) == ("invalid_type", "headrace-mini")


def test_an_unknown_model_is_logged_with_the_served_models(server: Operated) -> None:
    for path in ("/v1/chat/completions", "/apply-template"):
        line = refused_line(server, CHAT | {"model": "gpt-7"}, path)
        assert (line["outcome"], line["asked"]) == ("model_not_found", "gpt-7")
        assert line["served"] == "headrace-mini" and "model" not in line


def test_metrics_and_state_need_the_admin_key(server: Operated) -> None:
    with server.client() as client:
        for path in ("/metrics", "/manage/state"):
            assert client.get(path).status_code == 401
            assert client.get(path, headers={"x-api-key": "first"}).status_code == 403
            assert client.get(path, headers=ADMIN).status_code == 200
        shown = client.get("/metrics", headers=ADMIN).text
        assert 'headrace_rejections_total{reason="forbidden"} 2.0' in shown


def test_probes_need_no_key_but_model_routes_do(server: Operated) -> None:
    with server.client() as client:
        for answer in (client.get("/ping"), client.post("/ping"), client.post("/ping", json={})):
            assert (answer.status_code, answer.json()["status"]) == (200, "ok")
        assert client.get("/version").json() == {"version": __version__}
        for path in ("/api/v0/models", "/api/v0/models/headrace-mini", "/v1/score", "/v2/rerank"):
            method = "POST" if "/api" not in path else "GET"
            assert client.request(method, path).status_code == 401


def test_sighup_reloads_the_keys_and_an_invalid_file_changes_nothing(server: Operated) -> None:
    def status(key: str) -> int:
        with server.client(key) as client:
            return client.get("/v1/models").status_code

    def reload(keys: str, message: str) -> None:
        (server.folder / "keys").write_text(keys)
        server.process.send_signal(signal.SIGHUP)
        eventually(lambda: any(message in line for line in server.lines), within_s=60)

    reload("# none\n", "read before stay in force.")
    assert (status("first"), status("second")) == (200, 401)
    reload("ann:first\nbob:second\n", "keys and certificate were reloaded")
    assert (status("first"), status("second")) == (200, 200)


def test_sighup_reloads_the_certificate(server: Operated) -> None:
    host, port = server.url.removeprefix("https://").split(":")
    before = ssl.get_server_certificate((host, int(port)))
    certificate, key = server.folder / "cert.pem", server.folder / "key.pem"
    with server.client("first") as kept:
        assert kept.get("/v1/models").status_code == 200
        make_certificate(certificate, key)
        assert certificate.read_text().strip() != before.strip()
        server.process.send_signal(signal.SIGHUP)

        def shown() -> str:
            return ssl.get_server_certificate((host, int(port))).strip()

        eventually(lambda: shown() == certificate.read_text().strip(), within_s=60)
        assert kept.get("/v1/models").status_code == 200  # on the old connection
    server.tls = ssl.create_default_context(cafile=certificate)
    with server.client("first") as client:
        assert client.get("/v1/models").status_code == 200


def test_a_drain_can_be_cancelled(server: Operated) -> None:
    with server.client("the-admin") as client:
        assert client.post("/manage/drain").json()["status"] == "draining"
        refused = client.post("/v1/chat/completions", json=CHAT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_shutdown")
        assert client.get("/ping").status_code == client.post("/ping").status_code == 503
        assert client.delete("/manage/drain").json()["status"] == "ok"
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_the_state_lists_running_requests_without_their_text_or_ids(server: Operated) -> None:
    with server.client("the-admin") as client:
        asked = {**CHAT, "max_tokens": 400, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/chat/completions", json=asked) as answer:
            lines = answer.iter_lines()
            next(lines)
            shown = server.client("the-admin").get("/manage/state").json()["requests"]
        (row,) = shown
        assert row["model"] == "headrace-mini" and row["state"] in ("queued", "prompt", "decode")
        assert row["tokens_left"] is None or 0 <= row["tokens_left"] <= 400
        assert (
            row["prompt_tokens"] >= row["prompt_cached"] and row["readers"] == row["choices"] == 1
        )
        assert answer.headers["x-stream-id"] not in json.dumps(shown)


def test_a_stalled_subscriber_of_the_state_does_not_block_others(server: Operated) -> None:
    host, port = server.url.removeprefix("https://").split(":")
    request = f"GET /manage/stream HTTP/1.1\r\nHost: {host}\r\nX-Api-Key: the-admin\r\n\r\n"
    stalled = []
    for _ in range(3):
        connection = socket.create_connection((host, int(port)))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        stalled.append(server.tls.wrap_socket(connection, server_hostname=host))
        stalled[-1].sendall(request.encode())  # never reads the answer
    with server.client("the-admin") as client:
        for _ in range(2):
            with client.stream("GET", "/manage/stream") as events:
                lines = events.iter_lines()
                assert next(lines) == "event: state"
                assert json.loads(next(lines).removeprefix("data: "))["state"] == "ok"
                # Updates arrive although the other subscribers read nothing.
                answer = client.post("/v1/chat/completions", json=CHAT)
                assert answer.status_code == 200
                assert next(line for line in lines if line == "event: state")
    for connection in stalled:
        connection.close()


def test_a_draining_server_finishes_streams_and_refuses_new_requests(server: Operated) -> None:
    """Run last, since this test stops the shared server."""
    with server.client("second") as client, server.client("the-admin") as admin:
        body = CHAT | {"max_tokens": 300, "ignore_eos": True, "stream": True}

        def num_busy() -> int:
            return sum(slot["is_processing"] for slot in admin.get("/slots").json())

        eventually(lambda: num_busy() == 0, within_s=60)  # streams of earlier tests
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            frames = answer.iter_lines()
            next(frames)
            assert num_busy() <= 1
            assert admin.post("/manage/drain").json()["status"] == "draining"
            refused = client.post("/v1/chat/completions", json=CHAT)
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                503,
                "server_shutdown",
            )
            assert int(refused.headers["retry-after"]) >= 1
            assert client.get("/health").json()["status"] == "draining"
            assert client.get("/props").json()["state"] == "draining"
            assert [line for line in frames if line][-1] == "data: [DONE]"
        assert server.process.poll() is None
        assert server.stop() == 0
