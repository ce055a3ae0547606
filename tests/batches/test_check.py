"""Tests that all lines are checked, piece by piece, before the first is answered."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.batches import answers, lines
from headrace.batches.answers import LineAnswers, LineCheck, LineRequest, Verdict
from headrace.batches.folder import folder_batch_store
from headrace.batches.records import BatchRecord
from headrace.protocols import batch_lines
from headrace.protocols.body_names import model_names
from headrace.workers.job_queue import Body
from headrace_common.errors import RequestError
from headrace_common.worker_jobs import CheckedLines, CheckLines
from tests.batches.fakes import FakeAnswers

ROUTE = "/v1/completions"


class BusyWork:
    """A fake job runner that refuses every second job as if too many were waiting."""

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
    blobs = folder_batch_store(path).blobs
    await blobs.append("in", b"\n".join(it if isinstance(it, bytes) else one(it) for it in given))
    check = LineCheck(blobs, BusyWork(), OneModel(), 500)
    return await check.verdict(BatchRecord("b", "", "openai", ROUTE, "in", 0, 60), max_lines)


def one(given: Any) -> bytes:
    id, body = given
    return json.dumps({"custom_id": id, "method": "POST", "url": ROUTE, "body": body}).encode()


def told(found: Verdict) -> list[tuple[int, str, str | None]]:
    return [(fault.line, fault.code, fault.param) for fault in found.faults]


async def test_a_line_that_a_worker_refuses_gets_an_error_as_its_result() -> None:
    class NoWork:
        async def do(self, job: object, body: Body) -> None:
            raise RequestError("request_too_large", "This takes too much memory.")

    generation: Any = SimpleNamespace(work=NoWork())
    answering: Any = LineAnswers(generation, None)  # type: ignore[arg-type]
    answer = await answering.answer(LineRequest(ROUTE, "ann", "batch_1:1", one(("a", {}))))
    assert answer[:2] == ("a", 413)


async def test_valid_lines_are_counted(tmp_path: Path) -> None:
    found = await verdict(tmp_path, *((str(n), {"model": "known"}) for n in range(20)), b"", b" ")
    assert found == Verdict(20, ())


async def test_each_fault_has_its_line_number(tmp_path: Path) -> None:
    good, bad = {"model": "known"}, {"model": "known", "bad": 1}
    given = [("1", good), ("2", bad), b"", b"\xff", ("5", {"model": "other"}), ("6", good)]
    assert told(await verdict(tmp_path, *given)) == [
        (2, "invalid_value", "body.bad"),
        (4, "invalid_json", None),
        (5, "model_not_found", "body.model"),
    ]


async def test_models_are_read_before_the_lines_that_name_them_are_checked(
    tmp_path: Path,
) -> None:
    class Unreadable(OneModel):
        async def read_models(self, lines: bytes) -> None:
            if b"damaged" in lines:
                raise RequestError("load_failed", "It cannot be read.", "model")

    blobs, work = folder_batch_store(tmp_path).blobs, BusyWork()
    await blobs.append("in", one(("1", {"model": "damaged"})))
    check = LineCheck(blobs, work, Unreadable(), 500)
    found = await check.verdict(BatchRecord("b", "", "openai", ROUTE, "in", 0, 60), 9)
    assert [fault.code for fault in found.faults] == ["load_failed"]
    assert not work.num_asked


def test_the_models_of_lines_are_found_among_malformed_lines() -> None:
    good = [one((str(n), {"model": name})) for n, name in enumerate("abb")]
    odd = [b"", b"{", b"\xff", b"[1]", b"[" * 9000, one(("x", 5)), one(("y", {"model": 5}))]
    assert model_names(b"\n".join(good), "lines") == {"a", "b"}
    assert model_names(b"\n".join([*odd, *good, *odd]), "lines") == {None, "a", "b"}
    requests = [{"params": {"model": "a"}}, {"params": 5}, {"params": {}}, {}]
    body = json.dumps({"requests": requests}).encode()
    assert model_names(body, "requests") == {None, "a"}
    assert model_names(b'{"requests": 5}', "requests") == set()


async def test_a_duplicate_id_is_found_anywhere_in_the_file(tmp_path: Path) -> None:
    given = [(str(n % 15), {}) for n in range(16)]
    (fault,) = (await verdict(tmp_path, *given)).faults
    assert fault.code == "duplicate_id" and fault.line <= 16


async def test_too_many_or_too_long_lines_are_reported(tmp_path: Path) -> None:
    many = await verdict(tmp_path / "many", *((str(n), {}) for n in range(20)), max_lines=10)
    assert told(many)[0] == (11, "request_too_large", None)
    long = await verdict(tmp_path / "long", ("1", {}), ("2", {"x": "y" * 600}), ("3", {}))
    assert told(long) == [(2, "request_too_large", None)]
    empty = await verdict(tmp_path / "empty", b"\n\n")
    assert told(empty) == [(1, "invalid_value", None)]
