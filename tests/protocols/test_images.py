"""Images in a chat before anything is decoded: who takes them, and which addresses."""

import json
from typing import Any

import msgspec
import pytest

from headrace.core.errors import RequestError
from headrace.core.request import Chat
from headrace.protocols.requests import CheckedBody
from headrace.protocols.worker import Jobs
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


def test_a_model_without_vision_refuses_every_image_whatever_is_in_it():
    place = "messages[0].content[1].type"
    assert refusal(False, "data:image/png;base64,AAAA") == ("unsupported_content", place)
    assert refusal(False, "data:") == ("unsupported_content", place)


@pytest.mark.parametrize("route", ["apply_template", "tokenize"])
def test_routes_that_need_the_text_alone_refuse_images(route: str):
    arguments = (64,) if route == "tokenize" else ()
    jobs = Jobs(FakeModel(has_vision=True))  # type: ignore[arg-type]
    with pytest.raises(RequestError) as refused:
        getattr(jobs, route)(body("data:image/png;base64,AAAA"), *arguments)
    assert refused.value.code == "unsupported_content"


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("https://example.com/a.png", "image_url_refused"),
        ("data:", "invalid_image"),
        ("data:image/png,abc", "invalid_image"),
        ("data:image/png;base64,A", "invalid_image"),
    ],
)
def test_an_address_or_a_broken_uri_is_refused_with_its_place(url: str, code: str):
    good = "data:image/png;base64,AAAA"
    assert refusal(True, good, url) == (code, "messages[0].content[2]")


def test_images_travel_beside_the_messages_and_only_their_number_stays():
    jobs = Jobs(FakeModel(has_vision=True))  # type: ignore[arg-type]
    packed = jobs.read(body("data:image/png;base64,AAAA", "data:image/png;base64,AQID"), ROUTE)
    checked = msgspec.msgpack.decode(packed, type=CheckedBody)
    (chat,) = msgspec.msgpack.decode(checked.packed, type=tuple[Chat, ...])
    assert chat.images == (bytes(3), bytes([1, 2, 3]))
    assert chat.messages[0]["content"][1:] == [{"type": "image"}] * 2
    assert checked.stubs[0].num_images == 2 and not checked.stubs[0].images
