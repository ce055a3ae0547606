"""Models that nobody has used yet: who reads their files first."""

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.core.jobs import ReadModelName
from headrace.fleet.served_model import Models
from headrace.gateway.generation_routes import read_named_model


def host(name: str, is_known: bool, is_here: bool = True) -> Any:
    known = object() if is_known else None
    return SimpleNamespace(names=(name,), paths=(), known=known, is_here=is_here)


@pytest.mark.parametrize(
    ("asked", "read"),
    [("new", ["new"]), ("", ["first"]), ("used", []), ("remote", []), ("nobody's", [])],
)
async def test_a_model_is_read_within_limits_before_a_worker_meets_it(
    asked: str, read: list[str]
) -> None:
    found = []

    async def note(one: Any) -> None:
        found.append(one.names[0])

    async def name_of(job: ReadModelName, body: Any) -> str:
        assert not job.is_required
        return asked

    hosts = (host("first", False), host("used", True), host("new", False))
    fleet = SimpleNamespace(hosts=Models((*hosts, host("remote", False, is_here=False))), read=note)
    generation: Any = SimpleNamespace(fleet=fleet, work=SimpleNamespace(do=name_of))
    await read_named_model(generation, (b"{}",))
    assert found == read
