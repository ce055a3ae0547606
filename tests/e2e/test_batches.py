"""Tests of batches on a real server with the openai client."""

import io
import json
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.batch_lines import answers_alone, chat_line, in_lines, line, results
from tools.harness.eventually import eventually
from tools.harness.servers import ServerProcess, running_server

KEYS = {"HEADRACE_API_KEYS": "anns,bobs"}


@pytest.fixture(scope="module")
def batch_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    state = tmp_path_factory.mktemp("state")
    flags = ("--threads", "1", "--state-dir", str(state), "--max-body-bytes", "2000000")
    limits = ("--max-batch-lines", "500", "--max-file-bytes", "30000000")
    with running_server(
        *flags, *limits, "--key-file-bytes", "50000000", environment=KEYS
    ) as running:
        yield running


@pytest.fixture
def ann(batch_server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{batch_server.url}/v1", api_key="anns", max_retries=0)


@pytest.fixture
def bob(batch_server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{batch_server.url}/v1", api_key="bobs", max_retries=0)


def sent(client: openai.OpenAI, data: bytes) -> Any:
    return client.files.create(file=("lines.jsonl", io.BytesIO(data)), purpose="batch")


def begun(client: openai.OpenAI, lines: list[dict[str, Any]], **fields: Any) -> Any:
    file = sent(client, in_lines(lines))
    wish = {"endpoint": lines[0]["url"], "completion_window": "24h"} | fields
    return client.batches.create(input_file_id=file.id, **wish)


def ended(client: openai.OpenAI, batch: Any, within_s: float = 120) -> Any:
    found = [batch]

    def has_ended() -> bool:
        time.sleep(0.1)
        found.append(client.batches.retrieve(batch.id))
        return found[-1].status in ("completed", "failed", "expired", "cancelled")

    eventually(has_ended, within_s)
    return found[-1]


def content(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    return results(client.files.content(file_id).content) if file_id else []


def test_every_line_gets_the_answer_of_a_single_request(ann: openai.OpenAI) -> None:
    lines = [chat_line(number) for number in range(30)]
    batch = begun(ann, lines, metadata={"night": "first"})
    assert batch.status == "validating"
    batch = ended(ann, batch)
    assert batch.status == "completed" and batch.metadata == {"night": "first"}
    assert (batch.request_counts.total, batch.request_counts.completed) == (30, 30)
    assert batch.error_file_id is None
    found = {it["custom_id"]: it["response"]["body"] for it in content(ann, batch.output_file_id)}
    texts = {id: body["choices"][0]["message"]["content"] for id, body in found.items()}
    assert texts == answers_alone(ann, lines)
    assert {body["object"] for body in found.values()} == {"chat.completion"}
    times = (batch.in_progress_at, batch.finalizing_at, batch.completed_at)
    assert all(batch.created_at <= time <= batch.expires_at for time in times)
    assert batch.id in [it.id for it in ann.batches.list(limit=2)]


def test_batch_lines_may_use_any_inference_route(ann: openai.OpenAI) -> None:
    bodies = {
        "/v1/completions": {"model": "headrace-mini", "prompt": "One", "max_tokens": 4},
        "/v1/responses": {"model": "headrace-mini", "input": "One", "max_output_tokens": 4},
        "/v1/messages": {
            "model": "headrace-mini",
            "max_tokens": 4,
            "messages": [{"role": "user", "content": "1"}],
        },
        "/v1/embeddings": {"model": "headrace-mini", "input": ["One", "Two"]},
        "/api/generate": {"model": "headrace-mini", "prompt": "One"},
    }
    batches = {route: begun(ann, [line("a", body, route)]) for route, body in bodies.items()}
    for route, batch in batches.items():
        batch = ended(ann, batch)
        assert batch.request_counts.completed == 1, (route, content(ann, batch.error_file_id))
        (result,) = content(ann, batch.output_file_id)
        assert result["response"]["status_code"] == 200
    (vectors,) = content(ann, ended(ann, batches["/v1/embeddings"]).output_file_id)
    alone = ann.embeddings.create(model="headrace-mini", input=["One", "Two"])
    got = vectors["response"]["body"]["data"]
    assert got[1]["embedding"] == pytest.approx(alone.data[1].embedding, abs=1e-5)


def test_a_line_that_fails_does_not_fail_the_others(ann: openai.OpenAI) -> None:
    long = {"model": "headrace-mini", "prompt": "word " * 40_000, "max_tokens": 1}
    lines = [line("long", long, "/v1/completions")]
    lines += [line("short", {**long, "prompt": "word"}, "/v1/completions")]
    batch = ended(ann, begun(ann, lines))
    assert batch.status == "completed"
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)
    (failed,) = content(ann, batch.error_file_id)
    assert failed["custom_id"] == "long" and failed["response"]["status_code"] == 400
    assert failed["response"]["body"]["error"]["code"] == "context_length_exceeded"


def test_validation_reports_every_invalid_line_before_any_line_is_answered(
    ann: openai.OpenAI,
) -> None:
    good = chat_line(1)
    lines = [
        json.dumps(good),
        json.dumps({**good, "custom_id": "2", "url": "/v1/completions"}),
        '{"custom_id": "3"',
        json.dumps({**good, "custom_id": 4}),
        "",
        json.dumps(chat_line(6, temperature="hot")),
        json.dumps(chat_line(7, stream=True)),
        json.dumps(chat_line(8, model="nobody")),
        json.dumps(good),
    ]
    file = sent(ann, "\n".join(lines).encode() + b"\n\xff\xfe\n")
    batch = ann.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    batch = ended(ann, batch)
    assert batch.status == "failed" and batch.output_file_id is None
    reported = {(it.line, it.code, it.param) for it in batch.errors.data}
    assert reported == {
        (2, "invalid_value", "url"),
        (3, "invalid_json", None),
        (4, "invalid_value", "custom_id"),
        (6, "invalid_type", "body.temperature"),
        (7, "unsupported_parameter", "body.stream"),
        (8, "model_not_found", "body.model"),
        (1, "duplicate_id", "custom_id"),
        (10, "invalid_json", None),
    }


def test_a_cancelled_batch_keeps_its_answers_and_lists_the_other_lines_as_cancelled(
    ann: openai.OpenAI,
) -> None:
    lines = [chat_line(number, max_tokens=400, ignore_eos=True) for number in range(300)]
    batch = begun(ann, lines)
    eventually(lambda: ann.batches.retrieve(batch.id).request_counts.completed > 0, 120)
    assert ann.batches.cancel(batch.id).status == "cancelling"
    batch = ended(ann, batch)
    assert batch.status == "cancelled"
    done = content(ann, batch.output_file_id)
    left = content(ann, batch.error_file_id)
    assert 0 < len(done) < 300
    assert sorted(it["custom_id"] for it in done + left) == sorted(it["custom_id"] for it in lines)
    assert {it["error"]["code"] for it in left} == {"batch_cancelled"}


def test_files_and_batches_of_another_api_key_are_not_found(
    ann: openai.OpenAI, bob: openai.OpenAI
) -> None:
    batch = ended(ann, begun(ann, [chat_line(1)]))
    tries = [
        lambda: bob.files.retrieve(batch.input_file_id),
        lambda: bob.files.content(batch.output_file_id),
        lambda: bob.files.delete(batch.input_file_id),
        lambda: bob.batches.retrieve(batch.id),
        lambda: bob.batches.cancel(batch.id),
        lambda: bob.batches.create(
            input_file_id=batch.input_file_id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
        ),
    ]
    for attempt in tries:
        with pytest.raises(openai.NotFoundError):
            attempt()
    assert batch.id not in [it.id for it in bob.batches.list()]
    assert batch.input_file_id not in [it.id for it in bob.files.list()]


def test_files_are_listed_read_and_deleted(ann: openai.OpenAI) -> None:
    data = in_lines([chat_line(1)])
    file = ann.files.create(
        file=("night é.jsonl", io.BytesIO(data)),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert (file.bytes, file.filename, file.purpose) == (len(data), "night é.jsonl", "batch")
    assert file.expires_at == file.created_at + 3600
    assert ann.files.content(file.id).content == data
    assert file.id in [it.id for it in ann.files.list(purpose="batch")]
    assert ann.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        ann.files.retrieve(file.id)


def test_a_file_beyond_the_size_or_the_quota_is_refused(
    ann: openai.OpenAI, bob: openai.OpenAI
) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        sent(bob, b"x" * 30_000_001)
    assert refused.value.status_code == 413 and "--max-file-bytes" in str(refused.value)
    first = sent(bob, b"x" * 30_000_000)
    with pytest.raises(openai.BadRequestError, match="--key-file-bytes"):
        sent(bob, b"x" * 30_000_000)
    sent(ann, b"x" * 1_000_000)  # each key has its own quota
    bob.files.delete(first.id)
    bob.files.delete(sent(bob, b"x" * 30_000_000).id)


def test_hostile_batch_files_are_refused_and_do_not_block_other_requests(
    ann: openai.OpenAI, bob: openai.OpenAI, batch_server: ServerProcess
) -> None:
    """Send a 25 MB line, a million lines and binary noise while a thread polls /health."""
    good = in_lines([chat_line(1)])
    hostile = {
        "request_too_large": [good + b'{"custom_id": "' + b"x" * 25_000_000 + b'"}\n' + good[:-1]],
        "invalid_json": [bytes(range(128, 256)) * 10_000 + b"\n", b"[" * 1_000_000 + b"\n"],
    }
    longest, stop = [0.0], threading.Event()

    def ask() -> None:
        while not stop.is_set():
            began = time.monotonic()
            assert httpx.get(f"{batch_server.url}/health", timeout=30).status_code == 200
            longest[0] = max(longest[0], time.monotonic() - began)
            time.sleep(0.02)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        batches = [(code, sent(bob, data)) for code, all in hostile.items() for data in all]
        many = sent(bob, b"{}\n" * 1_000_000)
        batches.append(("request_too_large", many))
        for code, file in batches:
            batch = bob.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            )
            batch = ended(bob, batch)
            assert batch.status == "failed"
            assert code in {it.code for it in batch.errors.data}, batch.errors
            bob.files.delete(file.id)
    finally:
        stop.set()
        asking.join()
    assert longest[0] < 5


def test_a_full_disk_refuses_uploads_and_pauses_running_batches(
    ann: openai.OpenAI, batch_server: ServerProcess
) -> None:
    lines = [chat_line(number, max_tokens=100, ignore_eos=True) for number in range(100)]
    batch = begun(ann, lines)
    eventually(lambda: ann.batches.retrieve(batch.id).request_counts.completed > 0, 120)
    pid = batch_server.process.pid
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, before[1]))  # no file may grow
    try:
        with pytest.raises(openai.APIStatusError) as refused:
            sent(ann, in_lines(lines))
        assert refused.value.status_code == 503
        assert httpx.get(f"{batch_server.url}/health", timeout=30).status_code == 200
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
    batch = ended(ann, batch, 240)
    assert batch.request_counts.completed == 100
    found = content(ann, batch.output_file_id)
    assert sorted(it["custom_id"] for it in found) == sorted(it["custom_id"] for it in lines)


def test_a_truncated_multipart_form_stores_no_file(batch_server: ServerProcess) -> None:
    before = httpx.get(f"{batch_server.url}/v1/files", headers={"X-Api-Key": "bobs"}).json()
    for body in (b"", b"--b\r\nContent-Disposition: form-data; name=file\r\n\r\nline\r\n"):
        answer = httpx.post(
            f"{batch_server.url}/v1/files",
            content=body,
            headers={"X-Api-Key": "bobs", "Content-Type": "multipart/form-data; boundary=b"},
        )
        assert answer.status_code == 400
    after = httpx.get(f"{batch_server.url}/v1/files", headers={"X-Api-Key": "bobs"}).json()
    assert after == before


def test_the_batch_command_answers_a_file_and_resumes_an_earlier_batch(
    batch_server: ServerProcess, tmp_path: Path
) -> None:
    import os
    import subprocess
    import sys

    file = tmp_path / "night.jsonl"
    file.write_bytes(in_lines([chat_line(number) for number in range(5)]))
    command = [sys.executable, "-m", "headrace", "batch", str(file), "--url", batch_server.url]
    environment = {**os.environ, "HEADRACE_API_KEY": "bobs"}

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *more], env=environment, capture_output=True, text=True, timeout=120
        )

    first = run()
    assert first.returncode == 0, first.stderr
    assert "5 of 5 lines" in first.stderr
    assert len(results((tmp_path / "night.results.jsonl").read_bytes())) == 5
    again = run("--output", str(tmp_path / "again"))
    assert "was started before" in again.stderr
    assert (tmp_path / "again").read_bytes() == (tmp_path / "night.results.jsonl").read_bytes()
    file.write_text('{"custom_id": "a"}\n')
    assert run().returncode == 2
