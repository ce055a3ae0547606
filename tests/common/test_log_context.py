"""Tests the log line of a request, with the notes of all its tasks."""

import asyncio
import logging

import pytest

from headrace_common.log_context import begin_request, log_request, note


def test_the_log_line_of_a_request_has_only_the_notes_of_its_own_tasks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def find(model: str) -> None:
        note(model=model)

    async def request(id: str, model: str) -> None:
        begin_request(id)
        await asyncio.create_task(find(model))
        log_request("/v1/x", "refused", status=400)

    async def run() -> None:
        await asyncio.gather(request("a", "small"), request("b", "large"))

    with caplog.at_level(logging.INFO, "headrace.requests"):
        asyncio.run(run())
    told = [vars(record)["fields"]["model"] for record in caplog.records]
    assert sorted(told) == ["large", "small"]


def test_a_note_outside_of_requests_is_dropped() -> None:
    note(model="small")
