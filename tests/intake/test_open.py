"""Tests opening streams without HTTP: their names, options and ignored fields."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.intake.intake import Intake, names_of
from headrace_common.config.settings import ServerConfig
from headrace_common.errors import RequestError
from headrace_common.request import ResponseOptions
from headrace_common.worker_jobs import CheckedBody, ReadBody
from tests.generation.fakes import running

CHAT = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": "now"}}]


async def read(intake: Intake, **fields: Any) -> CheckedBody:
    asked = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "wish": 1, **fields}
    return await intake.read(ReadBody(CHAT), [json.dumps(asked).encode()])


async def test_a_request_with_a_known_key_gets_the_stream_of_the_earlier_one(folder: Path) -> None:
    async with running(folder) as (generation, _):
        intake = Intake(generation, ServerConfig())
        checked = await read(intake)
        names = names_of("ann", checked, key="once")
        first = await intake.open(CHAT, checked, names)
        again = await intake.open(CHAT, checked, names)
        other = await intake.open(CHAT, checked, names_of("bob", checked, key="once"))
        assert (first.is_attached, again.is_attached, other.is_attached) == (False, True, False)
        assert again.stream is first.stream and other.stream is not first.stream


async def test_an_opened_stream_lists_the_ignored_fields(folder: Path) -> None:
    async with running(folder) as (generation, _):
        intake = Intake(generation, ServerConfig())
        generation.fleet.hosts.first.model.tool_format = ""
        checked = await read(intake, tools=TOOLS)
        opened = await intake.open(CHAT, checked, names_of("", checked))
        assert (opened.ignored, opened.tool_format) == (("wish", "tools"), "")


async def test_options_of_the_caller_replace_those_of_the_body(folder: Path) -> None:
    async with running(folder) as (generation, _):
        intake = Intake(generation, ServerConfig())
        checked = await read(intake)
        options = ResponseOptions(return_token_ids=True)
        names = names_of("", checked)
        opened = await intake.open(CHAT, checked, names, options=options)
        assert opened.stream.record.request.response_options == options


@pytest.mark.parametrize("bad", ["é", "a\nb", "x" * 513])
def test_a_conversation_name_with_invalid_characters_or_length_is_refused(bad: str) -> None:
    with pytest.raises(RequestError, match="takes 1 to 512 printable ASCII characters"):
        names_of("", CheckedBody({}, (), b""), conversation=bad)


def test_an_empty_conversation_name_means_none_but_an_empty_key_is_refused() -> None:
    checked = CheckedBody({}, (), b"")
    assert names_of("", checked, conversation="").conversation is None
    with pytest.raises(RequestError, match="takes 1 to 255 printable ASCII characters"):
        names_of("", checked, key="")


async def test_a_known_request_is_answered_even_if_the_input_memory_is_full(folder: Path) -> None:
    async with running(folder, max_total_input_bytes=100_000) as (generation, _):
        intake = Intake(generation, ServerConfig())
        checked = await read(intake)
        checked = msgspec.structs.replace(checked, kept=bytes(80_000))
        names = names_of("ann", checked, key="once")
        first = await intake.open(CHAT, checked, names)
        again = await intake.open(CHAT, checked, names)
        assert again.is_attached and again.stream is first.stream
        with pytest.raises(RequestError, match="--max-total-input-bytes"):
            await intake.open(CHAT, checked, names_of("ann", checked, key="new"))
