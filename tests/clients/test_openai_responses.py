"""The openai package against /v1/responses: it must read what was generated.

The server is HEADRACE_TEST_URL, or one that HEADRACE_TEST_PYTHON starts.
"""

import contextlib
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

MODEL = "headrace-mini"
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}


@contextlib.contextmanager
def own_server() -> Iterator[str]:
    python = os.environ.get("HEADRACE_TEST_PYTHON")
    if python is None:
        pytest.skip("needs HEADRACE_TEST_URL or HEADRACE_TEST_PYTHON")
    with tempfile.TemporaryDirectory() as state:
        server = subprocess.Popen(
            [python, "-m", "headrace", "serve", "--port", "0", "--state-dir", state],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert server.stderr is not None
        try:
            lines = (re.search(r"ready at (http://[\w.:]+\d)", line) for line in server.stderr)
            yield next(found[1] for found in lines if found)
        finally:
            server.terminate()
            server.communicate(timeout=60)


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with contextlib.ExitStack() as stack:
        url = os.environ.get("HEADRACE_TEST_URL") or stack.enter_context(own_server())
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=60)


def create(client: openai.OpenAI, **fields: Any) -> Any:
    fields = {"model": MODEL, "input": "Count from 1 to 5.", "temperature": 0} | fields
    return client.responses.create(**fields)


def test_a_response_answers_and_is_found_again(client: openai.OpenAI) -> None:
    response = create(client, instructions="Be brief.", metadata={"a": "b"})
    assert (response.status, response.output_text) == ("completed", "1, 2, 3, 4, 5")
    assert (response.instructions, response.metadata) == ("Be brief.", {"a": "b"})
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert client.responses.retrieve(response.id) == response


def test_a_stream_joins_to_the_answer_and_its_numbers_have_no_gap(client: openai.OpenAI) -> None:
    events = list(create(client, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "1, 2, 3, 4, 5" == events[-1].response.output_text
    numbered = [event.sequence_number for event in events if event.type != "keepalive"]
    assert numbered == list(range(len(numbered)))


def test_a_stream_is_read_on_from_a_number(client: openai.OpenAI) -> None:
    events = [e for e in create(client, stream=True, store=True) if e.type != "keepalive"]
    id = events[0].response.id
    rest = client.responses.retrieve(id, stream=True, starting_after=6)
    assert [e.sequence_number for e in rest] == [e.sequence_number for e in events[7:]]


def test_the_packages_own_reading_of_a_stream_ends_with_the_response(client: openai.OpenAI) -> None:
    for more in ({}, {"background": True}):
        asked = {"model": MODEL, "input": "Count from 1 to 5.", "temperature": 0}
        with client.responses.stream(**asked, **more) as stream:
            kinds = [event.type for event in stream]
            assert stream.get_final_response().output_text == "1, 2, 3, 4, 5"
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        assert ("response.queued" in kinds) == bool(more)


def test_a_tool_is_called_and_its_result_answered(client: openai.OpenAI) -> None:
    first = create(client, input=[QUESTION], tools=[WEATHER])
    (call,) = first.output
    assert (call.type, call.name) == ("function_call", "get_weather")
    assert call.arguments == '{"city": "Paris"}'
    output = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": '{"weather": "sunny"}',
    }
    whole = create(client, input=[QUESTION, *first.output, output], tools=[WEATHER])
    chained = create(client, input=[output], previous_response_id=first.id, tools=[WEATHER])
    assert "sunny" in whole.output_text
    assert chained.output_text == whole.output_text
    assert chained.usage.input_tokens == whole.usage.input_tokens
    items = client.responses.input_items.list(chained.id, order="asc").data
    assert [item.type for item in items] == ["message", "function_call", "function_call_output"]


def test_a_tool_is_called_in_a_stream(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "input": [QUESTION], "tools": [WEATHER], "temperature": 0}
    with client.responses.stream(**asked) as stream:
        events = list(stream)
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    (done,) = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert "".join(deltas) == done.arguments == events[-1].response.output[0].arguments


def test_reasoning_is_an_item_of_its_own(client: openai.OpenAI) -> None:
    asked: Any = {"input": "What is 23 + 45?", "reasoning": {"effort": "medium"}}
    reasoning, message = create(client, **asked).output
    assert (reasoning.type, message.content[0].text) == ("reasoning", "23 + 45 = 68")
    deltas = [
        e.delta for e in create(client, **asked, stream=True) if "reasoning_text.de" in e.type
    ]
    assert "".join(deltas) == reasoning.content[0].text
    with client.responses.stream(model=MODEL, temperature=0, **asked) as stream:
        assert stream.get_final_response().output_text == "23 + 45 = 68"


class Person(BaseModel):
    name: str
    age: int


def test_an_answer_is_parsed_by_its_schema(client: openai.OpenAI) -> None:
    question = "Answer as JSON with the keys name and age: Anna is 34 years old."
    asked: Any = {"model": MODEL, "temperature": 0, "input": question}
    response = client.responses.parse(**asked, text_format=Person)
    assert response.output_parsed == Person(name="Anna", age=34)
    reasoned = client.responses.parse(**asked, text_format=Person, reasoning={"effort": "low"})
    assert isinstance(reasoned.output_parsed, Person)


def test_a_call_is_forced(client: openai.OpenAI) -> None:
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        tools: Any = [{"type": "web_search"}, WEATHER]
        (call,) = create(client, input="Hello", tools=tools, tool_choice=choice).output
        assert (call.type, call.name) == ("function_call", "get_weather")
        assert list(json.loads(call.arguments)) == ["city"]


def test_a_schema_that_cannot_be_enforced_is_named(client: openai.OpenAI) -> None:
    bad = {"type": "object", "properties": {"x": {"type": "strin"}}}
    tools: Any = [{"type": "web_search"}, WEATHER | {"parameters": bad, "strict": True}]
    with pytest.raises(openai.BadRequestError) as refused:
        create(client, tools=tools)
    assert refused.value.param.startswith("tools[1].parameters")
    text: Any = {"format": {"type": "json_schema", "name": "it", "schema": bad}}
    with pytest.raises(openai.BadRequestError) as refused:
        create(client, text=text)
    assert refused.value.param.startswith("text.format.schema")


def test_a_background_response_is_polled_cancelled_and_deleted(client: openai.OpenAI) -> None:
    endless = {"input": "Tell a story.", "extra_body": {"ignore_eos": True}}
    response = create(client, background=True, **endless)
    assert (response.status, response.output) == ("queued", [])
    assert client.responses.retrieve(response.id).status in ("queued", "in_progress")
    for _ in range(2):
        assert client.responses.cancel(response.id).status == "cancelled"
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_a_response_that_is_not_stored_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(create(client, store=False).id)


def test_too_few_tokens_make_it_incomplete(client: openai.OpenAI) -> None:
    response = create(client, max_output_tokens=3)
    assert (response.status, response.output[0].status) == ("incomplete", "incomplete")
    assert response.incomplete_details.reason == "max_output_tokens"


def test_logprobs_come_if_they_are_included(client: openai.OpenAI) -> None:
    include: Any = ["message.output_text.logprobs"]
    response = create(client, include=include, top_logprobs=2)
    entries = response.output[0].content[0].logprobs
    assert "".join(entry.token for entry in entries).startswith(response.output_text)
    assert all(len(entry.top_logprobs) == 2 for entry in entries)


def test_tokens_are_counted_as_they_are_used(client: openai.OpenAI) -> None:
    counted = client.responses.input_tokens.count(model=MODEL, input="Count from 1 to 5.")
    assert counted.input_tokens == create(client).usage.input_tokens


def test_a_fault_is_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        create(client, input=[QUESTION, {"role": "user", "content": 5}])
    assert refused.value.param == "input[1].content"


def test_a_conversation_is_compacted_and_continues(client: openai.OpenAI) -> None:
    first = create(client)
    talk: Any = [{"role": "user", "content": "Count from 1 to 5."}, *first.output]
    compacted = client.responses.compact(model=MODEL, input=talk)
    assert compacted.object == "response.compaction" and compacted.usage.output_tokens > 0
    assert [item.type for item in compacted.output] == ["message", "message", "compaction"]
    question = {"role": "user", "content": "What is 23 + 45?"}
    assert create(client, input=[*compacted.output, question]).output_text == "23 + 45 = 68"
    again = client.responses.compact(model=MODEL, previous_response_id=first.id)
    assert again.output[-1].type == "compaction"


def test_a_conversation_is_compacted_at_its_threshold(client: openai.OpenAI) -> None:
    first = create(client)
    threshold: Any = [{"type": "compaction", "compact_threshold": 20}]
    more = {"previous_response_id": first.id, "input": "What is 23 + 45?"}
    with client.responses.stream(
        model=MODEL, context_management=threshold, temperature=0, **more
    ) as stream:
        events = [event.type for event in stream]
        response = stream.get_final_response()
    assert [item.type for item in response.output] == ["compaction", "message"]
    assert response.output_text == "23 + 45 = 68" and events[-1] == "response.completed"


def test_the_oldest_items_are_dropped_automatically(client: openai.OpenAI) -> None:
    talk: Any = [{"role": "user", "content": "1, 2, 3, " * 600}] * 4
    question = {"role": "user", "content": "What is 23 + 45?"}
    response = create(client, input=[*talk, question], truncation="auto")
    assert response.output_text == "23 + 45 = 68" and response.truncation == "auto"


def test_a_conversation_is_created_used_listed_and_deleted(client: openai.OpenAI) -> None:
    hello: Any = {"type": "message", "role": "user", "content": "What is the weather in Paris?"}
    talk = client.conversations.create(items=[hello], metadata={"topic": "weather"})
    (call,) = create(client, conversation=talk.id, input=[], tools=[WEATHER]).output
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    answer = create(client, conversation={"id": talk.id}, input=[output], tools=[WEATHER])
    assert answer.conversation.id == talk.id and "sunny" in answer.output_text
    listed = list(client.conversations.items.list(talk.id, order="asc", limit=2))
    kinds = ["message", "function_call", "function_call_output", "message"]
    assert [item.type for item in listed] == kinds
    assert listed[-1].content[0].text == answer.output_text
    assert listed[1].call_id == call.call_id
    added = client.conversations.items.create(talk.id, items=[hello])
    assert (added.data[0].role, added.first_id) == ("user", added.last_id)
    found = client.conversations.items.retrieve(added.first_id, conversation_id=talk.id)
    assert found == added.data[0]
    assert client.conversations.items.delete(added.first_id, conversation_id=talk.id) == talk
    changed = client.conversations.update(talk.id, metadata={"topic": "Paris"})
    assert client.conversations.retrieve(talk.id) == changed
    assert (changed.created_at, changed.metadata) == (talk.created_at, {"topic": "Paris"})
    with pytest.raises(openai.BadRequestError, match="Mutually exclusive parameters"):
        create(client, conversation=talk.id, previous_response_id=answer.id)
    deleted = client.conversations.delete(talk.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (talk.id, True, "conversation.deleted")
    with pytest.raises(openai.NotFoundError):
        create(client, conversation=talk.id)
