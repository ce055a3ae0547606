"""Starts real servers on damaged state directories, and checks the streams that they serve.

Headrace-mini generates the streams. Each directory is damaged before a server is started on it.
"""

import contextlib
import random
import shutil
import sqlite3
import subprocess
from pathlib import Path

import httpx
import msgspec

from headrace.streams.stores.sqlite_schema import NAME
from stress.attack.corruption import Damage, damaged_pages, wrong_rows
from tools.harness.eventually import eventually
from tools.harness.servers import ServerProcess

NUM_STREAMS = 6
LIMIT_S = 20.0
_ENDED = "is damaged and was ended"


class Answer(msgspec.Struct):
    """A stream that an undamaged server returned, both as bytes and as events."""

    n: int
    conversation: str
    stream_id: str
    body: bytes
    events: bytes
    is_live: bool = False


class Party:
    """A client that compares the streams of a damaged server with the original ones."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.answers: list[Answer] = []

    def write(self) -> None:
        """Fills the folders `closed` and `killed`. In `killed`, one stream has not ended."""
        server = _start(self.directory / "closed")
        for n in range(NUM_STREAMS):
            _post(server.url, f"chat {n}", 20 + n, n % 2 == 0)
        self.answers = [_asked(server.url, n, f"chat {n}") for n in range(NUM_STREAMS)]
        server.stop()
        shutil.copytree(self.directory / "closed", self.directory / "killed")
        server = _start(self.directory / "killed")
        with httpx.stream("POST", **_request(server.url, "live", 4000, True)) as answer:
            next(answer.iter_lines())
            eventually(lambda: len(_asked(server.url, NUM_STREAMS, "live").events) > 3000)
            self.answers.append(_asked(server.url, NUM_STREAMS, "live"))
            self.answers[-1].is_live = True
            server.stop(9)
        with contextlib.closing(sqlite3.connect(self.directory / "closed" / NAME)) as db:
            rows = dict(db.execute("SELECT conversation, n FROM streams").fetchall())
        for answer_of in self.answers:
            answer_of.n = rows.get(answer_of.conversation, NUM_STREAMS + 1)

    def visit(self, seed: int) -> tuple[str, list[str]]:
        """Damages one copy of a folder and starts a server on it.

        Returns a description of the damage, and the faults that the server then showed.
        """
        rng = random.Random(seed)
        master = rng.choice(["closed", "killed"])
        directory = self.directory / f"visit-{seed}"
        shutil.copytree(self.directory / master, directory)
        damage = (wrong_rows if seed % 2 else damaged_pages)(directory, rng)
        server = _start(directory)
        try:
            wrong = [
                f"{answer.conversation}: {said}"
                for answer in self.answers
                if not (answer.is_live and master == "closed")
                if (said := _judge(server, answer, damage))
            ]
            _post(server.url, "afterwards", 3, True)
        except (httpx.HTTPError, AssertionError) as error:
            wrong = [f"{type(error).__name__}: {error}"]
        if code := server.stop():
            wrong.append(f"the server exited with code {code}")
        if any("Traceback" in line for line in server.lines):
            wrong.append("a traceback: " + " | ".join(server.lines[-5:]))
        shutil.rmtree(directory)
        what = f"seed {seed}, {damage.what} ({master})"
        return what, [f"{what}: {one}" for one in wrong]


def run_servers(num: int, seed: int, directory: Path) -> list[str]:
    """Runs `num` corruptions, each with its own server, and returns the faults."""
    directory.mkdir(parents=True)
    party = Party(directory)
    party.write()
    found = []
    for number in range(num):
        what, wrong = party.visit(seed * 1_000_000 + number)
        print(f"server {number}: {what}: {'; '.join(wrong) or 'as expected'}", flush=True)
        found += wrong
    return found


def _start(directory: Path) -> ServerProcess:
    try:
        return ServerProcess("--state-dir", str(directory), "--threads", "1").wait_until_ready()
    except subprocess.SubprocessError as error:
        raise AssertionError(str(error)) from error


def _request(url: str, conversation: str, num: int, is_streamed: bool) -> dict[str, object]:
    body = {"prompt": "Once upon a time", "max_tokens": num, "temperature": 0, "ignore_eos": True}
    named = {"X-Conversation-Id": conversation, "Idempotency-Key": conversation}
    asked = body | {"stream": is_streamed}
    return {"url": f"{url}/v1/completions", "json": asked, "headers": named, "timeout": 60}


def _post(url: str, conversation: str, num: int, is_streamed: bool) -> httpx.Response:
    answer = httpx.post(**_request(url, conversation, num, is_streamed))  # type: ignore[arg-type]
    assert answer.status_code == 200, answer.text
    return answer


def _asked(url: str, n: int, conversation: str) -> Answer:
    """Return the part of the stream that exists now, without waiting for the rest."""
    wanted = {"conversation_ids": [conversation]}
    (entry,) = httpx.post(f"{url}/v1/streams/lookup", json=wanted, timeout=LIMIT_S).json()
    events = f"{url}/v1/streams/{entry['stream_id']}/events"
    page = httpx.get(events, headers={"Accept": "application/json"}, timeout=LIMIT_S).json()
    body = b""
    if entry["is_done"]:
        by_name = {"conv_id": conversation}
        body = httpx.get(f"{url}/v1/stream", params=by_name, timeout=LIMIT_S).content
    told = b"".join(msgspec.json.encode(event) + b"\n" for event in page["events"])
    return Answer(n, conversation, entry["stream_id"], body, told)


def _judge(server: ServerProcess, answer: Answer, damage: Damage) -> str:
    """Return what is wrong with a stream that the server returns, or an empty string."""
    url = f"{server.url}/v1/streams/{answer.stream_id}"
    by_name = {"params": {"conv_id": answer.conversation}, "timeout": LIMIT_S}
    state = httpx.get(url, timeout=LIMIT_S)
    if state.status_code == 200 and (state.json()["state"] == "finished" or answer.is_live):
        again = _asked(server.url, answer.n, answer.conversation)
        if answer.is_live:
            return "" if again.events.startswith(answer.events) or damage.is_wal else "ALTERED"
        return "" if (again.body, again.events) == (answer.body, answer.events) else "ALTERED"
    if damage.rows is not None and answer.n not in damage.rows:
        return f"was affected by the damage to another stream: {state.status_code} {state.text}"
    if state.status_code == 404:
        was_moved = any("is kept as" in line for line in server.lines)
        is_told = damage.rows is not None or damage.is_wal or was_moved
        return "" if is_told else "is gone, and no log line says why"
    by_byte = httpx.get(f"{server.url}/v1/stream", **by_name)  # type: ignore[arg-type]
    # Another thread reads the server's log, so the line may arrive a little later.
    with contextlib.suppress(AssertionError):
        eventually(lambda: any(_ENDED in line for line in server.lines), within_s=5)
    named = [line for line in server.lines if _ENDED in line]
    deleted = httpx.delete(url, timeout=LIMIT_S).status_code
    gone = httpx.get(url, timeout=LIMIT_S).status_code
    code = state.json().get("error", {}).get("code")
    if (state.status_code, code, deleted, gone) != (500, "stream_unsound", 204, 404) or not named:
        return f"{state.status_code} {code}, DELETE {deleted}, then {gone}, named {named}"
    if by_byte.status_code not in (404, 500) or b"data: " in by_byte.content:
        return f"/v1/stream answers {by_byte.status_code} {by_byte.text}"
    return ""
