"""Tests how often a worker is used to read and encode a body."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.generation.generation import Generation
from headrace.intake.intake import Intake
from headrace.protocols.openai import completions as openai_completions
from headrace.protocols.requests import to_request
from headrace.workers.job_queue import LARGE
from headrace_common.config.settings import ServerConfig
from headrace_common.errors import RequestError
from headrace_common.worker_jobs import CheckedBody, EncodePrompts, Job, ReadBody
from tests.generation.fakes import running

ROUTE = "/v1/completions"


def body(text: str = "hello", **fields: Any) -> list[bytes]:
    return [json.dumps({"prompt": text, **fields}).encode()]


async def read(generation: Generation, body: list[bytes]) -> CheckedBody:
    return await Intake(generation, ServerConfig()).read(ReadBody(ROUTE), body)


class Counted:
    """A job runner that records the types of its jobs and can let them overrun."""

    def __init__(self, generation: Any) -> None:
        self._inner, generation.work = generation.work, self
        self.asked: list[type[Job[Any]]] = []
        self.overruns = False

    async def do(self, job: Any, body: Any = ()) -> Any:
        self.asked.append(type(job))
        if self.overruns and getattr(job, "known", True):
            raise RequestError("template_failed", "The chat template overran.", "messages")
        return await self._inner.do(job, body)

    run = None


async def test_a_request_goes_to_a_worker_once(folder: Path) -> None:
    async with running(folder) as (generation, _):
        work = Counted(generation)
        checked = await read(generation, body())
        model = generation.fleet.hosts.first.model
        request = to_request(openai_completions, checked, model)
        stream = await generation.open(request, checked=checked)
        assert work.asked == [ReadBody]
        alone = await generation.open(request, checked=msgspec.structs.replace(checked, ahead=None))
        assert work.asked == [ReadBody, EncodePrompts]
        assert stream.record.prompts == alone.record.prompts
        assert stream.record.tokenization == alone.record.tokenization == "one-shot"


@pytest.mark.parametrize("change", ["number", "longest"])
async def test_a_prompt_is_encoded_again_if_its_model_has_changed(
    folder: Path, change: str
) -> None:
    async with running(folder) as (generation, _):
        work = Counted(generation)
        checked = await read(generation, body())
        model = generation.fleet.hosts.first.model
        if change == "number":
            model.number += 1
        else:
            assert model.ready is not None
            model.ready = msgspec.structs.replace(model.ready, max_model_len=64)
        await generation.open(to_request(openai_completions, checked, model), checked=checked)
        assert work.asked == [ReadBody, EncodePrompts]


async def test_a_template_overrun_does_not_fail_the_reading_of_the_body(folder: Path) -> None:
    async with running(folder) as (generation, _):
        work = Counted(generation)
        work.overruns = True
        checked = await read(generation, body())
        assert checked.ahead is None and checked.stubs
        request = to_request(openai_completions, checked, generation.fleet.hosts.first.model)
        with pytest.raises(RequestError, match="overran"):
            await generation.open(request, checked=checked)


async def test_a_large_body_is_read_without_encoding_its_prompt(folder: Path) -> None:
    async with running(folder) as (generation, _):
        checked = [await read(generation, body("x" * size))
                   for size in (LARGE - 100, LARGE)]  # fmt: skip
        assert [each.ahead is None for each in checked] == [False, True]


async def test_a_prompt_is_not_encoded_for_a_model_without_the_task(folder: Path) -> None:
    async with running(folder) as (generation, _):
        model = generation.fleet.hosts.first.model
        assert model.ready is not None
        model.ready = msgspec.structs.replace(model.ready, tasks=("embed",))
        checked: CheckedBody = await read(generation, body())
        assert checked.ahead is None
