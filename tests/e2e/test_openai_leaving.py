"""Tests of clients that disconnect: the server aborts their requests."""

import itertools
import json
import socket
import struct
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from tools.harness.eventually import eventually
from tools.harness.servers import ServerProcess, running_server

# These prompts run one after another for minutes, so only a cancellation ends them in time.
ENDLESS = {"prompt": ["Once"] * 64, "max_tokens": -1, "ignore_eos": True, "attach": False}


@pytest.fixture(scope="module")
def narrow() -> Iterator[ServerProcess]:
    """Yield a server with one slot and no queue, so a running request blocks the next one.

    An abandoned stream to which an equal request could attach would run for ten minutes.
    """
    flags = ("--max-num-seqs", "1", "--max-num-queued-reqs", "0", "--linger-s", "600")
    with running_server(*flags) as server:
        yield server


def client_of(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    own = {name: fields.pop(name) for name in ("ignore_eos", "attach") if name in fields}
    return client.completions.create(model="headrace-mini", extra_body=own, **fields)


def is_free(server: ServerProcess) -> bool:
    try:
        return bool(complete(client_of(server), prompt="Once", max_tokens=1).choices)
    except openai.RateLimitError:
        return False


def request_of(**body: Any) -> bytes:
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def connect(server: ServerProcess) -> socket.socket:
    address = urlsplit(server.url)
    return socket.create_connection((address.hostname, address.port), timeout=30)


def test_a_request_without_attach_ends_when_its_client_disconnects(narrow: ServerProcess) -> None:
    eventually(lambda: is_free(narrow), within_s=30)
    with connect(narrow) as connection:
        connection.sendall(request_of(**ENDLESS))
        eventually(lambda: not is_free(narrow), within_s=30)
    eventually(lambda: is_free(narrow), within_s=30)


def test_a_full_server_sends_retry_after(narrow: ServerProcess) -> None:
    eventually(lambda: is_free(narrow), within_s=30)
    with complete(client_of(narrow), **ENDLESS, stream=True) as stream:
        assert len(list(itertools.islice(stream, 3))) == 3
        with pytest.raises(openai.RateLimitError) as caught:
            complete(client_of(narrow), prompt="Once")
        assert int(caught.value.response.headers["retry-after"]) >= 1
    eventually(lambda: is_free(narrow), within_s=30)


def test_a_client_timeout_frees_the_slot_of_its_request(narrow: ServerProcess) -> None:
    eventually(lambda: is_free(narrow), within_s=30)
    hasty = client_of(narrow).with_options(timeout=1)
    with pytest.raises(openai.APITimeoutError):
        complete(hasty, **ENDLESS)
    eventually(lambda: is_free(narrow), within_s=30)


def test_a_half_closed_connection_counts_as_disconnected(narrow: ServerProcess) -> None:
    eventually(lambda: is_free(narrow), within_s=30)
    with connect(narrow) as connection:
        connection.sendall(request_of(**ENDLESS, stream=True))
        eventually(lambda: not is_free(narrow), within_s=30)
        connection.shutdown(socket.SHUT_WR)
        eventually(lambda: is_free(narrow), within_s=30)


def test_a_reset_connection_counts_as_disconnected(narrow: ServerProcess) -> None:
    eventually(lambda: is_free(narrow), within_s=30)
    connection = connect(narrow)
    connection.sendall(request_of(**ENDLESS, stream=True))
    eventually(lambda: not is_free(narrow), within_s=30)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    eventually(lambda: is_free(narrow), within_s=30)
