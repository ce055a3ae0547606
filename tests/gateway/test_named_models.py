"""Tests that an unused model is read under limits before a worker uses it."""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from headrace.batches.folder import folder_batch_store
from headrace.gateway.routes import ROUTES
from headrace.intake.intake import Intake
from headrace.protocols.worker import Jobs
from headrace.protocols.worker_model import WorkerModel
from headrace.text.model_names import Models
from headrace.workers.job_queue import Body
from headrace_common.config.settings import HttpConfig, ServerConfig
from headrace_common.errors import RequestError
from headrace_common.worker_jobs import (
    Job,
    NameModels,
    ReadBatch,
    ReadModelName,
    ReadNames,
    UseConversation,
)
from tests.gateway.builders import FakeGeneration, app_of

CONFIG = ServerConfig(http=HttpConfig(allowed_host=("testserver",)))
MESSAGES = [{"role": "user", "content": "Hi"}]
NAMED: dict[str, Any] = {"model": "headrace-mini", "max_tokens": 1, "messages": MESSAGES}
REQUESTS = {"requests": [{"custom_id": "a", "params": NAMED}]}
PATHS = sorted(it.path for it in ROUTES if it.method == "post" and "{" not in it.path)
READ_NO_MODEL = (NameModels, ReadModelName, ReadNames, ReadBatch, UseConversation)
UNREAD = RequestError("load_failed", "It cannot be read.", "model")


def host(name: str, is_known: bool, is_here: bool = True) -> Any:
    known = object() if is_known else None
    return SimpleNamespace(names=(name,), paths=(), known=known, is_here=is_here)


@pytest.mark.parametrize(
    ("named", "read"),
    [(("new",), ["new"]), (("used",), []), (("remote",), []), (("first", "new"), ["first", "new"])],
)
async def test_an_unread_model_is_read_before_a_worker_uses_it(
    named: tuple[str, ...], read: list[str]
) -> None:
    found = []

    async def note(one: Any) -> None:
        found.append(one.names[0])

    async def names_of(job: NameModels, body: Any) -> tuple[str, ...]:
        return named

    hosts = (host("first", False), host("used", True), host("new", False))
    fleet = SimpleNamespace(hosts=Models((*hosts, host("remote", False, is_here=False))), read=note)
    generation: Any = SimpleNamespace(fleet=fleet, work=SimpleNamespace(do=names_of))
    await Intake(generation, CONFIG).read_models((b"{}",))
    assert found == read


@pytest.mark.parametrize("path", PATHS)
def test_no_route_passes_an_unread_model_to_a_worker(tmp_path: Path, path: str) -> None:
    generation = FakeGeneration()
    fleet: Any = generation.fleet
    fleet.hosts.first.known = None
    num_read, jobs = 0, list[Job[Any]]()
    do = generation.work.do

    async def fail(one: Any) -> None:
        nonlocal num_read
        num_read += 1
        raise UNREAD

    async def note(job: Job[Any], body: Body) -> Any:
        jobs.append(job)
        return await do(job, body)

    fleet.read, generation.work = fail, SimpleNamespace(do=note)
    app = app_of(generation, CONFIG, shelf=folder_batch_store(tmp_path))
    answer = TestClient(app).post(path, json=REQUESTS if path.endswith("/batches") else NAMED)
    assert all(isinstance(job, READ_NO_MODEL) for job in jobs), jobs
    if num_read:
        assert "It cannot be read." in answer.text


@pytest.mark.parametrize(
    ("name", "read"), [("b", ("b",)), ("b:latest", ("b",)), ("nobody", ()), (None, ("a",))]
)
def test_a_worker_lists_the_models_that_a_request_names(
    name: str | None, read: tuple[str, ...]
) -> None:
    def load() -> Any:
        raise AssertionError("names are found without the model")

    texts = [WorkerModel((it, f"{it}-adapter"), load, contextlib.nullcontext) for it in "ab"]
    body = json.dumps({} if name is None else {"model": name}).encode()
    assert Jobs(*texts).do(NameModels("body"), body) == read
    line = b'{"body": ' + body + b"}"
    assert Jobs(*texts).do(NameModels("lines"), line + b"\n" + line) == read
    requests = b'{"requests": [{"params": ' + body + b"}]}"
    assert Jobs(*texts).do(NameModels("requests"), requests) == read


def test_an_unknown_model_name_makes_no_worker_read_a_model() -> None:
    def load() -> Any:
        raise AssertionError("the first model was read")

    jobs = Jobs(WorkerModel(("a",), load, contextlib.nullcontext))
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    asked = {"messages": [{"role": "user", "content": [image]}], "guided_json": {"const": 1}}
    checked = jobs.read(json.dumps({"model": "nobody", **asked}).encode(), "/v1/chat/completions")
    assert checked.fields["model"] == "nobody"
