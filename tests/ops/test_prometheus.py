"""Tests of Debian's Prometheus with the files of `deploy`, during an engine kill."""

import os
import signal
import socket
import subprocess
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.metrics.metrics import Metrics
from tools.harness.eventually import eventually
from tools.harness.servers import ServerProcess, running_server
from tools.harness.sse import data_of
from tools.make_grafana_dashboard import PANELS

DEPLOY = Path(__file__).parents[2] / "deploy"
CLIENT, ADMIN = {"x-api-key": "a-client"}, {"x-api-key": "the-admin"}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    keys = {"HEADRACE_API_KEYS": "a-client", "HEADRACE_ADMIN_KEY": "the-admin"}
    with running_server("--max-num-seqs", "4", environment=keys) as running:
        yield running


@pytest.fixture(scope="module")
def prometheus(
    server: ServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """Yield a client of Prometheus' API once it scrapes the server."""
    folder = tmp_path_factory.mktemp("prometheus")
    key, config = folder / "key", folder / "prometheus.yml"
    key.write_text("the-admin")
    text = (DEPLOY / "prometheus.yml").read_text()
    for place, ours in (
        ("headrace:8000", server.url.removeprefix("http://")),
        ("/run/secrets/headrace_admin_key", str(key)),
        ("scrape_interval: 5s", "scrape_interval: 1s"),
    ):
        assert place in text
        text = text.replace(place, ours)
    config.write_text(text)
    run("promtool", "check", "config", str(config))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
            ],
            stderr=log,
            stdout=log,
        )
    try:
        with httpx.Client(base_url=f"http://{address}", timeout=60) as client:
            eventually(lambda: answers(client), within_s=120)
            eventually(lambda: value(client, "up") == 1, within_s=120)
            yield client
    finally:
        process.terminate()
        process.wait(60)


def answers(client: httpx.Client) -> bool:
    try:
        return client.get("/-/ready").status_code == 200
    except httpx.TransportError:
        return False


def run(*command: str, given: str = "") -> None:
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def ask(client: httpx.Client, query: str) -> list[Any]:
    body = client.get(f"/api/v1/query?query={urllib.parse.quote(query)}").json()
    assert body["status"] == "success", body
    return body["data"]["result"]


def value(client: httpx.Client, query: str) -> float | None:
    found = ask(client, query)
    return float(found[0]["value"][1]) if found else None


def chat(server: ServerProcess, number: int, kills: bool = False) -> dict[str, int]:
    """Return a chat's usage; if `kills`, kill the engine after the first token."""
    body = {
        "messages": [{"role": "user", "content": f"Count from {number} to 99."}],
        "max_tokens": 20 + number,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    usage: dict[str, int] = {}
    url = f"{server.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, headers=CLIENT, timeout=120) as answer:
        assert answer.status_code == 200
        for chunk in data_of(answer.iter_lines()):
            usage = chunk.get("usage") or usage
            texts = [choice["delta"].get("content") for choice in chunk.get("choices", ())]
            if kills and any(texts):
                kills = False
                state = httpx.get(f"{server.url}/manage/state", headers=ADMIN, timeout=60).json()
                os.kill(state["engine"]["pid"], signal.SIGKILL)
    return usage


def test_token_counters_in_prometheus_equal_the_usage_of_clients(
    server: ServerProcess, prometheus: httpx.Client
) -> None:
    usages = [chat(server, number, kills=number == 3) for number in range(6)]
    for field, name in (("prompt_tokens", "prompt"), ("completion_tokens", "generated")):
        total = sum(usage[field] for usage in usages)
        query = f"headrace_{name}_tokens_total"
        eventually(lambda: value(prometheus, query) == total, within_s=60)  # noqa: B023
    found = {
        query: value(prometheus, query)
        for query in (
            'headrace_requests_total{outcome="finished"}',
            'headrace_engine_restarts_total{cause="killed"}',
            "headrace_ttft_seconds_count",
            "headrace_inter_token_seconds_count",
            "headrace_engine_up",
        )
    }
    generated = sum(usage["completion_tokens"] for usage in usages)
    assert list(found.values())[:3] == [6, 1, 6], found
    assert 6 <= (found["headrace_inter_token_seconds_count"] or 0) <= generated - 6, found
    assert found["headrace_engine_up"] == 1


def test_promtool_accepts_the_metrics(server: ServerProcess) -> None:
    shown = httpx.get(f"{server.url}/metrics", headers=ADMIN, timeout=60).text
    assert "headrace_ttft_seconds_bucket" in shown and "NaN" not in shown
    run("promtool", "check", "metrics", given=shown)
    run("promtool", "check", "metrics", given=Metrics().text("loading", ()).decode())


@pytest.mark.parametrize("title", [title for title, _, _ in PANELS])
def test_the_dashboards_queries_are_valid(title: str, prometheus: httpx.Client) -> None:
    queries = next(queries for known, _, queries in PANELS if known == title)
    for query in queries.values():
        ask(prometheus, query.replace("$__rate_interval", "1m"))


def test_systemd_accepts_the_unit_file(tmp_path: Path) -> None:
    text = (DEPLOY / "headrace.service").read_text()
    unit = tmp_path / "headrace.service"
    unit.write_text(text.replace("/opt/headrace/bin/headrace", "/bin/true"))
    run("systemd-analyze", "verify", str(unit))


def test_metrics_count_commits_resumes_attaches_and_stops(server: ServerProcess) -> None:
    body = {"prompt": "One, two,", "max_tokens": 8, "stream": True}
    names = {"Idempotency-Key": "again", "X-Conversation-Id": "talk"}
    with httpx.Client(base_url=server.url, headers=CLIENT, timeout=60) as client:
        first = client.post("/v1/completions", json=body, headers=names)
        again = client.post("/v1/completions", json=body, headers=names)
        assert again.headers["x-stream-attached"] == "true"
        stream = f"/v1/streams/{first.headers['x-stream-id']}"
        client.get(f"{stream}/events?after=0").raise_for_status()
        client.get("/v1/stream?conv_id=talk&from=5").raise_for_status()
        client.post(f"{stream}/cancel").raise_for_status()
        client.post("/v1/completions", json=body | {"max_tokens": -5})
    shown = httpx.get(f"{server.url}/metrics", headers=ADMIN, timeout=60).text
    for line in (
        "headrace_attaches_total 1.0",
        'headrace_resumes_total{face="event"} 1.0',
        'headrace_resumes_total{face="byte"} 1.0',
        "headrace_resume_seconds_count 2.0",
        'headrace_stops_total{state="finished"} 1.0',
        'headrace_rejections_total{reason="invalid_value"} 1.0',
    ):
        assert line in shown.splitlines(), line
    assert "headrace_log_commit_seconds_count 0.0" not in shown.splitlines()
