"""Conversations of /v1/responses that are empty, or too long for the context, over real HTTP."""

from typing import Any

import httpx
import pytest

from tools.harness.servers import ServerProcess

SHORT = {"temperature": 0, "max_output_tokens": 8}


@pytest.fixture(scope="module")
def url(server: ServerProcess) -> str:
    return f"{server.url}/v1/responses"


def post(url: str, **body: Any) -> httpx.Response:
    return httpx.post(url, json=SHORT | body, timeout=60)


def said(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text}


def long_talk() -> list[dict[str, Any]]:
    """Return a conversation with about 9,000 tokens; the mini model takes 4,096."""
    system = said("developer", "Be brief.")
    call = {"type": "function_call", "name": "add", "arguments": '{"a":1}'}
    output = {"type": "function_call_output", "output": "2 " * 200}
    rounds = [
        item
        for i in range(20)
        for item in (
            said("user", f"{i} " + "1, 2, 3 " * 20),
            call | {"call_id": f"c{i}"},
            output | {"call_id": f"c{i}"},
        )
    ]
    return [system, *rounds, said("user", "Count from 1 to 5.")]


def test_an_empty_input_is_answered_and_continues(url: str) -> None:
    for body in ({"input": []}, {"input": [], "instructions": "Be brief."}):
        assert post(url, **body).json()["status"] in ("completed", "incomplete")
    first = post(url, input="Count from 1 to 5.", max_output_tokens=40).json()
    whole = [said("user", "Count from 1 to 5."), *first["output"]]
    expected = post(url, input=whole).json()["usage"]["input_tokens"]
    for body in ({"input": []}, {}):
        continued = post(url, previous_response_id=first["id"], **body).json()
        assert continued["usage"]["input_tokens"] == expected
    assert post(url).json()["error"]["code"] == "missing_required_parameter"


def test_a_phase_is_written_and_read_again(url: str) -> None:
    first = post(url, input="Count from 1 to 5.", max_output_tokens=40).json()
    (message,) = first["output"]
    assert message["phase"] == "final_answer"
    noted = said("assistant", "I look.") | {"phase": "commentary"}
    second = post(url, input=[said("user", "Hi"), noted, message, said("user", "And?")])
    assert "x-headrace-ignored" not in second.headers
    items = httpx.get(f"{url}/{second.json()['id']}/input_items?order=asc").json()["data"]
    assert [item.get("phase") for item in items] == [None, "commentary", "final_answer", None]


def test_old_items_are_dropped_until_the_conversation_fits(url: str) -> None:
    talk = long_talk()
    refused = post(url, input=talk)
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert (
        refused.json()["error"]["message"]
        == post(url, input=talk, truncation="disabled").json()["error"]["message"]
    )
    response = post(url, input=talk, truncation="auto").json()
    assert response["status"] in ("completed", "incomplete") and response["truncation"] == "auto"
    ((first, last),) = response["truncated_items"]
    # The instructions stay; the first item that is kept is no output without its call.
    assert first == 1 and talk[last + 1]["type"] != "function_call_output"
    kept = [talk[0], *talk[last + 1 :]]
    same = post(url, input=kept).json()
    assert same["usage"]["input_tokens"] == response["usage"]["input_tokens"] <= 4096 - 8
    # The next older call would not have fitted.
    more = last - 1 if talk[last]["type"] == "function_call_output" else last
    longer = post(url, input=[talk[0], *talk[more:]], truncation="auto").json()
    assert longer["usage"]["input_tokens"] == response["usage"]["input_tokens"]


def test_what_was_dropped_is_kept_for_the_next_response(url: str) -> None:
    talk = long_talk()
    first = post(url, input=talk, truncation="auto").json()
    listed = httpx.get(f"{url}/{first['id']}/input_items?order=asc&limit=100").json()["data"]
    assert len(listed) == len(talk)
    chained = post(url, input="More", previous_response_id=first["id"], truncation="auto").json()
    assert (
        chained["truncated_items"][0][0] == 1
        and "truncated_items" not in post(url, input="Hi").json()
    )


def test_one_message_that_never_fits_is_refused(url: str) -> None:
    talk = [said("user", "a"), said("assistant", "b"), said("user", "1, 2, " * 4000)]
    error = post(url, input=talk, truncation="auto").json()["error"]
    assert error["code"] == "context_length_exceeded"
