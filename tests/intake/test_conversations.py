"""Tests conversations without HTTP: concurrent changes and replaced streams."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from headrace.generation.registry import Found
from headrace.intake.conversations import Conversations
from headrace.intake.intake import Intake
from headrace.streams.log import LogTaken
from headrace.streams.record import CONVERSATION
from headrace.streams.store import ByConversation, ConversationLocked, Name
from headrace.streams.stores import memory
from headrace_common.config.settings import ServerConfig
from headrace_common.errors import RequestError
from headrace_common.worker_jobs import UseConversation
from tests.generation.fakes import running

ITEMS = json.dumps({"items": [{"role": "user", "content": "a"}]}).encode()


async def texts(conversations: Conversations, id: str) -> list[str]:
    job = UseConversation(what="list", id=id, limit=100, is_rising=True)
    page = json.loads(await conversations.use("ann", job))
    return [item["content"][0]["text"] for item in page["data"]]


async def add(conversations: Conversations, id: str) -> None:
    await conversations.use("ann", UseConversation(what="add", id=id), ITEMS)


async def test_a_stream_replaced_while_it_is_read_is_looked_up_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(folder) as (generation, _):
        conversations = Intake(generation, ServerConfig()).conversations
        id = json.loads(await conversations.create("ann", b"{}"))["id"]
        find = generation.streams.find

        async def find_too_late(owner: str, name: Name, suspended: bool) -> Found | None:
            monkeypatch.undo()
            found = await find(owner, name)
            await add(conversations, id)
            return found

        monkeypatch.setattr(generation.streams, "find", find_too_late)
        assert await texts(conversations, id) == ["a"]


async def test_one_of_two_concurrent_changes_is_refused(folder: Path) -> None:
    async with running(folder) as (generation, _):
        conversations = Intake(generation, ServerConfig()).conversations
        id = json.loads(await conversations.create("ann", ITEMS))["id"]
        both: list[Any] = await asyncio.gather(
            add(conversations, id), add(conversations, id), return_exceptions=True
        )
        assert sorted(type(it) for it in both if it) == [ConversationLocked]
        assert await texts(conversations, id) == ["a", "a"]


async def test_a_change_takes_effect_even_if_another_server_takes_its_stream_over(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = memory._Log.append

    async def append_elsewhere(*log_and_events: Any) -> None:
        await append(*log_and_events)
        raise LogTaken

    async with running(folder) as (generation, _):
        conversations = Intake(generation, ServerConfig()).conversations
        id = json.loads(await conversations.create("ann", ITEMS))["id"]
        monkeypatch.setattr(memory._Log, "append", append_elsewhere)
        await add(conversations, id)
        assert await texts(conversations, id) == ["a", "a"]


async def test_a_conversation_has_one_stream_after_a_change_and_none_after_deletion(
    folder: Path,
) -> None:
    async with running(folder) as (generation, _):
        conversations = Intake(generation, ServerConfig()).conversations
        id = json.loads(await conversations.create("ann", ITEMS))["id"]
        await add(conversations, id)
        assert len(generation.streams.store._entries) == 1  # type: ignore[attr-defined]
        with pytest.raises(RequestError, match="not found"):
            await conversations.delete("bob", id)
        await conversations.delete("ann", id)
        assert not generation.streams.store._entries  # type: ignore[attr-defined]
        name = ByConversation("ann", CONVERSATION + id)
        assert await generation.streams.find("ann", name) is None
