"""Both clients against a real server, behind a proxy that cuts."""

import asyncio
import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from headrace import (
    AsyncClient,
    Client,
    ConfigError,
    HeadraceError,
    Refused,
    RequestFailed,
    SamplingOptions,
    StreamFailed,
    Unreachable,
)
from headrace.client.events import Heartbeat, Tokens, Update
from tests.client.builders import cutting_proxy
from tools.harness.eventually import eventually
from tools.harness.servers import ServerProcess, running_server
from tools.harness.tiny_models import make_tiny_model

CHAT = [{"role": "user", "content": "hi"}]
LONG = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
ENDLESS = {"max_tokens": 900, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    with running_server(str(folder), "--threads", "1", "--max-model-len", "1024") as running:
        yield running


def numbers(updates: Iterable[Update]) -> list[int]:
    return [update.seq for update in updates if update.seq is not None]


def state_of(server: ServerProcess, stream_id: str) -> str:
    return str(httpx.get(f"{server.url}/v1/streams/{stream_id}").json()["state"])


def test_an_answer_is_that_of_the_route(server: ServerProcess) -> None:
    with Client(server.url) as client:
        answer = client.chat(CHAT, **LONG)
        told = client.chat(CHAT, max_tokens=1, return_ingestion=True).ingestion
    assert told is not None and (told.strategy, told.chunks > 0) == ("native-text", True)
    assert answer.ingestion is None
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


def test_several_conversations_are_answered_in_order(
    server: ServerProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    async def ask() -> list[str]:
        async with AsyncClient(server.url) as client:
            answers = await client.chat(asked, options=options, progress=True)
            return [answer.text for answer in answers]

    options, asked = SamplingOptions(temperature=0, max_tokens=6), ["hi", "good morning", "x"]
    with Client(server.url) as client:
        alone = [client.chat(one, options=options).text for one in asked]
        together = client.chat(asked, options=options, progress=True)
        assert [answer.text for answer in together] == alone
    assert asyncio.run(ask()) == alone
    assert capfd.readouterr().err.count("answers: 3 of 3 in ") == 2


def test_a_refused_conversation_stops_the_others(server: ServerProcess) -> None:
    async def ask() -> None:
        async with AsyncClient(server.url) as client:
            await client.chat(asked, **ENDLESS)

    def num_running() -> int:
        return int(httpx.get(f"{server.url}/manage/state").json()["running"])

    asked = ["hi", [{"role": 5, "content": "x"}], "hi"]
    for call in (lambda: Client(server.url).chat(asked, **ENDLESS), lambda: asyncio.run(ask())):
        with pytest.raises(Refused) as refused:
            call()
        assert refused.value.__notes__ == ["This is about input 1 of the list, counted from 0."]
        eventually(lambda: num_running() == 0)


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


@pytest.mark.parametrize("has_block", [True, False])
def test_a_loop_that_is_left_within_its_blocks_ends_without_a_word(
    server: ServerProcess, has_block: bool
) -> None:
    async def run() -> str:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
        async with AsyncClient(server.url) as client:
            stream = client.stream(CHAT, **ENDLESS)
            async with stream if has_block else contextlib.nullcontext():
                async for _ in stream:
                    break
            return stream.id

    said: list[object] = []
    stream_id = asyncio.run(run())
    eventually(lambda: state_of(server, stream_id) == "cancelled")
    assert not said


def test_a_stream_is_read_on_where_another_client_left_it(server: ServerProcess) -> None:
    with Client(server.url) as client:
        first = client.stream(CHAT, **LONG)
        updates = first.updates()
        seen = numbers([next(updates), next(updates)])
        rest = numbers(client.attach(first.id, after=seen[-1]).updates())
        rest_here = numbers(updates)
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
    with Client("127.0.0.1:9") as client, pytest.raises(Unreachable, match=r"127.0.0.1:9: .*refus"):
        client.chat(CHAT)
    with pytest.raises(ConfigError, match="not a server's address"):
        Client("file:///tmp")
    with pytest.raises(ConfigError, match="API key"):
        Client(api_key="new\nline")


def test_a_string_is_a_message_of_the_user_and_a_prompt_is_raw(server: ServerProcess) -> None:
    fields = {"temperature": 0, "max_tokens": 8}
    with Client(f"{server.url}/v1/") as client:
        chat, raw = client.chat(CHAT, **fields).text, client.completions("hi", **fields).text
        assert client.chat("hi", **fields).text == chat != raw
        assert "".join(piece.text for piece in client.stream("hi", **fields)) == chat
        assert "".join(piece.text for piece in client.stream(prompt="hi", **fields)) == raw


def test_leaving_the_block_of_a_stream_stops_it(server: ServerProcess) -> None:
    with Client(server.url) as client:
        with client.stream(CHAT, **ENDLESS) as stream:
            pieces = iter(stream)
            next(pieces)
        assert state_of(server, stream.id) == "cancelled"


def test_leaving_the_block_of_an_asynchronous_stream_stops_it(server: ServerProcess) -> None:
    async def leave() -> str:
        async with AsyncClient(server.url) as client:
            async with client.stream(CHAT, **ENDLESS) as stream:
                pieces = aiter(stream)
                await anext(pieces)
            return stream.id

    assert state_of(server, asyncio.run(leave())) == "cancelled"


def test_stopping_what_is_no_stream_is_refused(server: ServerProcess) -> None:
    with Client(server.url) as client:
        for nobody in ("nope", "no/such", "nö"):
            with pytest.raises(Refused, match="does not exist"):
                client.stop(nobody)
    with Client("127.0.0.1:9") as client, pytest.raises(Unreachable):
        client.stop("nope")


def test_the_models_are_those_that_may_be_asked_for(server: ServerProcess) -> None:
    async def ask() -> list[str]:
        async with AsyncClient(server.url) as client:
            return await client.models()

    with Client(server.url) as client:
        assert client.models() == asyncio.run(ask()) == ["tiny"]


def test_all_that_can_go_wrong_has_one_root() -> None:
    for error in (ConfigError, Unreachable, RequestFailed):
        assert issubclass(error, HeadraceError)
    for error in (Refused, StreamFailed):
        assert issubclass(error, RequestFailed)


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


def test_a_killed_engine_is_told_of_before_any_heartbeat_is_due(server: ServerProcess) -> None:
    with Client(server.url) as client, client.stream(CHAT, n=8, **ENDLESS) as stream:
        updates = stream.updates()
        assert any(isinstance(update, Tokens) for update in updates)
        server.kill_engine()
        beat = next(update for update in updates if isinstance(update, Heartbeat))
        assert (beat.state, beat.attempt) == ("recovering", 1)
