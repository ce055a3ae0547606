"""Clients that leave: their work ends, and the next one gets the place."""

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

# one after another, minutes in all: nobody waits for these to end by themselves
ENDLESS = {"prompt": ["Once"] * 64, "max_tokens": -1, "ignore_eos": True, "attach": False}


@pytest.fixture(scope="module")
def narrow() -> Iterator[ServerProcess]:
    """One place and no queue, so that a request that is not over refuses the next one.

    Streams that an equal request could find would go on for ten minutes.
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


def test_work_that_no_request_could_find_ends_with_its_client(narrow: ServerProcess) -> None:
    eventually(lambda: is_free(narrow), within_s=30)
    with connect(narrow) as connection:
        connection.sendall(request_of(**ENDLESS))
        eventually(lambda: not is_free(narrow), within_s=30)
    eventually(lambda: is_free(narrow), within_s=30)


def test_a_full_server_says_when_to_come_back(narrow: ServerProcess) -> None:
    eventually(lambda: is_free(narrow), within_s=30)
    with complete(client_of(narrow), **ENDLESS, stream=True) as stream:
        assert len(list(itertools.islice(stream, 3))) == 3
        with pytest.raises(openai.RateLimitError) as caught:
            complete(client_of(narrow), prompt="Once")
        assert int(caught.value.response.headers["retry-after"]) >= 1
    eventually(lambda: is_free(narrow), within_s=30)


def test_a_client_that_gives_up_a_whole_answer_frees_its_place(narrow: ServerProcess) -> None:
    eventually(lambda: is_free(narrow), within_s=30)
    hasty = client_of(narrow).with_options(timeout=1)
    with pytest.raises(openai.APITimeoutError):
        complete(hasty, **ENDLESS)
    eventually(lambda: is_free(narrow), within_s=30)


def test_a_half_closed_stream_is_a_client_that_left(narrow: ServerProcess) -> None:
    eventually(lambda: is_free(narrow), within_s=30)
    with connect(narrow) as connection:
        connection.sendall(request_of(**ENDLESS, stream=True))
        eventually(lambda: not is_free(narrow), within_s=30)
        connection.shutdown(socket.SHUT_WR)
        eventually(lambda: is_free(narrow), within_s=30)


def test_a_reset_connection_is_a_client_that_left(narrow: ServerProcess) -> None:
    eventually(lambda: is_free(narrow), within_s=30)
    connection = connect(narrow)
    connection.sendall(request_of(**ENDLESS, stream=True))
    eventually(lambda: not is_free(narrow), within_s=30)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    eventually(lambda: is_free(narrow), within_s=30)
