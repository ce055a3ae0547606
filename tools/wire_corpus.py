"""Records what a server answers to a fixed corpus of requests, and compares two records.

    PYTHONPATH=$TREE/src python -m tools.wire_corpus --out before.json
    PYTHONPATH=$TREE/src python -m tools.wire_corpus --out after.json --against before.json

The servers run the tree that PYTHONPATH names, with a tiny model and options that make its tokens
deterministic. Status, headers and body bytes are kept. Ids, times and rates become placeholders.
Log probabilities may differ by rounding. The exit code is 1 where the records differ otherwise.
"""

import argparse
import difflib
import http.client
import importlib.util
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tools.harness.servers import running_server
from tools.harness.tiny_models import make_tiny_model

FLAGS = (
    *("--threads", "1", "--served-model-name", "tiny", "--max-model-len", "1024"),
    *("--max-stall-ms", "off", "--max-step-ms", "off", "--max-step-tokens", "128"),
    *("--kv-cache-memory-bytes", str(64 << 20), "--heartbeat-s", "10"),
)
_NOT_KEPT = ("date", "content-length")  # the length is checked against the body instead
_TIMEOUT_S = 120


class Answer(NamedTuple):
    """One answer as it came."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes

    @property
    def stream_id(self) -> str:
        return dict(self.headers).get("x-stream-id", "")

    @property
    def is_sse(self) -> bool:
        return dict(self.headers).get("content-type", "").startswith("text/event-stream")


class Recorder:
    """Sends requests to one server and keeps what it answers, by name."""

    def __init__(self, url: str, folder: Path, kept: dict[str, list[str]]) -> None:
        self.address = url.removeprefix("http://")
        self._folder = str(folder)
        self._kept = kept

    def send(self, name: str, method: str, path: str, body: Any = None, **options: Any) -> Answer:
        """A body that is no bytes is sent as JSON.

        `headers` go with it; `shape` keeps the kinds of a JSON body's values instead of the values.
        """
        with self.open(method, path, body, options.get("headers", {})) as reply:
            answer = answer_of(reply, reply.read())
        self.keep(name, answer, options.get("shape", False))
        return answer

    def open(
        self, method: str, path: str, body: Any, headers: dict[str, str]
    ) -> http.client.HTTPResponse:
        """The answer as far as its headers."""
        connection = http.client.HTTPConnection(self.address, timeout=_TIMEOUT_S)
        raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        typed = {} if raw is None else {"Content-Type": "application/json"}
        connection.request(method, path, raw, typed | headers)
        return connection.getresponse()

    def keep(self, name: str, answer: Answer, shape: bool = False) -> None:
        assert name not in self._kept, f"{name} is in the corpus twice"
        ids: dict[str, str] = {}
        clean = Placeholders(self._folder, ids)
        headers = sorted(
            f"{key}: {clean(value)}" for key, value in answer.headers if key not in _NOT_KEPT
        )
        lengths = [int(value) for key, value in answer.headers if key == "content-length"]
        is_right = all(length == len(answer.body) for length in lengths)
        length = f"content-length: {'right' if is_right else lengths}"
        text = answer.body.decode("utf-8", "backslashreplace")
        if shape:
            lines = shape_of(text, answer.is_sse)
        elif answer.is_sse:
            lines = list(settled(clean(text)))
        else:
            lines = split(clean(text.lstrip("\n") if "heartbeat" in name else text))
        self._kept[name] = [str(answer.status), *headers, *([length] * bool(lengths)), "", *lines]


class Placeholders:
    """Replaces what differs from run to run, and nothing else."""

    def __init__(self, folder: str, ids: dict[str, str]) -> None:
        self._folder = folder
        self._ids = ids

    def __call__(self, text: str) -> str:
        text = text.replace(self._folder, "<folder>")
        text = re.sub(r"\b(chatcmpl|cmpl)-[0-9a-f]{32}\b", self._numbered, text)
        text = re.sub(r"^[0-9a-f]{32}$", "<request id>", text)
        number = r"-?\d+(?:\.\d+)?(?:e-?\d+)?"
        text = re.sub(rf'("\w+_(?:ms|per_second)":)(?:{number}|null)', r"\1<n>", text)
        text = re.sub(r'("(?:created|started_at|total_bytes)":)\d+', r"\1<n>", text)
        text = re.sub(r'("completed_at":)[1-9]\d*', r"\1<n>", text)
        return re.sub(r"Offset \d+ is beyond the \d+ bytes", "Offset <n> of <n> bytes", text)

    def _numbered(self, found: re.Match[str]) -> str:
        return self._ids.setdefault(found[0], f"{found[1]}-<id {len(self._ids)}>")


_FIGURES = re.compile(r'("(?:seq|processed|position|waiting)":)\d+')
_TIMED = (
    *('"prompt_progress":', '"queue":', '"kind":"heartbeat"', '"kind":"queued"'),
    *('"kind":"progress"', '"delta":{},"finish_reason":null}]}', ": ping"),
    '"text":"","logprobs":null,"finish_reason":null}]}',
)


def settled(text: str) -> Iterator[str]:
    """Lines of server-sent events; how many frames tell of progress and life depends on time.

    A run of those becomes one frame of each form, without figures.
    """
    run: set[str] = set()
    for frame in re.split(r"(?<=\n\n)|(?<=: ping\n)", text):
        if any(mark in frame for mark in _TIMED):
            without_id = re.sub(r"^id: .*\n", "id: <n>\n", frame)
            run.add(_FIGURES.sub(r"\1<n>", without_id))
            continue
        for timed in sorted(run):
            yield from split(timed)
        run.clear()
        yield from split(frame)
    for timed in sorted(run):
        yield from split(timed)


def split(text: str) -> list[str]:
    """Lines short enough to compare; joined, they are the text."""
    return [line for line in re.split(r'(?<=\n)|(?<=,)(?=["{])', text) if line]


def shape_of(text: str, is_sse: bool) -> list[str]:
    """The forms that a body's JSON takes, each once and in order of appearance."""
    found = re.findall(r"^data: (\{.*)$", text, re.MULTILINE) if is_sse else [text]
    return list(dict.fromkeys(json.dumps(_kinds(json.loads(one))) for one in found))


_SAID = ("message", "type", "code", "param", "object")


def _kinds(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: item if key in _SAID else _kinds(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_kinds(value[0]), "..."] if value else []
    return "number" if type(value) in (int, float) else type(value).__name__


def answer_of(reply: http.client.HTTPResponse, body: bytes) -> Answer:
    return Answer(reply.status, [(k.lower(), v) for k, v in reply.getheaders()], body)


def record() -> dict[str, list[str]]:
    """All answers, by the names of their requests."""
    from tools.wire_requests import CORPORA

    kept: dict[str, list[str]] = {}
    order = {"PYTHONHASHSEED": "0"}  # a 405 lists methods in the order of a set
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "tiny")
        for number, (flags, parts) in enumerate(CORPORA):
            state = ("--state-dir", f"{folder}/state-{number}")
            with running_server(str(model), *FLAGS, *state, *flags, environment=order) as server:
                recorder = Recorder(server.url, Path(folder), kept)
                for part in parts:
                    part(recorder)
    return kept


_FRACTION = re.compile(r"-?\d+\.\d{5,}(?:e-?\d+)?")
_ROUNDING = 1e-4


def differences(before: dict[str, list[str]], after: dict[str, list[str]]) -> list[str]:
    """A unified diff of the answers that differ."""
    found: list[str] = []
    for name in dict.fromkeys((*before, *after)):
        pair = [
            [line.rstrip("\n") for line in one.get(name, ["absent"])] for one in (before, after)
        ]
        if len(pair[0]) == len(pair[1]):
            both = zip(*pair, strict=True)
            pair[1] = [old if _is_rounding(old, new) else new for old, new in both]
        found += difflib.unified_diff(*pair, f"before: {name}", f"after: {name}", lineterm="", n=2)
    return found


def _is_rounding(old: str, new: str) -> bool:
    if _FRACTION.sub("", old) != _FRACTION.sub("", new):
        return False
    pairs = zip(_FRACTION.findall(old), _FRACTION.findall(new), strict=True)
    return all(abs(float(x) - float(y)) < _ROUNDING for x, y in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the record here")
    parser.add_argument("--against", type=Path, help="compare with this record")
    given = parser.parse_args()
    spec = importlib.util.find_spec("headrace")
    print("source:", spec.origin if spec else "none", file=sys.stderr)
    kept = record()
    print(f"{len(kept)} answers", file=sys.stderr)
    if given.out:
        given.out.write_text(json.dumps(kept, indent=0, ensure_ascii=False))
    found = differences(json.loads(given.against.read_text()), kept) if given.against else []
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
