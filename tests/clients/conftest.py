"""The server that the runner started, as the tests of every client need it."""

import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

BUSY_S = 2.5


def post(url: str, **body: Any) -> Any:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=60)


@pytest.fixture(scope="session")
def url() -> str:
    """The name that a client has for its base URL."""
    return f"{os.environ['HEADRACE_TEST_URL']}/v1"


@pytest.fixture(scope="session")
def grammars(url: str) -> None:
    """For tests of what only grammars can enforce: structured output and forced tool calls."""
    schema = {"name": "it", "schema": {"type": "object"}}
    wanted = {"type": "json_schema", "json_schema": schema}
    question = [{"role": "user", "content": "Hello"}]
    try:
        post(f"{url}/chat/completions", messages=question, response_format=wanted, max_tokens=1)
    except urllib.error.HTTPError as error:
        told = json.load(error)["error"]
        if told["code"] != "unsupported_parameter":
            raise
        pytest.skip(f"the server has no grammars: {told['message']}")


@pytest.fixture
def busy(url: str) -> Iterator[None]:
    """Every place of the server is taken for 2.5 s, so that one who asks hears heartbeats first."""
    taken, began = threading.Event(), time.monotonic()

    def take() -> None:
        with post(
            f"{url}/completions", prompt=["Once"] * 8, max_tokens=-1, ignore_eos=True, stream=True
        ) as answer:
            for line in answer:
                if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["text"]:
                    taken.set()
                if time.monotonic() - began > BUSY_S:
                    return

    thread = threading.Thread(target=take)
    thread.start()
    assert taken.wait(60)
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    thread.join()
    assert took > BUSY_S - 0.5, "the answer came while no place was free"
