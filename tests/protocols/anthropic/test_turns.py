import base64
from typing import Any

import pytest

from headrace.protocols.anthropic import messages as anthropic_messages
from headrace_common.errors import RequestError
from headrace_common.request import Chat
from tests.gateway.builders import parsed

ASKED = {"model": "headrace-mini", "max_tokens": 16}
USER = {"role": "user", "content": "hi"}
CALL = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}


def read(*turns: dict[str, Any]) -> tuple[tuple[dict[str, Any], ...], tuple[str, ...]]:
    """Return the messages that the template receives and the paths that are left out."""
    body = ASKED | {"messages": list(turns)}
    skipped = anthropic_messages.read(body)["skipped"]
    (chat,) = parsed(anthropic_messages, body).prompts
    assert isinstance(chat, Chat)
    return chat.messages, skipped


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def document(source: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "document", "source": source, **more}


PLAIN = {"type": "text", "media_type": "text/plain", "data": "A wheel turns."}
ENCODED = {
    "type": "base64",
    "media_type": "text/plain",
    "data": base64.b64encode(b"A wheel turns.").decode(),
}
WITH_TEXT = [
    (document(PLAIN), "<document>\nA wheel turns.\n</document>\n"),
    (document(ENCODED), "<document>\nA wheel turns.\n</document>\n"),
    (
        document({"type": "content", "content": [text("A wheel"), text(" turns.")]}, title="Mills"),
        "<document>\nTitle: Mills\nA wheel turns.\n</document>\n",
    ),
    (
        document({"type": "content", "content": "A wheel turns."}, context="From 1850."),
        "<document>\nContext: From 1850.\nA wheel turns.\n</document>\n",
    ),
    (
        {
            "type": "search_result",
            "source": "http://mills",
            "title": "Mills",
            "content": [text("It turns.")],
        },
        "<search_result>\nTitle: Mills\nSource: http://mills\nIt turns.\n</search_result>\n",
    ),
    ({"type": "tool_reference", "tool_name": "add"}, "The tool add is available.\n"),
    (text("Cited.") | {"citations": [{"type": "char_location"}]}, "Cited."),
    ({"type": "made_in_2030", "text": "New."}, "New.\n"),
    ({"type": "made_in_2030", "content": [text("New.")]}, "New.\n"),
    ({"type": "made_in_2030", "summary": "New."}, "New.\n"),
    ({"type": "made_in_2030", "input": {"type": 5}}, '{"type": 5}\n'),
    ({"text": "Without a type."}, "Without a type.\n"),
    (CALL, '{"a": 1}\n'),
]


@pytest.mark.parametrize(("block", "seen"), WITH_TEXT)
def test_a_block_that_carries_text_is_shown_in_a_turn_and_in_a_result(
    block: dict[str, Any], seen: str
) -> None:
    messages, skipped = read(user(block, text("?")))
    assert (messages[0]["content"], skipped) == (f"{seen}?", ())
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [block]}
    messages, skipped = read(USER, assistant(CALL), user(result))
    assert (messages[2]["content"], skipped) == (seen, ())


PDF = document({"type": "base64", "media_type": "application/pdf", "data": "x"}, title="a.pdf")
WITHOUT_TEXT = [
    (PDF, "[The document a.pdf was left out: this server cannot read it.]\n"),
    (
        document({"type": "file", "file_id": "f"}),
        "[The document was left out: this server cannot read it.]\n",
    ),
    (
        {"type": "image", "source": {"type": "file", "file_id": "f"}},
        "[The image was left out: this server cannot read it.]\n",
    ),
    ({"type": "container_upload", "file_id": "f"}, ""),
    ({"type": "mcp_tool_listing", "mcp_server_name": "x", "tools": []}, ""),
    ({"type": "fallback", "from": {}, "to": {}}, ""),
    ({"type": "tool_removal", "tool": {"type": "tool_reference"}}, ""),
    ({"type": "made_in_2030", "bits": 5}, ""),
    ({"type": "redacted_thinking", "data": "x"}, ""),
    ({"type": "compaction", "content": None}, ""),
]


@pytest.mark.parametrize(("block", "seen"), WITHOUT_TEXT)
def test_a_block_without_text_is_left_out_and_named(block: dict[str, Any], seen: str) -> None:
    messages, skipped = read(user(text("Well. "), block, text("?")))
    assert messages == ({"role": "user", "content": f"Well. {seen}?"},)
    assert skipped == ("messages[0].content[1]",)


SEARCHED = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "mill"}}
FOUND = {
    "type": "web_search_tool_result",
    "tool_use_id": "s1",
    "content": [
        {"type": "web_search_result", "title": "Mills", "url": "http://m", "encrypted_content": "x"}
    ],
}
RUN_ELSEWHERE = [
    (SEARCHED, FOUND, "Mills\nhttp://m\n"),
    (
        SEARCHED | {"name": "web_fetch"},
        {
            "type": "web_fetch_tool_result",
            "tool_use_id": "s1",
            "content": {"type": "web_fetch_result", "url": "http://m", "content": document(PLAIN)},
        },
        "http://m\n<document>\nA wheel turns.\n</document>\n",
    ),
    (
        SEARCHED | {"name": "code_execution"},
        {
            "type": "bash_code_execution_tool_result",
            "tool_use_id": "s1",
            "content": {
                "type": "bash_code_execution_result",
                "stdout": "3",
                "stderr": "warned",
                "return_code": 0,
                "content": [],
            },
        },
        "3\nwarned\n",
    ),
    (
        SEARCHED | {"name": "text_editor_code_execution"},
        {
            "type": "text_editor_code_execution_tool_result",
            "tool_use_id": "s1",
            "content": {
                "type": "text_editor_code_execution_str_replace_result",
                "lines": ["-a", "+b"],
            },
        },
        "-a\n+b\n",
    ),
    (
        SEARCHED | {"name": "tool_search_tool_regex"},
        {
            "type": "tool_search_tool_result",
            "tool_use_id": "s1",
            "content": {
                "type": "tool_search_tool_search_result",
                "tool_references": [{"type": "tool_reference", "tool_name": "add"}],
            },
        },
        "The tool add is available.\n",
    ),
    (
        {"type": "mcp_tool_use", "id": "s1", "name": "ask", "server_name": "m", "input": {}},
        {
            "type": "mcp_tool_result",
            "tool_use_id": "s1",
            "is_error": True,
            "content": [text("Gone.")],
        },
        "Error: Gone.",
    ),
    (
        SEARCHED,
        FOUND | {"content": {"type": "web_search_tool_result_error", "error_code": "unavailable"}},
        "unavailable\n",
    ),
]


@pytest.mark.parametrize(("call", "result", "seen"), RUN_ELSEWHERE)
def test_a_call_that_a_provider_ran_is_shown_with_its_result(
    call: dict[str, Any], result: dict[str, Any], seen: str
) -> None:
    turn = assistant(text("I look."), call, result, text("I have looked."))
    messages, skipped = read(USER, turn, USER)
    assert [it["role"] for it in messages] == ["user", "assistant", "tool", "assistant", "user"]
    assert messages[1]["content"] == "I look."
    function = {"name": call["name"], "arguments": call["input"]}
    assert messages[1]["tool_calls"] == [{"id": "s1", "type": "function", "function": function}]
    assert messages[2] == {
        "role": "tool",
        "tool_call_id": "s1",
        "name": call["name"],
        "content": seen,
    }
    assert (messages[3]["content"], skipped) == ("I have looked.", ())


def test_an_unfinished_call_of_a_provider_is_left_out_of_its_turn() -> None:
    messages, skipped = read(USER, assistant(text("I look."), SEARCHED))
    assert messages == (USER, {"role": "assistant", "content": "I look."})
    assert skipped == ("messages[1].content[1]",)


def test_a_result_without_its_call_becomes_user_text() -> None:
    result = {"type": "tool_result", "tool_use_id": "t9", "content": "3"}
    messages, skipped = read(USER, assistant(text("Yes.")), user(result, text("?")))
    assert messages[2:] == ({"role": "user", "content": "Result of t9:\n3\n?"},)
    assert skipped == ()


def test_a_call_without_a_result_is_shown() -> None:
    messages, _ = read(USER, assistant(CALL), USER)
    assert [it["role"] for it in messages] == ["user", "assistant", "user"]
    assert messages[1]["tool_calls"][0]["function"]["name"] == "add"


def test_a_summary_replaces_all_messages_before_it() -> None:
    summary = {"type": "compaction", "content": "They met.", "signature": "x"}
    messages, skipped = read(
        USER, assistant(CALL), assistant(text("Old."), summary, text("Go on.")), USER
    )
    assert messages == (
        {"role": "user", "content": "Summary of the conversation so far:\nThey met.\n"},
        {"role": "assistant", "content": "Go on."},
        USER,
    )
    assert skipped == ()


def test_a_message_of_an_unknown_role_becomes_a_user_message() -> None:
    messages, skipped = read(USER, assistant(text("Yes.")), {"role": "critic", "content": "No."})
    assert messages[2] == {"role": "user", "content": "No."}
    assert skipped == ("messages[2].role",)


def test_a_system_message_may_come_between_turns() -> None:
    said = {"role": "system", "content": "Be brief."}
    cleared = said | {"clear_at": "next_user_message"}
    assert read(USER, said, assistant(text("Yes.")), USER)[0][1] == said
    assert read(USER, cleared)[0] == (USER, said)
    assert read(USER, cleared, assistant(text("Yes.")), USER)[0] == (
        USER,
        {"role": "assistant", "content": "Yes."},
        USER,
    )
    only_config = {"role": "system", "output_config": {"effort": "low"}}
    assert read(USER, only_config)[0] == (USER,)


def test_a_thinking_block_without_text_is_left_out_and_named() -> None:
    withheld = {"type": "thinking", "thinking": "", "signature": "x"}
    messages, skipped = read(USER, assistant(withheld, text("Yes.")), USER)
    assert messages[1] == {"role": "assistant", "content": "Yes."}
    assert skipped == ("messages[1].content[0]",)


@pytest.mark.parametrize("content", ["", []])
def test_a_turn_may_be_empty(content: Any) -> None:
    messages, _ = read(USER, {"role": "assistant", "content": content}, USER)
    assert messages[1] == {"role": "assistant", "content": ""}


def test_an_image_within_a_document_reaches_the_model() -> None:
    image = {"type": "image", "source": {"type": "url", "url": "http://x/a.png"}}
    messages, _ = read(user(document({"type": "content", "content": [text("See:"), image]})))
    assert [part["type"] for part in messages[0]["content"]] == ["text", "text", "image", "text"]


def test_the_messages_of_a_turn_are_a_prefix_of_those_of_the_next_turn() -> None:
    turns = [
        user(document(PLAIN), text("?")),
        assistant(SEARCHED, FOUND, text("Found."), CALL),
        user({"type": "tool_result", "tool_use_id": "t1", "content": "3"}),
        assistant(text("Three.")),
        USER,
    ]
    shown, _ = read(*turns[:3])
    assert read(*turns)[0][: len(shown)] == shown


@pytest.mark.parametrize("call_id", [None, 5, [], ""])
def test_a_provider_call_with_an_invalid_id_is_left_out(call_id: Any) -> None:
    turn = assistant(SEARCHED | {"id": call_id}, FOUND | {"tool_use_id": call_id}, text("Found."))
    messages, skipped = read(USER, turn, USER)
    assert messages[1] == {"role": "assistant", "content": "Mills\nhttp://m\nFound."}
    assert skipped == ("messages[1].content[0]",)


def test_a_document_whose_base64_is_broken_is_left_out() -> None:
    messages, skipped = read(user(document(ENCODED | {"data": "A"}), text("?")))
    assert messages[0]["content"].endswith("cannot read it.]\n?")
    assert skipped == ("messages[0].content[0]",)
    wrapped = ENCODED | {"data": base64.encodebytes(b"A wheel turns." * 9).decode()}
    messages, skipped = read(user(document(wrapped)))
    assert "A wheel turns." * 9 in messages[0]["content"] and not skipped


def test_a_system_prompt_shows_texts_and_names_what_it_cannot_show() -> None:
    image = {"type": "image", "source": {"type": "url", "url": "http://x/a.png"}}
    upload = {"type": "container_upload", "file_id": "f"}
    system = [text("Be brief. "), document(PLAIN), upload, image]
    fields = anthropic_messages.read(ASKED | {"messages": [USER], "system": system})
    assert fields["messages"][0] == {
        "role": "system",
        "content": "Be brief. <document>\nA wheel turns.\n</document>\n",
    }
    assert fields["skipped"] == ("system[2]", "system[3]")


def test_a_conversation_of_empty_system_messages_alone_is_refused() -> None:
    with pytest.raises(RequestError, match="no message with content") as caught:
        read({"role": "system", "content": ""})
    assert (caught.value.code, caught.value.param) == ("invalid_value", "messages")


def test_a_history_of_unknown_blocks_alone_is_not_refused() -> None:
    listing = {"type": "mcp_tool_listing", "mcp_server_name": "w", "tools": []}
    messages, skipped = read({"role": "system", "content": [listing]})
    assert list(messages) == [{"role": "user", "content": ""}]
    assert skipped == ("messages[0].content[0]",)
