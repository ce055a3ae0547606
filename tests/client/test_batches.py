"""A batch that is followed over what lies before its server."""

import json
from typing import Any

import pytest

from headrace import Refused
from headrace.client import batches
from headrace.client.batches import BatchClient
from tests.client.builders import Given, listed_server

BEGUN: dict[str, Any] = {"id": "batch-1", "status": "in_progress"}
DONE = Given(body=json.dumps(BEGUN | {"status": "completed"}).encode())


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "POLL_S", 0.0)


def test_a_batch_is_followed_over_a_balancer_that_lost_its_server() -> None:
    told: list[str] = []
    answers = [Given(502, b"<html>Bad Gateway</html>"), Given(503), Given(429), DONE]
    with (
        listed_server(*answers) as server,
        BatchClient(server.url, None, lambda reason, _: told.append(reason)) as client,
    ):
        seen = [batch["status"] for batch in client.follow(BEGUN)]
    assert seen == ["in_progress"] * 4 + ["completed"]
    assert ["502" in told[0], "503" in told[1], "429" in told[2]] == [True] * 3


def test_a_batch_that_is_not_there_is_not_waited_for() -> None:
    gone = Given(404, b'{"error":{"message":"No such batch.","code":"not_found"}}')
    with (
        listed_server(gone) as server,
        BatchClient(server.url, None, lambda *_: None) as client,
        pytest.raises(Refused, match="No such batch"),
    ):
        list(client.follow(BEGUN))


def test_results_come_once_over_a_server_that_goes_while_they_come() -> None:
    whole = b"".join(b'{"line": %d}\n' % number for number in range(5000))
    cut = Given(body=whole[:50_000], missing=len(whole) - 50_000)
    with (
        listed_server(cut, Given(502), Given(body=whole)) as server,
        BatchClient(server.url, None, lambda *_: None) as client,
    ):
        assert b"".join(client.results("file-1")) == whole
