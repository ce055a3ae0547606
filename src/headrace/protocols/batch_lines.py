"""Lines of batches: checked before any is answered, and results in the forms of two APIs."""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import msgspec

from headrace.protocols.dialect import encode
from headrace.protocols.fields.kinds import Array, Kind, Object, String, missing, read_fields
from headrace.protocols.requests import decode
from headrace_common.errors import RequestError
from headrace_common.jobs import (
    BatchAsked,
    CheckedLines,
    CheckLines,
    LineFault,
    OpenedLine,
    OpenLine,
    ReadBatch,
    SplitRequests,
)
from headrace_common.request import Route

BATCH_FIELDS: Mapping[str, Kind] = {
    "endpoint": String(),
    "input_file_id": String(),
    "completion_window": String(),
    "metadata": Object(),
}
BATCH_REQUIRED = ("endpoint", "input_file_id", "completion_window")
REQUESTS_REQUIRED = ("requests",)
REQUESTS_FIELDS: Mapping[str, Kind] = {"requests": Array(Object(), most=1 << 20)}
_METADATA = (16, 64, 512)  # entries, characters of a name, of a value

BatchJob = CheckLines | OpenLine | ReadBatch | SplitRequests
Check = Callable[[bytes, Route], str | None]
"""Takes a body and its route; returns the model it names, or raises RequestError."""

MAX_FAULTS = 100
MAX_CUSTOM_ID = 512


class _Line(msgspec.Struct):
    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw()


class _Wish(msgspec.Struct):
    custom_id: Any = None
    params: msgspec.Raw = msgspec.Raw()


class _Wishes(msgspec.Struct):
    requests: list[_Wish]


class _Streams(msgspec.Struct):
    stream: Any = None


_line_of = msgspec.json.Decoder(_Line).decode
_wishes_of = msgspec.json.Decoder(_Wishes).decode
_streams_of = msgspec.json.Decoder(_Streams).decode


def do(job: BatchJob, body: bytes, check_body: Check) -> object:
    """The job's result; RequestError if it refuses `body`."""
    match job:
        case CheckLines(first, route):
            return check(body, first, route, check_body)
        case OpenLine():
            return opened(body)
        case ReadBatch():
            return asked(body)
        case SplitRequests(most, route):
            return split(body, most, route, check_body)


def asked(whole: bytes) -> BatchAsked:
    """The batch that a body asks for."""
    body = decode(whole)
    for name in BATCH_REQUIRED:
        if body.get(name) is None:
            raise missing(name)
    fields = read_fields(BATCH_FIELDS, body)
    metadata = fields.setdefault("metadata", {})
    most, longest_name, longest_value = _METADATA
    if len(metadata) > most or not all(
        len(name) <= longest_name and isinstance(value, str) and len(value) <= longest_value
        for name, value in metadata.items()
    ):
        message = f"metadata has up to {most} strings of {longest_value} characters, by names of "
        message += f"up to {longest_name}."
        raise RequestError("invalid_value", message, "metadata")
    return BatchAsked(**fields)


def check(lines: bytes, first: int, route: Route, check_body: Check) -> CheckedLines:
    """Checks whole lines; each fault has its line's number."""
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
    """The bodies of lines that were not checked yet; those of malformed lines are left out."""
    for _, line in _numbered(lines, 1):
        with contextlib.suppress(ValueError, RecursionError):
            yield _line_of(line).body


def bodies_of_requests(whole: bytes) -> Iterator[msgspec.Raw]:
    """The same for the requests of one body."""
    with contextlib.suppress(ValueError, RecursionError):
        yield from (wish.params for wish in _wishes_of(whole).requests)


def _numbered(lines: bytes, first: int) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(lines.split(b"\n"), first):
        if line.strip():
            yield number, line


def _check_one(line: bytes, route: Route, check_body: Check) -> tuple[str, str | None]:
    """The line's custom_id and model; RequestError names the fault."""
    found = _line(line)
    custom_id = _custom_id(found.custom_id)
    if found.method != "POST":
        raise RequestError("invalid_value", "method is POST.", "method")
    if found.url != route:
        message = f"url is the batch's endpoint, {route}."
        raise RequestError("invalid_value", message, "url")
    try:
        return custom_id, _check_body(bytes(found.body), route, check_body)
    except RequestError as error:
        raise _within("body", error) from None


def _line(line: bytes) -> _Line:
    """RequestError unless it is a JSON object in UTF-8."""
    try:
        line.decode()
        return _line_of(line)
    except UnicodeDecodeError as error:
        message = f"The line is not UTF-8 (byte {error.start + 1})."
    except (ValueError, RecursionError) as error:
        message = f"The line is not a JSON object: {error}."
    raise RequestError("invalid_json", message)


def _custom_id(given: Any) -> str:
    if not isinstance(given, str) or not 0 < len(given) <= MAX_CUSTOM_ID:
        message = f"custom_id is a string of 1 to {MAX_CUSTOM_ID} characters."
        raise RequestError("invalid_value", message, "custom_id")
    return given


def _check_body(body: bytes, route: Route, check_body: Check) -> str | None:
    if not body:
        raise RequestError("missing_required_parameter", "It is required, an object.", None)
    model = check_body(body, route)
    if _streams_of(body).stream is True:
        message = "Lines of a batch are answered whole; leave stream out."
        raise RequestError("unsupported_parameter", message, "stream")
    return model


def _within(path: str, error: RequestError) -> RequestError:
    """The error of a body, told of where the body stands."""
    param = f"{path}.{error.param}" if error.param else path
    return RequestError(error.code, str(error), param, error.extra)


def opened(line: bytes) -> OpenedLine:
    """The parts of a line that was checked."""
    found = _line(line)
    return OpenedLine(_custom_id(found.custom_id), bytes(found.body))


def custom_id_of(line: bytes) -> str:
    """The custom_id of a line that was checked."""
    return _custom_id(_line(line).custom_id)


def split(body: bytes, most: int, route: Route, check_body: Check) -> bytes:
    """The requests of a body as lines of a batch; RequestError names the first that is wrong."""
    decode(body)  # says in our words what is no JSON
    try:
        wishes = _wishes_of(body).requests
    except ValueError:
        message = "requests is an array of objects with custom_id and params."
        raise RequestError("invalid_value", message, "requests") from None
    if not 0 < len(wishes) <= most:
        message = f"requests has {len(wishes)} entries, and 1 to {most} are taken; split them, "
        message += "or raise --max-batch-lines."
        raise RequestError("invalid_value", message, "requests")
    lines, seen = list[bytes](), set[str]()
    for number, wish in enumerate(wishes):
        path = f"requests[{number}]"
        try:
            custom_id = _custom_id(wish.custom_id)
            if custom_id in seen:
                message = f"custom_id {custom_id!r} is that of an earlier request."
                raise RequestError("duplicate_id", message, "custom_id")
            seen.add(custom_id)
        except RequestError as error:
            raise _within(path, error) from None
        try:
            _check_body(bytes(wish.params), route, check_body)
        except RequestError as error:
            raise _within(f"{path}.params", error) from None
        line = {"custom_id": custom_id, "method": "POST", "url": route}
        lines.append(encode({**line, "body": _one_line(wish.params)}) + b"\n")
    return b"".join(lines)


def _one_line(params: msgspec.Raw) -> msgspec.Raw:
    """The same bytes, unless a line break stands between them."""
    if b"\n" not in bytes(params) and b"\r" not in bytes(params):
        return params
    return msgspec.Raw(encode(msgspec.json.decode(params)))


class ResultForm(Protocol):
    """The form of an API's results: lines that begin with the result's id."""

    def answered(self, id: str, custom_id: str, status: int, body: bytes) -> bytes:
        """The result of a line that came to an answer, or to an error of its API."""

    def missed(self, id: str, custom_id: str, kind: str) -> bytes:
        """The result of a line that was not answered: canceled or expired."""


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


FORMS: dict[str, ResultForm] = {"openai": OpenAiResults(), "anthropic": AnthropicResults()}
