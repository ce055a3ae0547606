"""Both clients against a real server, behind a proxy that cuts."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from headrace import AsyncClient, Client
from headrace.client.errors import Refused, StreamFailed, Unreachable
from tests.builders import make_tiny_model
from tests.client.builders import cutting_proxy
from tests.eventually import eventually
from tests.servers import ServerProcess, running_server

CHAT = [{"role": "user", "content": "hi"}]
LONG = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
ENDLESS = {"max_tokens": 900, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    with running_server(str(folder), "--threads", "1", "--max-model-len", "1024") as running:
        yield running


def state_of(server: ServerProcess, stream_id: str) -> str:
    return str(httpx.get(f"{server.url}/v1/streams/{stream_id}").json()["state"])


def test_an_answer_is_that_of_the_route(server: ServerProcess) -> None:
    with Client(server.url) as client:
        answer = client.chat(CHAT, **LONG)
    body = {"messages": CHAT, **LONG, "return_token_ids": True}
    plain = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    choice = plain["choices"][0]
    assert (answer.text, answer.token_ids) == (choice["message"]["content"], choice["token_ids"])
    assert answer.usage["completion_tokens"] == 60


def test_completions_of_several_prompts_come_in_order(server: ServerProcess) -> None:
    with Client(server.url) as client:
        both = client.completions(["one", "two"], temperature=0, max_tokens=4)
        alone = [client.completions(p, temperature=0, max_tokens=4).text for p in ("one", "two")]
    assert [choice.text for choice in both.choices] == alone


def test_no_token_is_lost_or_doubled_over_cut_connections(server: ServerProcess) -> None:
    with Client(server.url) as client:
        whole = client.chat(CHAT, **LONG)
    with cutting_proxy(urlsplit(server.url).port or 0, cut_after=1500) as proxy:
        with Client(proxy.url) as client:
            pieces = list(client.stream(CHAT, **LONG))
        assert proxy.num_connections > 3
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
    assert "".join(piece.text for piece in pieces) == whole.text


def test_the_asynchronous_client_does_the_same(server: ServerProcess) -> None:
    async def ask(url: str) -> tuple[list[int], list[int]]:
        async with AsyncClient(url) as client:
            stream = client.stream(CHAT, **LONG)
            pieces = [piece async for piece in stream]
        async with AsyncClient(server.url) as direct:
            return [t for p in pieces for t in p.token_ids], (
                await direct.chat(CHAT, **LONG)
            ).token_ids

    with cutting_proxy(urlsplit(server.url).port or 0, cut_after=1500) as proxy:
        streamed, whole = asyncio.run(ask(proxy.url))
    assert streamed == whole


def test_leaving_the_loop_stops_the_stream(server: ServerProcess) -> None:
    with Client(server.url) as client:
        stream = client.stream(CHAT, **ENDLESS)
        for _ in stream:
            break
    eventually(lambda: state_of(server, stream.id) == "cancelled")


def test_leaving_an_asynchronous_loop_stops_the_stream(server: ServerProcess) -> None:
    async def leave() -> str:
        async with AsyncClient(server.url) as client:
            stream = client.stream(CHAT, **ENDLESS)
            async for _ in stream:
                break
            await stream.stop()
            return stream.id

    stream_id = asyncio.run(leave())
    eventually(lambda: state_of(server, stream_id) == "cancelled")


def test_a_stream_is_read_on_where_another_client_left_it(server: ServerProcess) -> None:
    with Client(server.url) as client:
        first = client.stream(CHAT, **LONG)
        updates = first.updates()
        seen = [next(updates).seq, next(updates).seq]
        rest = [event.seq for event in client.attach(first.id, after=seen[-1]).updates()]
        rest_here = [event.seq for event in updates]
    assert seen == [0, 1]
    assert rest == rest_here == list(range(2, rest[-1] + 1))


def test_a_stream_stopped_elsewhere_has_failed_here(server: ServerProcess) -> None:
    with Client(server.url) as client, Client(server.url) as other:
        pieces = iter(stream := client.stream(CHAT, **ENDLESS))
        next(pieces)
        other.stop(stream.id)
        with pytest.raises(StreamFailed, match="stopped") as failed:
            list(pieces)
    assert failed.value.code == "cancelled"


def test_a_wrong_field_is_refused_with_its_name(server: ServerProcess) -> None:
    with Client(server.url) as client, pytest.raises(Refused) as refused:
        client.chat(CHAT, temperature="warm")
    assert (refused.value.status, refused.value.param) == (400, "temperature")


def test_a_stream_that_nobody_knows_is_not_waited_for(server: ServerProcess) -> None:
    with Client(server.url) as client, pytest.raises(Refused) as refused:
        list(client.attach("chatcmpl-unknown"))
    assert refused.value.code == "stream_not_found"


def test_without_a_server_the_call_fails_at_once() -> None:
    with Client("http://127.0.0.1:9") as client, pytest.raises(Unreachable):
        client.chat(CHAT)


def test_a_stream_goes_on_over_a_restart_of_the_server(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    flags = (str(folder), "--threads", "1", "--state-dir", str(tmp_path / "state"))
    with running_server(*flags, "--drain-s", "0") as first, Client(first.url) as client:
        expected = client.chat(CHAT, **LONG).token_ids
        port = str(urlsplit(first.url).port)
        pieces = iter(client.stream(CHAT, **(LONG | {"max_tokens": 400})))
        seen = [next(pieces) for _ in range(5)]
        first.stop()
        with running_server(*flags, "--port", port):
            seen += pieces
    ids = [token for piece in seen for token in piece.token_ids]
    assert len(ids) == 400
    assert ids[:60] == expected
