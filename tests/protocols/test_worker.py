"""Bodies in a worker: tokenized as they are read if that will be asked; refused no earlier."""

import json
from typing import Any

import pytest

from headrace.protocols.worker import Jobs
from headrace_common.errors import RequestError
from headrace_common.worker_jobs import (
    CheckedBody,
    Encoded,
    EncodePairs,
    EncodePrompts,
    KnownModel,
    ReadBody,
    ReadInputs,
    ReadJob,
    ReadPairs,
)
from tests.gateway.builders import FakeModel, Lines

KNOWN = {"headrace-mini": KnownModel(3, 128)}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


class Refusing(Lines):
    def render(self, chat: Any) -> str:
        raise RequestError("template_failed", "No.", "messages")


def read(job: ReadJob, body: dict[str, Any], **model: Any) -> CheckedBody:
    checked = Jobs(FakeModel(**model)).do(job, json.dumps(body).encode())  # type: ignore[arg-type]
    assert isinstance(checked, CheckedBody)
    return checked


def chat(has_image: bool = False, **fields: Any) -> tuple[ReadBody, dict[str, Any]]:
    body = {"messages": [{"role": "user", "content": [IMAGE]}]} if has_image else CHAT
    return ReadBody("/v1/chat/completions", KNOWN), body | fields


@pytest.mark.parametrize(
    ("job", "body", "longest", "asked"),
    [
        (ReadBody("/v1/chat/completions", KNOWN), CHAT, 127, EncodePrompts),
        (ReadBody("/v1/completions", KNOWN), {"prompt": ["a", "b"]}, 127, EncodePrompts),
        (ReadBody("/v1/completions", KNOWN), {"prompt": "a", "max_tokens": 0}, 128, EncodePrompts),
        (ReadBody("/v1/completions", KNOWN), {"prompt": [5, 999]}, 127, EncodePrompts),
        (ReadInputs(KNOWN), {"input": ["one", "two"], "model": "org/other"}, 128, EncodePrompts),
        (ReadPairs(KNOWN), {"query": "q", "documents": ["d", "e"]}, 128, EncodePairs),
    ],
)
def test_the_tokens_that_come_ahead_are_those_that_would_be_asked_for(
    job: ReadJob, body: dict[str, Any], longest: int, asked: type[EncodePrompts | EncodePairs]
) -> None:
    checked = read(job, body)
    assert checked.ahead is not None
    assert (checked.ahead.number, checked.ahead.longest) == (3, longest)
    alone = Jobs(FakeModel()).do(asked(longest), checked.packed)  # type: ignore[arg-type]
    assert checked.ahead.encoded == alone and isinstance(alone, Encoded)


@pytest.mark.parametrize(
    "asked",
    [
        chat(model="unknown"),
        (ReadBody("/v1/chat/completions"), CHAT),
        chat(has_image=True),
        (
            ReadBody("/v1/responses", KNOWN),
            {"input": "hi", "previous_response_id": "resp_1"},
        ),
        (ReadBody("/infill", KNOWN), {"input_prefix": "a", "input_suffix": "b"}),
    ],
)
def test_what_needs_more_than_a_known_model_is_read_alone(
    asked: tuple[ReadJob, dict[str, Any]],
) -> None:
    assert read(*asked, has_vision=True).ahead is None


def test_a_refusal_of_the_tokens_is_none_of_the_body() -> None:
    assert read(*chat(), template=Refusing()).ahead is None
    assert read(*chat(), template=None).ahead is None


def test_tokens_end_behind_what_is_too_long() -> None:
    known = {"headrace-mini": KnownModel(3, 2)}
    ahead = read(ReadInputs(known), {"input": ["far too long", "a"]}).ahead
    assert ahead is not None and len(ahead.encoded.prompts) == 1
