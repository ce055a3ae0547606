"""All lines are checked before the first is answered, a piece at a time, however long it takes."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.batches import answers, lines
from headrace.batches.answers import LineCheck, Verdict
from headrace.batches.folder import folder_shelf
from headrace.batches.records import BatchRecord
from headrace.core.errors import RequestError
from headrace.core.jobs import CheckedLines, CheckLines
from headrace.protocols import batch_lines
from headrace.workers.job_line import Body
from tests.batches.fakes import FakeAnswers

ROUTE = "/v1/completions"


class BusyWork:
    """Checks lines at once, but refuses every other time: too many wait."""

    def __init__(self) -> None:
        self.num_asked = 0

    async def do(self, job: CheckLines, body: Body) -> CheckedLines:
        self.num_asked += 1
        if self.num_asked % 2:
            raise RequestError("rate_limit_exceeded", "too many", retry_after_s=0.0)
        return batch_lines.check(b"".join(body), job.first, job.route, named)


def named(body: bytes, route: str) -> str | None:
    found = json.loads(body)
    if "bad" in found:
        raise RequestError("invalid_value", "bad is bad", "bad")
    return found.get("model")


class OneModel(FakeAnswers):
    def check_model(self, name: str) -> None:
        if name != "known":
            raise RequestError("model_not_found", f"no {name}", "model")


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "LEAST_WAIT_S", 0.0)
    monkeypatch.setattr(answers, "MOST_WAIT_S", 0.0)
    monkeypatch.setattr(lines, "PIECE", 100)


async def verdict(path: Path, *given: Any, max_lines: int = 100) -> Verdict:
    blobs = folder_shelf(path).blobs
    await blobs.append("in", b"\n".join(it if isinstance(it, bytes) else one(it) for it in given))
    check = LineCheck(blobs, BusyWork(), OneModel(), 500)
    return await check.verdict(BatchRecord("b", "", "openai", ROUTE, "in", 0, 60), max_lines)


def one(given: Any) -> bytes:
    id, body = given
    return json.dumps({"custom_id": id, "method": "POST", "url": ROUTE, "body": body}).encode()


def told(found: Verdict) -> list[tuple[int, str, str | None]]:
    return [(fault.line, fault.code, fault.param) for fault in found.faults]


async def test_good_lines_are_counted(tmp_path: Path) -> None:
    found = await verdict(tmp_path, *((str(n), {"model": "known"}) for n in range(20)), b"", b" ")
    assert found == Verdict(20, ())


async def test_each_fault_has_its_lines_number(tmp_path: Path) -> None:
    good, bad = {"model": "known"}, {"model": "known", "bad": 1}
    given = [("1", good), ("2", bad), b"", b"\xff", ("5", {"model": "other"}), ("6", good)]
    assert told(await verdict(tmp_path, *given)) == [
        (2, "invalid_value", "body.bad"),
        (4, "invalid_json", None),
        (5, "model_not_found", "body.model"),
    ]


async def test_ids_are_told_apart_over_the_whole_file(tmp_path: Path) -> None:
    given = [(str(n % 15), {}) for n in range(16)]
    (fault,) = (await verdict(tmp_path, *given)).faults
    assert fault.code == "duplicate_id" and fault.line <= 16


async def test_lines_beyond_the_number_or_the_size_are_told(tmp_path: Path) -> None:
    many = await verdict(tmp_path / "many", *((str(n), {}) for n in range(20)), max_lines=10)
    assert told(many)[0] == (11, "request_too_large", None)
    long = await verdict(tmp_path / "long", ("1", {}), ("2", {"x": "y" * 600}), ("3", {}))
    assert told(long) == [(2, "request_too_large", None)]
    empty = await verdict(tmp_path / "empty", b"\n\n")
    assert told(empty) == [(1, "invalid_value", None)]
