"""The anthropic package, untouched, against a real server.

It runs in an environment of its own. The server is the one at HEADRACE_TEST_URL, or one that is
started with the interpreter HEADRACE_TEST_PYTHON.
"""

import asyncio
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pytest

anthropic = pytest.importorskip("anthropic")
pydantic = pytest.importorskip("pydantic")

MODEL = "headrace-mini"
SUM = [{"role": "user", "content": "What is 23 + 45?"}]
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
ANSWER = "The weather in Paris is sunny."
WEATHER = {
    "name": "get_weather",
    "description": "Tells the weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
    "cache_control": {"type": "ephemeral"},
}


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    if given := os.environ.get("HEADRACE_TEST_URL"):
        yield given
        return
    python = os.environ.get("HEADRACE_TEST_PYTHON")
    if not python:
        pytest.skip("neither HEADRACE_TEST_URL nor HEADRACE_TEST_PYTHON is set")
    flags = ("--port", "0", "--heartbeat-s", "1", "--state-dir", tempfile.mkdtemp())
    serve = [python, "-m", "headrace", "serve", *flags]
    with subprocess.Popen(serve, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr
        found = (re.match(r"Headrace is ready at (http://\S+?):? ", it) for it in server.stderr)
        yield next(ready[1].rstrip(":") for ready in found if ready)
        server.terminate()
        server.stderr.read()


@pytest.fixture(scope="session")
def client(address: str) -> Any:
    return anthropic.Anthropic(base_url=address, api_key="unused", max_retries=0)


def asked(**fields: Any) -> dict[str, Any]:
    flat = {"temperature": 0}  # the package has no such argument any more
    return {"model": MODEL, "max_tokens": 200, "messages": SUM, "extra_body": flat} | fields


def test_an_answer_is_a_message(client: Any) -> None:
    message = client.messages.create(**asked(system="You are brief.", metadata={"user_id": "x"}))
    (block,) = message.content
    assert (block.type, block.text) == ("text", "23 + 45 = 68")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.id.startswith("msg_") and message.model == MODEL
    assert message._request_id


def test_a_stream_is_put_together_to_the_same_message(client: Any) -> None:
    whole = client.messages.create(**asked())
    with client.messages.stream(**asked()) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(texts) > 3
    assert "".join(texts) == final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_thoughts_are_a_block_before_the_text(client: Any) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    with client.messages.stream(**asked(thinking=thinking)) as stream:
        kinds = [event.type for event in stream]
        thought, text = stream.get_final_message().content
    assert (thought.type, thought.signature, text.type) == ("thinking", "", "text")
    assert "63" in thought.thinking and text.text == "23 + 45 = 68"
    assert {"thinking", "signature", "text"} <= set(kinds)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_loop_of_tools_ends_in_an_answer(client: Any, is_streamed: bool) -> None:
    def say(messages: list[Any]) -> Any:
        fields = asked(messages=messages, tools=[WEATHER])
        if not is_streamed:
            return client.messages.create(**fields)
        with client.messages.stream(**fields) as stream:
            return stream.get_final_message()

    messages: list[Any] = list(QUESTION)
    called = say(messages)
    assert called.stop_reason == "tool_use"
    (call,) = [block for block in called.content if block.type == "tool_use"]
    assert (call.name, call.input) == ("get_weather", {"city": "Paris"})
    assert call.id.startswith("toolu_")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    messages += [called.to_param(), {"role": "user", "content": [result]}]
    answer = say(messages)
    assert (answer.stop_reason, answer.content[0].text) == ("end_turn", ANSWER)


def test_the_packages_own_loop_of_tools_ends(client: Any) -> None:
    # the schema that the model was trained on: the package's own has more in it
    @anthropic.beta_tool(input_schema=WEATHER["input_schema"])
    def get_weather(city: str) -> str:
        """Tells the weather in a city."""
        return "sunny" if city == "Paris" else "rainy"

    runner = client.beta.messages.tool_runner(**asked(messages=QUESTION, tools=[get_weather]))
    assert runner.until_done().content[0].text == ANSWER


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_forced_call_is_one_whatever_was_asked(client: Any, choice: dict[str, str]) -> None:
    fields = asked(messages=[{"role": "user", "content": "Hello"}], tools=[WEATHER])
    message = client.messages.create(**fields, tool_choice=choice)
    assert message.stop_reason == "tool_use"
    call = message.content[-1]
    assert call.name == "get_weather" and list(call.input) == ["city"]


def test_an_answer_by_a_schema_is_parsed(client: Any) -> None:
    class Person(pydantic.BaseModel):
        name: str
        age: int

    text = "Answer as JSON with the keys name and age: Anna is 34 years old."
    fields = asked(messages=[{"role": "user", "content": text}])
    message = client.messages.parse(**fields, output_format=Person)
    assert message.parsed_output == Person(name="Anna", age=34)


def test_a_count_is_that_of_the_usage(client: Any) -> None:
    for more in ({}, {"tools": [WEATHER]}, {"system": "You are brief."}):
        fields = {"model": MODEL, "messages": QUESTION, **more}
        count = client.messages.count_tokens(**fields).input_tokens
        assert count == client.beta.messages.count_tokens(**fields).input_tokens
        usage = client.messages.create(**fields, max_tokens=1).usage
        cached = usage.cache_read_input_tokens + usage.cache_creation_input_tokens
        assert count == usage.input_tokens + cached


def test_models_are_listed_and_found_by_their_ids(client: Any) -> None:
    (model,) = [it for it in client.models.list(limit=1) if it.id == MODEL]
    assert (model.type, model.display_name) == ("model", MODEL)
    assert model.created_at.year >= 2026 and model.lifecycle == "active"
    assert client.models.retrieve(MODEL) == model
    assert model.max_input_tokens == model.max_tokens > 0
    assert MODEL in [it.id for it in client.beta.models.list()]
    assert client.models.list(before_id=MODEL).data == []
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("claude-none")


def test_an_end_has_its_reason(client: Any) -> None:
    count = asked(messages=[{"role": "user", "content": "Count from 1 to 50."}])
    stopped = client.messages.create(**count, stop_sequences=["12"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "12")
    cut = client.messages.create(**count | {"max_tokens": 5})
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 5)
    begun = [*count["messages"], {"role": "assistant", "content": "1, 2, 3"}]
    assert client.messages.create(**count | {"messages": begun}).content[0].text[:6] == ", 4, 5"


def test_a_call_that_is_cut_off_breaks_nothing(client: Any) -> None:
    for limit in (16, 18, 20):
        fields = asked(messages=QUESTION, tools=[WEATHER], max_tokens=limit)
        assert client.messages.create(**fields).stop_reason == "max_tokens"
        with client.messages.stream(**fields) as stream:
            assert stream.get_final_message().stop_reason == "max_tokens"


def test_what_beta_clients_add_is_tolerated(client: Any) -> None:
    edits = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    message = client.beta.messages.create(
        **asked(context_management=edits), betas=["context-management-2025-06-27"]
    )
    assert message.content[0].text == "23 + 45 = 68"


BEGUN_ELSEWHERE: list[Any] = [
    {
        "role": "user",
        "content": [
            {
                "type": "document",
                "title": "Mills",
                "source": {"type": "text", "media_type": "text/plain", "data": "A wheel turns."},
                "citations": {"enabled": True},
            },
            {
                "type": "document",
                "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="},
            },
            {
                "type": "search_result",
                "source": "http://mills",
                "title": "Mills",
                "content": [{"type": "text", "text": "It turns."}],
            },
            {"type": "container_upload", "file_id": "file_1"},
            {"type": "text", "text": "Hello"},
        ],
    },
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "of another server"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "a"}},
            {
                "type": "web_search_tool_result",
                "tool_use_id": "s1",
                "content": [
                    {
                        "type": "web_search_result",
                        "title": "Mills",
                        "url": "http://mills",
                        "encrypted_content": "x",
                    }
                ],
            },
            {"type": "mcp_tool_use", "id": "m1", "name": "ask", "server_name": "m", "input": {}},
            {"type": "mcp_tool_result", "tool_use_id": "m1", "content": "Yes."},
            {"type": "text", "text": "Hello!"},
            {"type": "tool_use", "id": "t1", "name": "bash", "input": {"command": "ls"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "t1",
                "content": [{"type": "tool_reference", "tool_name": "bash"}],
            },
            {"type": "tool_result", "tool_use_id": "its_call_is_missing", "content": "a.txt"},
        ],
    },
    {"role": "assistant", "content": [{"type": "compaction", "content": "They met."}]},
    {"role": "system", "content": "You are brief."},
    *SUM,
]


@pytest.mark.parametrize("num_turns", [3, len(BEGUN_ELSEWHERE)])
def test_a_conversation_that_began_elsewhere_goes_on(client: Any, num_turns: int) -> None:
    turns = BEGUN_ELSEWHERE[:num_turns]
    fields = asked(messages=turns, max_tokens=16)
    raw = client.beta.messages.with_raw_response.create(**fields)
    named = raw.headers["x-headrace-ignored"].split(", ")
    assert named == [f"messages[{i}].content[{j}]" for i, j in ((0, 1), (0, 3), (1, 1))]
    answer = raw.parse()
    with client.beta.messages.stream(**fields) as stream:
        assert stream.get_final_message().content[0].text == answer.content[0].text
    own = {"role": "assistant", "content": answer.content}
    more = asked(messages=[*turns, own, *SUM], max_tokens=16)
    assert client.beta.messages.create(**more).usage.cache_read_input_tokens > 0


CLIENT_TOOLS: list[Any] = [
    {"type": "bash_20250124", "name": "bash"},
    {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
    {"type": "memory_20250818", "name": "memory"},
]


@pytest.mark.parametrize("tool", CLIENT_TOOLS, ids=lambda tool: str(tool["name"]))
def test_a_tool_that_the_package_names_by_its_type_is_called(client: Any, tool: Any) -> None:
    tools = [*CLIENT_TOOLS, {"type": "web_search_20250305", "name": "web_search"}]
    choice = {"type": "tool", "name": tool["name"]}
    fields = asked(tools=tools, tool_choice=choice)
    with client.beta.messages.stream(**fields) as stream:
        (streamed,) = stream.get_final_message().content
    (call,) = client.beta.messages.create(**fields).content
    assert (call.type, call.name) == (streamed.type, streamed.name) == ("tool_use", tool["name"])
    with pytest.raises(anthropic.BadRequestError, match="cannot offer a tool of type"):
        client.beta.messages.create(
            **asked(tools=tools, tool_choice=choice | {"name": "web_search"})
        )


@pytest.mark.parametrize(
    ("fields", "error", "kind"),
    [
        ({"max_tokens": -5}, anthropic.BadRequestError, "invalid_request_error"),
        ({"model": "claude"}, anthropic.NotFoundError, "not_found_error"),
        (
            {"messages": [{"role": "user", "content": "x " * 9000}]},
            anthropic.BadRequestError,
            "invalid_request_error",
        ),
    ],
)
def test_an_error_is_one_of_the_packages(client: Any, fields: Any, error: Any, kind: str) -> None:
    with pytest.raises(error) as caught:
        client.messages.create(**asked(**fields))
    assert caught.value.body["error"]["type"] == kind
    assert caught.value.request_id == caught.value.body["request_id"]


def test_heartbeats_and_signs_of_life_disturb_no_stream(
    client: Any, request: pytest.FixtureRequest
) -> None:
    try:
        request.getfixturevalue("busy")
    except pytest.FixtureLookupError:
        pytest.skip("nothing keeps the server busy here")
    with client.messages.stream(**asked()) as stream:
        signs = [event for event in stream if is_sign(event)]
        assert stream.get_final_message().content[0].text == "23 + 45 = 68"
    assert signs  # each is an event that the package passes on


def is_sign(event: Any) -> bool:
    return getattr(getattr(event, "delta", None), "text", None) == ""


def test_many_at_once_get_what_each_gets_alone(address: str) -> None:
    async def ask(client: Any, number: int) -> str:
        text = f"What is {number} + 45?"
        fields = asked(messages=[{"role": "user", "content": text}])
        async with client.messages.stream(**fields) as stream:
            return str(await stream.get_final_text())

    async def all_of_them() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=address, api_key="unused") as client:
            return await asyncio.gather(*(ask(client, number) for number in range(20, 24)))

    wanted = [f"{number} + 45 = {number + 45}" for number in range(20, 24)]
    assert asyncio.run(all_of_them()) == wanted


def test_a_batch_of_messages_is_answered_later(client: Any) -> None:
    batches = client.messages.batches
    wishes = [
        {"custom_id": f"sum-{n}", "params": asked(messages=SUM, max_tokens=8)} for n in range(3)
    ]
    for wish in wishes:
        wish["params"] = {**wish["params"], **wish["params"].pop("extra_body", {})}
    batch = batches.create(requests=wishes)
    assert batch.type == "message_batch" and batch.processing_status == "in_progress"
    deadline = time.monotonic() + 60
    while batch.processing_status != "ended":
        assert time.monotonic() < deadline
        time.sleep(0.1)
        batch = batches.retrieve(batch.id)
    assert batch.request_counts.succeeded == 3 and batch.ended_at is not None
    alone = client.messages.create(**asked(messages=SUM, max_tokens=8)).content[0].text
    found = {it.custom_id: it.result for it in batches.results(batch.id)}
    assert {it.message.content[0].text for it in found.values()} == {alone}
    assert set(found) == {"sum-0", "sum-1", "sum-2"}
    assert batch.id in [it.id for it in batches.list(limit=1)]
    assert batches.delete(batch.id).type == "message_batch_deleted"
    with pytest.raises(anthropic.NotFoundError):
        batches.retrieve(batch.id)


def test_a_batch_of_messages_is_cancelled_and_wrong_ones_are_refused(client: Any) -> None:
    batches = client.messages.batches
    long = {"model": MODEL, "max_tokens": 2000, "messages": SUM, "ignore_eos": True}
    wishes = [{"custom_id": str(n), "params": long} for n in range(20)]
    batch = batches.cancel(batches.create(requests=wishes).id)
    assert batch.processing_status == "canceling"
    with pytest.raises(anthropic.BadRequestError, match="has not ended"):
        batches.delete(batch.id)
    deadline = time.monotonic() + 60
    while batch.processing_status != "ended":
        assert time.monotonic() < deadline
        time.sleep(0.1)
        batch = batches.retrieve(batch.id)
    kinds = {it.result.type for it in batches.results(batch.id)}
    assert batch.request_counts.canceled > 0 and "canceled" in kinds
    with pytest.raises(anthropic.BadRequestError, match=r"requests\[0\].params.max_tokens"):
        batches.create(requests=[{"custom_id": "a", "params": {"model": MODEL, "messages": SUM}}])
