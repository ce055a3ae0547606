"""Tests which routes accept images, and from which addresses, before decoding."""

import json
from typing import Any, cast

import msgspec
import pytest

from headrace.protocols.openai import responses as openai_responses
from headrace.protocols.prompt_ids import put_images
from headrace.protocols.worker import Jobs
from headrace_common.errors import RequestError
from headrace_common.request import Chat, Route
from headrace_common.worker_jobs import (
    AnyJob,
    ApplyTemplate,
    CheckedBody,
    ContinueResponse,
    CountTokens,
    Tokenize,
)
from tests.gateway.builders import FakeModel

ROUTE = "/v1/chat/completions"


def body(*urls: str) -> bytes:
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [{"type": "text", "text": "Look:"}, *parts]
    return json.dumps({"messages": [{"role": "user", "content": content}]}).encode()


def refusal(has_vision: bool, *urls: str) -> tuple[str, str | None]:
    with pytest.raises(RequestError) as refused:
        Jobs(FakeModel(has_vision=has_vision)).read(body(*urls), ROUTE)  # type: ignore[arg-type]
    return refused.value.code, refused.value.param


def test_a_model_without_vision_refuses_every_image():
    place = "messages[0].content[1].type"
    assert refusal(False, "data:image/png;base64,AAAA") == ("unsupported_content", place)
    assert refusal(False, "data:") == ("unsupported_content", place)


@pytest.mark.parametrize("job", [ApplyTemplate(), Tokenize({})])
def test_routes_that_need_the_text_alone_refuse_images(job: AnyJob):
    jobs = Jobs(FakeModel(has_vision=True))  # type: ignore[arg-type]
    with pytest.raises(RequestError) as refused:
        jobs.do(job, body("data:image/png;base64,AAAA"))
    assert refused.value.code == "unsupported_content"


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("ftp://example.com/a.png", "image_url_refused"),
        ("https://example.com/" + "a" * 9000, "image_url_refused"),
        ("data:", "invalid_image"),
        ("data:image/png,abc", "invalid_image"),
        ("data:image/png;base64,A", "invalid_image"),
    ],
)
def test_an_address_or_a_broken_uri_is_refused_with_its_place(url: str, code: str):
    good = "data:image/png;base64,AAAA"
    assert refusal(True, good, url) == (code, "messages[0].content[2]")


def test_an_image_address_is_kept_until_the_downloaded_image_replaces_it():
    jobs = Jobs(FakeModel(has_vision=True))  # type: ignore[arg-type]
    checked = jobs.read(body("https://example.com/a.png", "data:image/png;base64,AQID"), ROUTE)
    (stub,) = checked.stubs
    assert isinstance(stub, Chat) and stub.addresses == ("https://example.com/a.png", "")
    assert stub.image_params == ("messages[0].content[1]", "messages[0].content[2]")
    found = put_images(checked.packed + b"pixels", [6, 0])
    (chat,) = msgspec.msgpack.decode(found, type=tuple[Chat, ...])
    assert chat.images == (b"pixels", bytes([1, 2, 3])) and not chat.addresses


def test_images_are_taken_out_of_the_messages_and_counted():
    jobs = Jobs(FakeModel(has_vision=True))  # type: ignore[arg-type]
    checked = jobs.read(body("data:image/png;base64,AAAA", "data:image/png;base64,AQID"), ROUTE)
    (chat,) = msgspec.msgpack.decode(checked.packed, type=tuple[Chat, ...])
    assert chat.images == (bytes(3), bytes([1, 2, 3]))
    assert chat.messages[0]["content"][1:] == [{"type": "image"}] * 2
    assert checked.stubs[0].num_images == 2 and not checked.stubs[0].images


def anthropic(*parts: Any, **more: Any) -> dict[str, Any]:
    turn = {"role": "user", "content": list(parts)}
    return {"model": "headrace-mini", "max_tokens": 1, "messages": [turn], **more}


def block(data: str = "AAAA", media_type: str = "image/png") -> dict[str, Any]:
    source = {"type": "base64", "media_type": media_type, "data": data}
    return {"type": "image", "source": source}


def response(*parts: Any, **more: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": list(parts)}], **more}


def part(url: str = "data:image/png;base64,AAAA") -> dict[str, Any]:
    return {"type": "input_image", "image_url": url}


def chat_of(route: Route, sent: dict[str, Any]) -> tuple[Chat, CheckedBody]:
    jobs = Jobs(FakeModel(has_vision=True))  # type: ignore[arg-type]
    checked = jobs.read(json.dumps(sent).encode(), route)
    return msgspec.msgpack.decode(checked.packed, type=tuple[Chat, ...])[0], checked


URL_SOURCE = {"type": "image", "source": {"type": "url", "url": "ftp://example.com/a.png"}}
HELLO = {"type": "text", "text": "Hello"}
OTHER_ROUTES: list[tuple[Route, dict[str, Any], bool, str, str]] = [
    ("/v1/messages", anthropic(HELLO, block()), False, "unsupported_content",
     "messages[0].content[1].type"),
    ("/v1/messages", anthropic(URL_SOURCE, system="Be brief."), True, "image_url_refused",
     "messages[0].content[0]"),
    ("/v1/messages", anthropic(block("A")), True, "invalid_image", "messages[0].content[0]"),
    ("/v1/messages", anthropic(block(media_type="a/b,c")), True, "invalid_value",
     "messages[0].content[0].source.media_type"),
    ("/v1/messages", anthropic(*[block()] * 17), True, "image_too_large",
     "messages[0].content[16]"),
    ("/v1/responses", response(HELLO, part()), False, "unsupported_content",
     "input[0].content[1].type"),
    ("/v1/responses", response(part("ftp://example.com/a.png")), True, "image_url_refused",
     "input[0].content[0]"),
    ("/v1/responses", response(part(), part("data:image/png;base64,A"), instructions="Be brief."),
     True, "invalid_image", "input[0].content[1]"),
    ("/v1/responses", response({"type": "input_image"}), True, "missing_required_parameter",
     "input[0].content[0].image_url"),
]  # fmt: skip


@pytest.mark.parametrize(("route", "sent", "has_vision", "code", "param"), OTHER_ROUTES)
def test_other_routes_name_a_bad_image_by_its_place_in_their_body(
    route: Route, sent: dict[str, Any], has_vision: bool, code: str, param: str
):
    with pytest.raises(RequestError) as refused:
        Jobs(FakeModel(has_vision=has_vision)).read(  # type: ignore[arg-type]
            json.dumps(sent).encode(), route
        )
    assert (refused.value.code, refused.value.param) == (code, param)


def test_anthropic_blocks_become_parts_in_order_across_joined_turns():
    sent = anthropic(HELLO, block("AQID"), HELLO, system="Be brief.")
    sent["messages"].append({"role": "user", "content": [HELLO]})
    chat, checked = chat_of("/v1/messages", sent)
    texts = [{"type": "text", "text": text} for text in ("Hello", "\n")]
    content = [texts[0], {"type": "image"}, texts[0], texts[1], texts[0]]
    assert chat.messages[1:] == ({"role": "user", "content": content},)
    assert chat.images == (bytes([1, 2, 3]),) and checked.stubs[0].num_images == 1


def test_tool_results_may_contain_images():
    call = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [HELLO, block()]}
    sent = anthropic(result | {"is_error": True})
    sent["messages"][:0] = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [call]},
    ]
    chat, _ = chat_of("/v1/messages", sent)
    assert [part.get("text", "image") for part in chat.messages[-1]["content"]] == [
        "Error: ", "Hello", "image"
    ]  # fmt: skip
    items = [
        {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": [part("ftp://a")]},
    ]
    with pytest.raises(RequestError) as refused:
        chat_of("/v1/responses", {"input": items})
    assert refused.value.param == "input[1].output[0]"


def test_a_route_that_counts_text_refuses_images():
    jobs = Jobs(FakeModel(has_vision=True))  # type: ignore[arg-type]
    with pytest.raises(RequestError) as refused:
        jobs.do(CountTokens(), json.dumps(anthropic(block())).encode())
    assert refused.value.code == "unsupported_content"


def test_a_continued_response_includes_and_lists_the_earlier_images():
    earlier = chat_of("/v1/responses", response(part("data:image/png;base64,AQID")))[1]
    new = chat_of("/v1/responses", response(HELLO, part()))[1]
    packed = msgspec.msgpack.encode((earlier.kept, b"[]", new, {}))
    jobs = Jobs(FakeModel(has_vision=True))  # type: ignore[arg-type]
    checked = cast(CheckedBody, jobs.do(ContinueResponse(), packed))
    (chat,) = msgspec.msgpack.decode(checked.packed, type=tuple[Chat, ...])
    assert chat.images == (bytes([1, 2, 3]), bytes(3))
    assert chat.image_params == ("previous_response_id", "input[0].content[1]")
    assert checked.stubs[0].num_images == 2
    page = json.loads(openai_responses.input_items(checked.kept, "resp_1", 20, True, ""))
    assert page["data"][0]["content"] == [part("data:image/png;base64,AQID")]
    with pytest.raises(RequestError) as refused:
        Jobs(FakeModel()).do(ContinueResponse(), packed)  # type: ignore[arg-type]
    assert refused.value.param == "previous_response_id.type"
