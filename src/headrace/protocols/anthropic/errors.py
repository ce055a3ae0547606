"""Formats errors for Anthropic's clients: types, statuses, messages and field names."""

import re
from collections.abc import Mapping
from typing import Any

from headrace.protocols.dialect import encode, named
from headrace.streams.events import Error
from headrace_common.errors import KINDS, RequestError

_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "overloaded_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_OVERLOADED = 529
# Unlike all other errors with status 429, this error is caused by the client.
_OVER_QUOTA = "rate_limit_exceeded"
_OWN_PATHS = (
    (re.compile(r"^tools\[(\d+)\]\.function\.parameters"), r"tools[\1].input_schema"),
    (re.compile(r"^tools\[(\d+)\]\.function\."), r"tools[\1]."),
    (re.compile(r"^tool_choice\.function\."), "tool_choice."),
    (re.compile(r"^response_format(\.json_schema)?"), "output_config.format"),
    (re.compile(r"^stop\b"), "stop_sequences"),
)
"""Pairs of a regular expression and a replacement.

The replacement turns the path of a chat field into the path of this API's field.
"""

_DETAILS: Mapping[tuple[str, str | None], dict[str, Any]] = {
    ("unsupported_parameter", "thread"): {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    },
}
"""Details that clients evaluate, by the error's code and parameter.

After the error about `thread`, a client sends the whole conversation in each request.
"""


class AnthropicErrors:
    """Formats errors as Anthropic's API does, with two additional fields: `param` and `code`."""

    REQUEST_ID = "request-id"
    OWN_PATHS = _OWN_PATHS
    SCHEMA: Mapping[str, Any] = {
        "title": "MessagesError",
        "type": "object",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message", "param", "code"],
                "properties": {
                    "type": {"enum": sorted({*_TYPES.values(), "rate_limit_error"})},
                    "message": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"enum": sorted(KINDS)},
                },
            },
            "request_id": {"type": "string"},
        },
    }

    def status(self, error: RequestError | Error) -> int:
        status = _status_of(error)
        return _OVERLOADED if status == 429 and error.code != _OVER_QUOTA else status

    def body(self, error: RequestError | Error, request_id: str = "") -> bytes:
        more = {"request_id": request_id} if request_id else {}
        return encode({"type": "error", "error": _error_of(error)} | more)

    def frame(self, error: RequestError | Error) -> bytes:
        return named("error", self.body(error))


def _status_of(error: RequestError | Error) -> int:
    return error.status if isinstance(error, Error) else error.kind.status


def _error_of(error: RequestError | Error) -> dict[str, Any]:
    kind = _TYPES.get(_status_of(error), _TYPES[400])
    shown: dict[str, Any] = {"type": "rate_limit_error" if error.code == _OVER_QUOTA else kind}
    if isinstance(error, Error):
        return shown | {"message": error.message, "param": None, "code": error.code}
    message, param = error.message, error.param
    for known, own in _OWN_PATHS:
        if param and known.search(param):
            renamed = known.sub(own, param)
            message, param = message.replace(param, renamed), renamed
            break
    if error.code == "context_length_exceeded":
        message = _too_long(message, **error.extra)
    details = _DETAILS.get((error.code, param))
    shown |= {"message": message, "param": param, "code": error.code, **error.extra}
    return shown | {"details": details} if details else shown


def _too_long(original: str, n_prompt_tokens: int, n_ctx: int) -> str:
    # Clients recognize this error by the wording, and then shorten the conversation.
    most = min(n_ctx, n_prompt_tokens - 1)
    words = f"prompt is too long: {n_prompt_tokens} tokens > {most} maximum"
    is_estimate = f"at least {n_prompt_tokens}" in original
    return f"{words} (at least; the end of a long text is not counted)" if is_estimate else words
