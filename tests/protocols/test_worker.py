"""Tests bodies that a worker parses and, if tokens will be needed, encodes ahead."""

import json
from array import array
from typing import Any

import msgspec
import pytest

from headrace.fleet.served_model import ServedModel
from headrace.protocols.vectors import embeddings, rerank, score
from headrace.protocols.worker import Jobs
from headrace_common.config.settings import ModelConfig
from headrace_common.errors import RequestError
from headrace_common.request import Chat
from headrace_common.worker_jobs import (
    ApplyTemplate,
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
        (ReadPairs("/v1/rerank", KNOWN), {"query": "q", "documents": ["d", "e"]}, 128, EncodePairs),
    ],
)
def test_tokens_encoded_ahead_equal_those_of_a_separate_job(
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
def test_a_body_that_needs_more_than_a_known_model_is_not_encoded_ahead(
    asked: tuple[ReadJob, dict[str, Any]],
) -> None:
    assert read(*asked, has_vision=True).ahead is None


def test_a_failure_to_encode_ahead_does_not_refuse_the_body() -> None:
    assert read(*chat(), template=Refusing()).ahead is None
    assert read(*chat(), template=None).ahead is None


def test_encoding_ahead_ends_after_an_input_that_is_too_long() -> None:
    known = {"headrace-mini": KnownModel(3, 2)}
    ahead = read(ReadInputs(known), {"input": ["far too long", "a"]}).ahead
    assert ahead is not None and len(ahead.encoded.prompts) == 1


@pytest.mark.parametrize(
    ("setting", "fields", "continues"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"continue_final_message": False}, False),
        (True, {"add_generation_prompt": True}, False),
    ],
)
def test_the_last_message_of_an_assistant_is_continued_if_the_setting_says_so(
    setting: bool, fields: dict[str, Any], continues: bool
) -> None:
    jobs = Jobs(ServedModel(ModelConfig(prefill_assistant=setting)))
    body = CHAT | {"messages": [*CHAT["messages"], {"role": "assistant", "content": "One, tw"}]}
    asked = json.dumps(body | fields).encode()
    checked = jobs.do(ReadBody("/v1/chat/completions"), asked)
    assert isinstance(checked, CheckedBody)
    (prompt,) = msgspec.msgpack.decode(checked.packed, type=tuple[Chat])
    assert prompt.continue_final_message is continues
    shown = jobs.do(ApplyTemplate(), asked)
    assert isinstance(shown, bytes)
    assert json.loads(shown)["prompt"].endswith("One, tw") is continues


def test_a_last_message_with_tool_calls_is_not_continued() -> None:
    jobs = Jobs(ServedModel(ModelConfig(prefill_assistant=True)))
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    last = {"role": "assistant", "content": "x", "tool_calls": [call]}
    body = CHAT | {"messages": [*CHAT["messages"], last]}
    checked = jobs.do(ReadBody("/v1/chat/completions"), json.dumps(body).encode())
    assert isinstance(checked, CheckedBody) and "continue_final_message" not in checked.fields


LONG = [{"role": "user", "content": "fox " * 400}, {"role": "assistant", "content": "x " * 900}]


@pytest.mark.parametrize(
    ("owner", "fields", "is_known"),
    [
        ("ann", {}, True),
        ("bob", {}, False),
        ("ann", {"cache_salt": "x"}, False),
        ("ann", {"cache_prompt": False}, False),
    ],
)
def test_the_tokens_of_a_long_chat_are_remembered_for_its_key_and_cache_salt(
    owner: str, fields: dict[str, Any], is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ServedModel(ModelConfig())
    jobs, encode, texts = Jobs(model), model.tokenizer.encode, list[str]()

    def counted(text: str, add_special_tokens: bool) -> "array[int]":
        texts.append(text)
        return encode(text, add_special_tokens)

    def asked(owner: str, fields: dict[str, Any]) -> Encoded:
        job, body = chat(messages=LONG, **fields)
        body_bytes = json.dumps(body).encode()
        known = {model.names[0]: KnownModel(3, 1 << 16)}
        checked = jobs.do(msgspec.structs.replace(job, owner=owner, known=known), body_bytes)
        assert isinstance(checked, CheckedBody) and checked.ahead is not None
        return checked.ahead.encoded

    first = asked("ann", {})
    monkeypatch.setattr(model.tokenizer, "encode", counted)
    assert asked(owner, fields) == first
    assert (not texts) is is_known


def test_a_worker_identifies_equal_requests_for_vectors() -> None:
    pair, score_pair = ReadPairs(rerank.ROUTES[0]), ReadPairs(score.ROUTES[0])
    asked: list[tuple[ReadJob, dict[str, Any]]] = [
        (ReadInputs(), {"input": ["one"]}),
        (pair, {"query": "q", "documents": ["d"]}),
        (score_pair, {"text_1": "q", "text_2": ["d", "e"]}),
    ]
    digests = [read(job, body).digest for job, body in asked]
    assert digests == [read(job, body).digest for job, body in asked]
    assert b"" not in digests and len(set(digests)) == 3
    checked = read(*asked[0])
    assert embeddings.to_request(checked, "").digest == checked.digest
    checked = read(*asked[1])
    assert rerank.to_request(checked, rerank.ROUTES[0], "").digest == checked.digest
    checked = read(*asked[2])
    assert score.to_request(checked, score.ROUTES[0], "").digest == checked.digest
