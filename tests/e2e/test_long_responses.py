"""Tests of /v1/responses with empty, too long and compacted conversations."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tools.harness.servers import ServerProcess, running_server

SHORT = {"temperature": 0, "max_output_tokens": 8}


@pytest.fixture(scope="module")
def url(server: ServerProcess) -> str:
    return f"{server.url}/v1/responses"


@pytest.fixture(scope="module")
def short_url() -> Iterator[str]:
    """Yield the route of a server whose context has hardly any room for a summary."""
    with running_server("--max-model-len", "200") as server:
        yield f"{server.url}/v1/responses"


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


def test_an_empty_input_is_answered_and_continues_the_conversation(url: str) -> None:
    for body in ({"input": []}, {"input": [], "instructions": "Be brief."}):
        assert post(url, **body).json()["status"] in ("completed", "incomplete")
    first = post(url, input="Count from 1 to 5.", max_output_tokens=40).json()
    whole = [said("user", "Count from 1 to 5."), *first["output"]]
    expected = post(url, input=whole).json()["usage"]["input_tokens"]
    for body in ({"input": []}, {}):
        continued = post(url, previous_response_id=first["id"], **body).json()
        assert continued["usage"]["input_tokens"] == expected
    assert post(url).json()["error"]["code"] == "missing_required_parameter"


def test_the_phase_of_a_message_is_returned_and_accepted(url: str) -> None:
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
    # The instructions stay, and no tool output is kept without its call.
    assert first == 1 and talk[last + 1]["type"] != "function_call_output"
    kept = [talk[0], *talk[last + 1 :]]
    same = post(url, input=kept).json()
    assert same["usage"]["input_tokens"] == response["usage"]["input_tokens"] <= 4096 - 8
    # The next older call would not have fitted.
    more = last - 1 if talk[last]["type"] == "function_call_output" else last
    longer = post(url, input=[talk[0], *talk[more:]], truncation="auto").json()
    assert longer["usage"]["input_tokens"] == response["usage"]["input_tokens"]


def test_dropped_items_stay_stored_for_the_next_response(url: str) -> None:
    talk = long_talk()
    first = post(url, input=talk, truncation="auto").json()
    listed = httpx.get(f"{url}/{first['id']}/input_items?order=asc&limit=100").json()["data"]
    assert len(listed) == len(talk)
    chained = post(url, input="More", previous_response_id=first["id"], truncation="auto").json()
    assert (
        chained["truncated_items"][0][0] == 1
        and "truncated_items" not in post(url, input="Hi").json()
    )


def test_a_single_message_over_the_context_length_is_refused(url: str) -> None:
    talk = [said("user", "a"), said("assistant", "b"), said("user", "1, 2, " * 4000)]
    error = post(url, input=talk, truncation="auto").json()["error"]
    assert error["code"] == "context_length_exceeded"


TALK = [
    said("developer", "Be brief."),
    said("user", "Count from 1 to 5."),
    said("assistant", "1, 2, 3, 4, 5"),
    said("user", "Spell the word banana."),
    said("assistant", "b-a-n-a-n-a"),
]
QUESTION = said("user", "What is 23 + 45?")
COMPACT = {"context_management": [{"type": "compaction", "compact_threshold": 40}]}


def input_tokens(url: str, items: list[dict[str, Any]]) -> int:
    return int(httpx.post(f"{url}/input_tokens", json={"input": items}).json()["input_tokens"])


def test_the_model_sees_a_compacted_conversation_as_its_summary(url: str) -> None:
    compacted = httpx.post(f"{url}/compact", json={"input": TALK}, timeout=60).json()
    assert compacted["object"] == "response.compaction"
    *users, message, summary = compacted["output"]
    assert [item["role"] for item in users] == ["developer", "user", "user"]
    text = summary["encrypted_content"]
    assert summary["type"] == "compaction" and message["content"][0]["text"] == text
    assert compacted["usage"]["output_tokens"] > 0
    # The model sees the summary once, as a message of the user.
    shown = [TALK[0], TALK[1], TALK[3], said("user", text), QUESTION]
    alike = input_tokens(url, shown)
    for output in (compacted["output"], [*users, summary], [*TALK, summary]):
        assert input_tokens(url, [*output, QUESTION]) == alike
    first = post(url, input=compacted["output"])
    chained = {"previous_response_id": first.json()["id"], "input": [QUESTION]}
    answers = [*compacted["output"], *first.json()["output"], QUESTION]
    counted = httpx.post(f"{url}/input_tokens", json=chained).json()
    assert counted["input_tokens"] == input_tokens(url, answers)


def test_an_earlier_response_is_compacted(url: str) -> None:
    first = post(url, input=TALK, max_output_tokens=40).json()
    body = {"previous_response_id": first["id"], "truncation": "auto"}
    output = httpx.post(f"{url}/compact", json=body, timeout=60).json()["output"]
    assert [item.get("role") for item in output][:3] == ["developer", "user", "user"]
    unknown = httpx.post(f"{url}/compact", json={"previous_response_id": "resp_x"})
    assert unknown.status_code == 404
    assert httpx.post(f"{url}/compact", json={}).json()["error"]["param"] == "input"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_conversation_is_compacted_at_its_threshold(url: str, is_streamed: bool) -> None:
    asked = COMPACT | {"input": [*TALK, QUESTION], "max_output_tokens": 30}
    answer = post(url, **asked, stream=is_streamed)
    id = answer.headers["x-stream-id"]
    response = httpx.get(f"{url}/{id}").json()
    summary, message = response["output"]
    assert summary["type"] == "compaction" and message["content"][0]["text"] == "23 + 45 = 68"
    if is_streamed:
        assert httpx.get(f"{url}/{id}?stream=true").text == answer.text
        kinds = [line[7:] for line in answer.text.split("\n") if line.startswith("event: ")]
        assert kinds[2:4] == ["response.output_item.added", "response.output_item.done"]
    # The question that the summary does not answer comes after the summary.
    shown = [TALK[0], TALK[1], TALK[3], said("user", summary["encrypted_content"]), QUESTION]
    # The usage also counts the tokens of the summary and of its prompt.
    alone = post(url, input=shown, max_output_tokens=30).json()["usage"]
    body = {"input": asked["input"], "temperature": 0}
    before = httpx.post(f"{url}/compact", json=body, timeout=60).json()["usage"]
    for name in ("input_tokens", "output_tokens", "total_tokens"):
        assert response["usage"][name] == alone[name] + before[name]
    more = said("user", "Count from 1 to 5.")
    counted = {"previous_response_id": id, "input": [more]}
    chained = httpx.post(f"{url}/input_tokens", json=counted).json()["input_tokens"]
    assert chained == input_tokens(url, [*shown, message, more])
    # Nothing is lost: the items are still stored.
    assert len(httpx.get(f"{url}/{id}/input_items").json()["data"]) == len(TALK) + 1


def test_a_short_conversation_is_not_compacted(url: str) -> None:
    for body in ({"input": "Hi", **COMPACT}, {"input": [said("user", "Hi " * 80)], **COMPACT}):
        assert [item["type"] for item in post(url, **body).json()["output"]] == ["message"]


def test_a_conversation_too_long_to_summarize_is_refused_or_truncated(url: str) -> None:
    talk = long_talk()
    error = httpx.post(f"{url}/compact", json={"input": talk}, timeout=60).json()["error"]
    assert error["code"] == "context_length_exceeded" and "truncation: auto" in error["message"]
    body = {"input": talk, "truncation": "auto", "temperature": 1}
    # The tiny model does not end every summary within the limit.
    tries = (
        httpx.post(f"{url}/compact", json=body | {"seed": seed}, timeout=60) for seed in range(8)
    )
    output = next(compacted for compacted in tries if compacted.is_success).json()["output"]
    assert output[-1]["type"] == "compaction"
    assert output[-3] == talk[-1] | output[-3]
    assert post(url, input=talk, **COMPACT).json()["error"]["code"] == error["code"]


def test_a_truncated_summary_leaves_the_conversation_unchanged(short_url: str) -> None:
    asked = {"input": [*TALK, QUESTION], "max_output_tokens": 30}
    answer, plain = post(short_url, **asked, **COMPACT), post(short_url, **asked)
    assert answer.headers["x-headrace-ignored"] == "context_management"
    (message,), (same,) = answer.json()["output"], plain.json()["output"]
    assert message["content"] == same["content"]
    assert answer.json()["usage"]["total_tokens"] == plain.json()["usage"]["total_tokens"]
    compact = f"{short_url}/compact"
    refused = httpx.post(compact, json={"input": TALK, "temperature": 0}, timeout=60)
    message = refused.json()["error"]["message"]
    assert refused.status_code == 500
    assert "unchanged. The summary was cut off at its limit" in message
    assert "continue without compaction" in message


def test_a_compaction_trigger_returns_only_a_summary(url: str) -> None:
    trigger = {"type": "compaction_trigger"}
    body = {"input": [*TALK, trigger], "temperature": 0, "tools": [], "store": False}
    streamed = httpx.post(url, json=body | {"stream": True}, timeout=60).text
    events = [json.loads(line[6:]) for line in streamed.split("\n") if line.startswith("data: ")]
    done = [it["item"] for it in events if it["type"] == "response.output_item.done"]
    response = events[-1]["response"]
    assert events[-1]["type"] == "response.completed" and response["output"] == done
    (summary,) = done
    whole = httpx.post(f"{url}/compact", json={"input": TALK, "temperature": 0}, timeout=60).json()
    text = whole["output"][-1]["encrypted_content"]
    assert (summary["type"], summary["encrypted_content"]) == ("compaction", text)
    assert response["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    first = post(url, input=[*TALK, trigger]).json()
    chained = {"previous_response_id": first["id"], "input": [QUESTION]}
    counted = httpx.post(f"{url}/input_tokens", json=chained).json()["input_tokens"]
    assert counted == input_tokens(url, [*TALK, *first["output"], QUESTION])
    # A trigger that is not the last item is ignored.
    assert post(url, input=[trigger, QUESTION]).json()["output"][0]["type"] == "message"
    error = post(url, input=[*long_talk(), trigger]).json()["error"]
    assert error["code"] == "context_length_exceeded" and "not compacted" in error["message"]


@pytest.mark.parametrize(
    "wrong", [{}, [{}], [{"type": "clear"}], [{"type": "compaction", "compact_threshold": "1"}]]
)
def test_invalid_context_management_is_refused(url: str, wrong: Any) -> None:
    error = post(url, input="Hi", context_management=wrong).json()["error"]
    assert error["param"].startswith("context_management")
