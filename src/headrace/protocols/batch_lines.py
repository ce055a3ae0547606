"""Checks all lines of a batch before any line is answered, and writes the result lines.

The results are in the format of OpenAI's or Anthropic's API.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import msgspec

from headrace.protocols.dialect import encode
from headrace.protocols.fields.common import check_required
from headrace.protocols.fields.kinds import Array, Kind, Object, String, read_fields
from headrace.protocols.openai.response_fields import Metadata
from headrace.protocols.requests import decode
from headrace_common.errors import RequestError
from headrace_common.request import Route
from headrace_common.worker_jobs import (
    BatchBody,
    CheckedLines,
    CheckLines,
    LineFault,
    OpenedLine,
    OpenLine,
    ReadBatch,
    SplitRequests,
)

BATCH_FIELDS: Mapping[str, Kind] = {
    "endpoint": String(),
    "input_file_id": String(),
    "completion_window": String(),
    "metadata": Metadata(),
}
BATCH_REQUIRED = ("endpoint", "input_file_id", "completion_window")
REQUESTS_REQUIRED = ("requests",)
REQUESTS_FIELDS: Mapping[str, Kind] = {"requests": Array(Object(), most=1 << 20)}

BatchJob = CheckLines | OpenLine | ReadBatch | SplitRequests
Check = Callable[[bytes, Route], str | None]
"""Checks a body for a route. Returns the model that the body names, or raises RequestError."""

MAX_FAULTS = 100
MAX_CUSTOM_ID = 512


class _Line(msgspec.Struct):
    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw()


class _BatchRequest(msgspec.Struct):
    custom_id: Any = None
    params: msgspec.Raw = msgspec.Raw()


class _BatchRequests(msgspec.Struct):
    requests: list[_BatchRequest]


class _Streams(msgspec.Struct):
    stream: Any = None


_line_of = msgspec.json.Decoder(_Line).decode
_requests_of = msgspec.json.Decoder(_BatchRequests).decode
_streams_of = msgspec.json.Decoder(_Streams).decode


def do(job: BatchJob, body: bytes, check_body: Check) -> object:
    """Return the job's result. Raise RequestError if the job refuses `body`."""
    match job:
        case CheckLines(first, route):
            return check(body, first, route, check_body)
        case OpenLine():
            return opened(body)
        case ReadBatch():
            return asked(body)
        case SplitRequests(most, route):
            return split(body, most, route, check_body)


def asked(whole: bytes) -> BatchBody:
    """Return the batch that a body asks for. Raise RequestError if a field is wrong."""
    body = decode(whole)
    check_required(BATCH_REQUIRED, body)
    return BatchBody(**read_fields(BATCH_FIELDS, body))


def check(lines: bytes, first: int, route: Route, check_body: Check) -> CheckedLines:
    """Check complete lines, numbered from `first`; each fault is reported with its line number."""
    digests, models = list[bytes](), dict[str, int]()
    faults = list[LineFault]()
    for number, line in _numbered(lines, first):
        try:
            custom_id, model = _check_one(line, route, check_body)
        except RequestError as error:
            custom_id = str(number)
            if len(faults) < MAX_FAULTS:
                faults.append(LineFault(number, error.code, str(error), error.param))
        else:
            if model is not None:
                models.setdefault(model, number)
        digests.append(hashlib.blake2b(custom_id.encode(), digest_size=16).digest())
    return CheckedLines(len(digests), b"".join(digests), models, tuple(faults))


def bodies_of_lines(lines: bytes) -> Iterator[msgspec.Raw]:
    """Yield the bodies of unchecked lines; skip malformed lines."""
    for _, line in _numbered(lines, 1):
        with contextlib.suppress(ValueError, RecursionError):
            yield _line_of(line).body


def bodies_of_requests(whole: bytes) -> Iterator[msgspec.Raw]:
    """Yield the unchecked bodies of a batch's requests; nothing if the batch is malformed."""
    with contextlib.suppress(ValueError, RecursionError):
        yield from (request.params for request in _requests_of(whole).requests)


def _numbered(lines: bytes, first: int) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(lines.split(b"\n"), first):
        if line.strip():
            yield number, line


def _check_one(line: bytes, route: Route, check_body: Check) -> tuple[str, str | None]:
    """Return the line's custom_id and model. Raise RequestError at the first fault."""
    found = _line(line)
    custom_id = _custom_id(found.custom_id)
    if found.method != "POST":
        raise RequestError("invalid_value", "method must be POST.", "method")
    if found.url != route:
        message = f"url must be the batch's endpoint, {route}."
        raise RequestError("invalid_value", message, "url")
    try:
        return custom_id, _check_body(bytes(found.body), route, check_body)
    except RequestError as error:
        raise _within("body", error) from None


def _line(line: bytes) -> _Line:
    """Decode a line. Raise RequestError if the line is not a JSON object in UTF-8."""
    try:
        line.decode()
        return _line_of(line)
    except UnicodeDecodeError as error:
        message = f"The line is not UTF-8 (byte {error.start + 1})."
    except (ValueError, RecursionError) as error:
        message = f"The line is not a JSON object: {error}."
    raise RequestError("invalid_json", message)


def _custom_id(value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_CUSTOM_ID:
        message = f"custom_id must be a string of 1 to {MAX_CUSTOM_ID} characters."
        raise RequestError("invalid_value", message, "custom_id")
    return value


def _check_body(body: bytes, route: Route, check_body: Check) -> str | None:
    if not body:
        raise RequestError(
            "missing_required_parameter",
            "The request body is required; it must be an object.",
            None,
        )
    model = check_body(body, route)
    if _streams_of(body).stream is True:
        message = "The lines of a batch cannot be streamed; leave stream out."
        raise RequestError("unsupported_parameter", message, "stream")
    return model


def _within(path: str, error: RequestError) -> RequestError:
    """Return the error of a nested body, with `path` in front of the parameter's path."""
    param = f"{path}.{error.param}" if error.param else path
    return RequestError(error.code, str(error), param, error.extra)


def opened(line: bytes) -> OpenedLine:
    """Return the custom_id and the body of a line that has passed the check."""
    found = _line(line)
    return OpenedLine(_custom_id(found.custom_id), bytes(found.body))


def custom_id_of(line: bytes) -> str:
    """Return the custom_id of a line that has passed the check."""
    return _custom_id(_line(line).custom_id)


def split(body: bytes, most: int, route: Route, check_body: Check) -> bytes:
    """Write a body's requests as batch lines. Raise RequestError at the first fault."""
    # The result is not used. This call only reports faults in the JSON, in a clear message.
    decode(body)
    try:
        requests = _requests_of(body).requests
    except ValueError:
        message = "requests must be an array of objects with custom_id and params."
        raise RequestError("invalid_value", message, "requests") from None
    if not 0 < len(requests) <= most:
        message = f"requests has {len(requests)} entries; it must have 1 to {most}. Split it, or "
        message += "raise --max-batch-lines."
        raise RequestError("invalid_value", message, "requests")
    lines, seen = list[bytes](), set[str]()
    for number, request in enumerate(requests):
        path = f"requests[{number}]"
        try:
            custom_id = _custom_id(request.custom_id)
            if custom_id in seen:
                message = f"custom_id {custom_id!r} is already used by an earlier request."
                raise RequestError("duplicate_id", message, "custom_id")
            seen.add(custom_id)
        except RequestError as error:
            raise _within(path, error) from None
        try:
            _check_body(bytes(request.params), route, check_body)
        except RequestError as error:
            raise _within(f"{path}.params", error) from None
        line = {"custom_id": custom_id, "method": "POST", "url": route}
        lines.append(encode({**line, "body": _one_line(request.params)}) + b"\n")
    return b"".join(lines)


def _one_line(params: msgspec.Raw) -> msgspec.Raw:
    """Return the JSON on one line; JSON without line breaks stays unchanged."""
    if b"\n" not in bytes(params) and b"\r" not in bytes(params):
        return params
    return msgspec.Raw(encode(msgspec.json.decode(params)))


class ResultFormat(Protocol):
    """Writes results as lines in an API's format. Each line begins with the result's id."""

    def answered(self, id: str, custom_id: str, status: int, body: bytes) -> bytes:
        """Return the result of a line that got a response. The response may be an error."""

    def missed(self, id: str, custom_id: str, kind: str) -> bytes:
        """Return the result of a line that was not answered; `kind` is "canceled" or "expired"."""


_MISSED = {
    "canceled": ("batch_cancelled", "The batch was cancelled before this line was answered."),
    "expired": ("batch_expired", "The batch expired before this line was answered."),
}


class OpenAiResults:
    def answered(self, id: str, custom_id: str, status: int, body: bytes) -> bytes:
        head = encode({"id": id, "custom_id": custom_id})[:-1]
        rest = encode({"status_code": status, "request_id": id})[:-1]
        return head + b',"response":' + rest + b',"body":' + body + b'},"error":null}\n'

    def missed(self, id: str, custom_id: str, kind: str) -> bytes:
        code, message = _MISSED[kind]
        error = {"code": code, "message": message}
        return encode({"id": id, "custom_id": custom_id, "response": None, "error": error}) + b"\n"


class AnthropicResults:
    def answered(self, id: str, custom_id: str, status: int, body: bytes) -> bytes:
        kind, name = (b"succeeded", b"message") if status == 200 else (b"errored", b"error")
        result = b'{"type":"' + kind + b'","' + name + b'":' + body + b"}"
        rest = encode({"custom_id": custom_id})[1:]
        return encode({"id": id})[:-1] + b',"result":' + result + b"," + rest + b"\n"

    def missed(self, id: str, custom_id: str, kind: str) -> bytes:
        return encode({"id": id, "result": {"type": kind}, "custom_id": custom_id}) + b"\n"


FORMS: dict[str, ResultFormat] = {"openai": OpenAiResults(), "anthropic": AnthropicResults()}
