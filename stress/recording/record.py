"""Records what a server answers, what `headrace.LLM` returns, and what the commands print."""

import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stress.attack.bodies import drawn_body
from stress.recording.bodies import CASES, LONG, MODEL, READING, user
from stress.recording.parts import batches, responses, sockets, streams
from stress.recording.rules import normalise
from stress.recording.session import JSON, Recording, Session
from tools.harness.histories import history
from tools.harness.servers import ServerProcess

FLAGS = ("--dtype", "float32", "--threads", "1", "--guess", "off", "--heartbeat-s", "10")
"""With one thread and without speculative tokens, each token has its own frame."""
KEYS = {"HEADRACE_API_KEYS": "anns-key,bobs-key", "HEADRACE_ADMIN_KEY": "admins-key"}
ROOT = Path(__file__).parents[2]
# fmt: off
VERBS = (
    "batch", "bench", "cache", "chat", "config", "doctor", "embed", "generate", "merge", "models",
    "pull", "serve",
)
INFORMATION = (
    "/health", "/v1/health", "/health/live", "/v1/models", "/v1/models/headrace-mini",
    "/v1/models/none", "/v1/models?limit=1", "/v1/models?limit=x", "/models", "/props",
    "/props?model=none", "/slots", "/slots?fail_on_no_slot=1", "/tokenizer_info", "/openapi.json",
    "/manage/desired", "/manage/live?model=none", "/api/version", "/api/tags", "/api/ps",
    "/", "/dashboard", "/batches", "/v1/files", "/v1/batches", "/v1/messages/batches",
    "/v1/nothing", "/v1//models", "/v1/models/", "/api/nothing", "/v1/messages/nothing",
    "/v1/streams/none", "/v1/stream/none", "/v1/stream", "/v1/durable/none", "/v1/responses/none",
    "/v1/files/none", "/v1/batches/none",
)
# fmt: on
FIGURES = ("/manage/state", "/manage/live", "/manage/history", "/v1/models", "/models")
ANTHROPIC = {"Anthropic-Version": "2023-06-01"}
NUM_HISTORIES, NUM_DRAWN = 60, 10
# A value that nearly every field rejects. Then the fields that keep sampling greedy, which are
# never omitted.
_WRONG, _RANDOM = [{"x": []}], ("temperature", "options")


def program(code: Path) -> dict[str, str]:
    """Return the environment in which Python imports the code of that checkout."""
    path = f"{code / 'src'}:{ROOT}"
    # The order of some headers depends on the hashes of their names, so hashing must not be random.
    return {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0", "COLUMNS": "100"}


@contextmanager
def running(code: Path, state: Path, *flags: str, **environment: str) -> Iterator[ServerProcess]:
    """Run a server of that checkout."""
    server = ServerProcess(
        *FLAGS, "--state-dir", str(state), *flags, environment=program(code) | environment
    )
    try:
        yield server.wait_until_ready()
    finally:
        server.stop()


def record(code: Path, path: Path) -> int:
    """Write all answers to a file; return their number."""
    recording = Recording(path)
    with tempfile.TemporaryDirectory(prefix="recording-") as folder:
        with running(code, Path(folder) / "open") as server:
            session = Session(server.url, recording)
            for part in (
                _information,
                _cases,
                _reading,
                streams,
                responses,
                sockets,
                batches,
                _inputs,
                _fields,
                _http,
            ):
                recording.section(part.__name__.strip("_"))
                part(session)
        with running(code, Path(folder) / "keys", **KEYS) as server:
            recording.section("keys")
            _keys(server.url, recording)
    recording.section("python")
    _python(code, recording)
    recording.section("commands")
    _commands(code, recording)
    recording.close()
    return recording.num_answers


def _information(session: Session) -> None:
    for path in INFORMATION:
        session.get(path)
    for path in ("/v1/models", "/v1/models/headrace-mini", "/v1/models/none"):
        session.get(path, "as Anthropic", **ANTHROPIC)
    session.get("/", "as a browser", Accept="text/html")
    session.get("/", "packed", Accept_Encoding="gzip", Accept="text/html")
    # The history has a point every ten seconds.
    session.until("/manage/history", lambda it: it["points"])
    for path in FIGURES:
        session.get(path, "figures", view="shape")
    session.get("/metrics", view="names")


def _cases(session: Session) -> None:
    for route, (body, cases) in CASES.items():
        for name, changes in cases.items():
            for stream in (False, True):
                session.post(
                    route, body | changes | {"stream": stream}, f"{name}{', streamed' * stream}"
                )


def _reading(session: Session) -> None:
    for route, bodies in READING.items():
        for body in bodies:
            session.post(route, body)


def _inputs(session: Session) -> None:
    """Send the histories of other providers' clients, and bodies with random fields."""
    limits = {"/v1/responses": "max_output_tokens"}
    for seed in range(NUM_HISTORIES):
        made = history(seed)
        fixed = {limits.get(made.route, "max_tokens"): 4, "temperature": 0, "model": MODEL}
        session.post(made.route, made.body | fixed, f"history {seed}")
    for route in ("/tokenize", "/detokenize", "/apply-template", "/v1/streams/lookup"):
        rng = random.Random(route)
        for number in range(NUM_DRAWN):
            session.post(route, drawn_body(rng, route, 2000)[0], f"drawn {number}")


def _fields(session: Session) -> None:
    """Send each field of each route with a value of a wrong type, and omit it once."""
    document = session.fetch("GET", "/openapi.json").json
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json")
            if content is None:
                continue
            base = CASES[path][0] if path in CASES else READING.get(path, [{}])[0]
            for field in content["schema"].get("properties", {}):
                body = base | {field: _WRONG}
                session.ask(method.upper(), path, body, f"wrong {field}", JSON)
            for field in [it for it in base if it not in _RANDOM]:
                body = {name: value for name, value in base.items() if name != field}
                session.ask(method.upper(), path, body, f"without {field}", JSON)


BROKEN = (
    *(b"", b"{", b"[]", b"null", b"nonsense", b"\xff\xfe{}", b"\xef\xbb\xbf{}"),
    *(b'{"a":"\\ud800"}', b'{"a":NaN}', b"[" * 500, b'{"a":' * 1000),
)


def _http(session: Session) -> None:
    """Send requests that are valid HTTP but that the routes do not accept."""
    for route, (body, _) in CASES.items():
        for number, broken in enumerate(BROKEN):
            session.post(route, broken, f"broken {number}")
        for method in ("GET", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"):
            session.ask(method, route)
        session.ask("POST", route, body, "as text", {"Content-Type": "text/plain"})
        session.ask("POST", route, body, "without a type")
        session.post(route, body, "packed", Content_Encoding="gzip")
        session.post(route, body, "from a page", Origin="https://evil.example")
        session.post(route, body, "with a bad name", X_Conversation_Id="é" * 3)
        session.post(route, body, "with a long key", Idempotency_Key="a" * 300)
    for path in INFORMATION:
        for method in ("HEAD", "POST", "PUT", "DELETE"):
            if (method, path) not in {("DELETE", "/v1/stream/none")}:
                session.ask(method, path)
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x"}
        for origin in ("http://127.0.0.1:3000", "https://evil.example", "null"):
            session.ask("OPTIONS", path, None, origin, asked | {"Origin": origin})


def _keys(url: str, recording: Recording) -> None:
    keys = {
        "nobody": "",
        "stranger": "x",
        "ann": "anns-key",
        "bob": "bobs-key",
        "admin": "admins-key",
    }
    body = CASES["/v1/completions"][0]
    for name, key in keys.items():
        bearer = Session(url, recording, Authorization=f"Bearer {key}")
        other = Session(url, recording, X_Api_Key=key)
        for path in (*INFORMATION, "/manage/state", "/metrics"):
            view = {"/metrics": "names", "/manage/state": "shape"}.get(path, "whole")
            bearer.get(path, name, view)
        for route, (one, _) in CASES.items():
            other.post(route, one, name)
        for path in ("/models/unload", "/v1/load_lora_adapter", "/api/pull"):
            other.post(path, {}, name)
        other.talk(
            f"socket of {name}",
            {"type": "request", "id": "a", "route": "/v1/completions", "body": body},
        )
    ann = Session(url, recording, Authorization="Bearer anns-key")
    bob = Session(url, recording, Authorization="Bearer bobs-key")
    made = ann.post("/v1/responses", CASES["/v1/responses"][0] | {"store": True}, "of ann")
    for session in (ann, bob):
        session.get(f"/v1/responses/{made.id}", "of ann")
        session.get(f"/v1/streams/{made.id}/events", "of ann")
        session.ask("DELETE", f"/v1/responses/{made.id}", None, "of ann")


PYTHON = f"""
import json
from headrace import LLM
calls = [
    ("generate", ["Count from 1 to 5."], dict(max_tokens=12, temperature=0)),
    ("generate", [["one", "two"]], dict(max_tokens=4, temperature=0.9, seed=3, logprobs=2)),
    ("generate", [[100, 200]], dict(max_tokens=4, temperature=0)),
    ("generate", ["one"], dict(n=2, temperature=0.9, seed=3, max_tokens=4)),
    ("chat", ["What is 23 + 45?"], dict(temperature=0)),
    ("chat", [{user("Say hello.")!r}], dict(temperature=0, stop=["l"])),
    ("chat", ["What is 12 + 30? /think"], dict(temperature=0, max_tokens=90)),
    ("stream", ["Say hello."], dict(temperature=0)),
    ("embed", ["one"], dict()),
    ("embed", [["one", "two"]], dict()),
    ("rerank", ["one", ["two"]], dict()),
    ("generate", ["one"], dict(zz=1)),
    ("generate", ["one"], dict(max_tokens="many")),
    ("generate", [{LONG * 6!r}], dict()),
    ("chat", [[]], dict()),
    ("chat", [None], dict()),
    ("generate", ["one"], dict(model="none")),
]
with LLM.load("headrace-mini", dtype="float32", threads=1, guess="off") as llm:
    for verb, given, fields in calls:
        try:
            found = getattr(llm, verb)(*given, **fields)
            shown = list(found) if verb == "stream" else found
        except Exception as error:
            shown = type(error).__name__, str(error), error.code, error.param
        print(json.dumps([verb, fields, repr(shown)]))
"""


def _python(code: Path, recording: Recording) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PYTHON], env=program(code), capture_output=True, text=True
    )
    for line in ended.stdout.splitlines():
        recording.add(line.partition(",")[0].strip('["'), body=[normalise(line)])
    recording.add("exit", status=ended.returncode, body=[normalise(ended.stderr[-2000:])])


def _commands(code: Path, recording: Recording) -> None:
    for arguments in (["--help"], ["nothing"], *([verb, "--help"] for verb in VERBS)):
        command = [sys.executable, "-m", "headrace", *arguments]
        ended = subprocess.run(command, env=program(code), capture_output=True, text=True)
        body = [normalise(ended.stdout), normalise(ended.stderr)]
        recording.add(" ".join(arguments), status=ended.returncode, body=body)
