"""An answer that was left unread, and what the server says of it."""

from pathlib import Path

import pytest

from headrace.cli.chat import ChatLoop
from headrace.cli.chat_screen import Screen
from headrace.cli.chat_store import Conversation, Transcripts
from headrace.client.client import Client
from headrace.client.errors import Refused
from tests.client.builders import STREAM, Given, accepted, finish, listed_server, tokens


def unread(folder: Path, client: Client) -> ChatLoop:
    kept = Transcripts(folder)
    left = Conversation([{"role": "user", "content": "a long question"}], STREAM)
    kept.write(left)
    return ChatLoop(client, Screen(), kept, left, {})


@pytest.mark.parametrize("before", [[], [Given(body=accepted() + tokens(1, "a"))]])
def test_a_wrong_key_forgets_no_answer(tmp_path: Path, before: list[Given]) -> None:
    wrong = Given(401, b'{"error":{"message":"Wrong key.","code":"invalid_api_key"}}')
    with listed_server(*before, wrong) as server, Client(server.url) as client:
        chat = unread(tmp_path, client)
        with pytest.raises(Refused, match="Wrong key"):
            chat.read_on()
    assert Transcripts(tmp_path).read(1).stream_id == STREAM
    assert [one["role"] for one in chat.conversation.messages] == ["user"]


def test_an_answer_that_the_server_has_forgotten_is_asked_for_no_more(tmp_path: Path) -> None:
    with listed_server(Given(404)) as server, Client(server.url) as client:
        unread(tmp_path, client).read_on()
    assert Transcripts(tmp_path).read(1).stream_id == ""


def test_ctrl_c_while_an_answer_is_kept_takes_neither_it_nor_its_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = Given(headers={"x-stream-id": STREAM})
    kept = Transcripts(tmp_path)
    write = kept.write

    def interrupted(conversation: Conversation) -> None:
        if not conversation.stream_id:
            raise KeyboardInterrupt
        write(conversation)

    monkeypatch.setattr(kept, "write", interrupted)
    whole = Given(body=accepted() + tokens(1, "a") + finish(2))
    with listed_server(begun, whole) as server, Client(server.url) as client:
        chat = ChatLoop(client, Screen(), kept, Conversation(), {})
        with pytest.raises(KeyboardInterrupt):
            chat.ask("hi")
    assert [one["content"] for one in chat.conversation.messages] == ["hi", "a"]


def test_a_conversation_that_cannot_be_stored_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    kept = Transcripts(tmp_path / "file" / "chats")
    begun = Given(headers={"x-stream-id": STREAM})
    whole = Given(body=accepted() + tokens(1, "a") + finish(2))
    with listed_server(begun, whole) as server, Client(server.url) as client:
        chat = ChatLoop(client, Screen(), kept, Conversation(), {})
        chat.ask("hi")
    assert [one["content"] for one in chat.conversation.messages] == ["hi", "a"]
    assert capsys.readouterr().err.count("this conversation is not stored: Not a directory") == 1
