"""One tree of exceptions: programs act on `code`, people on the message.

A message has the figure, the limit and the remedy. One that clients get has never a path or an
exception's text.
"""

import msgspec

from headrace.errors import ConfigError as ConfigError
from headrace.errors import HeadraceError as HeadraceError
from headrace.errors import RequestFailed as RequestFailed
from headrace.errors import StreamFailed as StreamFailed


class ModelError(HeadraceError):
    """The model cannot be served."""

    code = "model_unsupported"

    def __init__(self, message: str, code: str = "model_unsupported") -> None:
        super().__init__(message)
        self.code = code


class ErrorKind(msgspec.Struct, frozen=True):
    """What a code means on HTTP."""

    status: int
    type: str
    retry: bool = False


_INVALID = ErrorKind(400, "invalid_request_error")

KINDS = {
    "invalid_http": _INVALID,
    "invalid_json": _INVALID,
    "invalid_type": _INVALID,
    "invalid_value": _INVALID,
    "missing_required_parameter": _INVALID,
    "unsupported_parameter": _INVALID,
    "unsupported_content": _INVALID,
    "unsupported_operation": _INVALID,
    "invalid_image": _INVALID,
    "image_too_large": _INVALID,
    "image_url_refused": _INVALID,
    "image_fetch_failed": _INVALID,
    "template_failed": _INVALID,
    "empty_prompt": _INVALID,
    "duplicate_id": _INVALID,
    "context_length_exceeded": _INVALID,
    "cancelled": ErrorKind(400, "cancelled_error"),
    "client_gone": ErrorKind(400, "cancelled_error"),
    "invalid_api_key": ErrorKind(401, "authentication_error"),
    "forbidden": ErrorKind(403, "permission_error"),
    "route_not_found": ErrorKind(404, "not_found_error"),
    "model_not_found": ErrorKind(404, "not_found_error"),
    "stream_not_found": ErrorKind(404, "not_found_error"),
    "method_not_allowed": ErrorKind(405, "invalid_request_error"),
    "headers_timeout": ErrorKind(408, "timeout_error", retry=True),
    "body_timeout": ErrorKind(408, "timeout_error", retry=True),
    "request_too_large": ErrorKind(413, "invalid_request_error"),
    "headers_too_large": ErrorKind(431, "invalid_request_error"),
    "unsupported_media_type": ErrorKind(415, "invalid_request_error"),
    "server_overloaded": ErrorKind(429, "rate_limit_error", retry=True),
    "queue_timeout": ErrorKind(429, "rate_limit_error", retry=True),
    "rate_limit_exceeded": ErrorKind(429, "rate_limit_error", retry=True),
    "request_timeout": ErrorKind(504, "timeout_error"),
    "idempotency_key_reused": ErrorKind(409, "conflict_error"),
    "invalid_cursor": _INVALID,
    "replaced": ErrorKind(400, "cancelled_error"),
    "poison_request": ErrorKind(500, "server_error"),
    "model_changed": ErrorKind(500, "server_error"),
    "resume_mismatch": ErrorKind(500, "server_error"),
    "stream_unsound": ErrorKind(500, "server_error"),
    "load_failed": ErrorKind(500, "server_error"),
    "internal_error": ErrorKind(500, "server_error"),
    "model_loading": ErrorKind(503, "unavailable_error", retry=True),
    "engine_failed": ErrorKind(503, "unavailable_error", retry=True),
    "storage_stalled": ErrorKind(503, "unavailable_error", retry=True),
    "server_restarting": ErrorKind(503, "unavailable_error", retry=True),
    "storage_unavailable": ErrorKind(503, "unavailable_error", retry=True),
    "no_idle_slot": ErrorKind(503, "unavailable_error", retry=True),
    "server_shutdown": ErrorKind(503, "unavailable_error", retry=True),
}
"""Every code that a request can end with."""


OVERRAN = "The chat template overran"
"""How the message of a `template_failed` begins whose template was abandoned."""


class RequestError(RequestFailed):
    """A request is refused, or a stream ends, for the reason `code`.

    `param` names the field as a path (`messages[2].content`); `extra` holds further fields of
    the error object; `retry_after_s` goes into the headers of 429 and 503.
    """

    def __init__(
        self,
        code: str,
        message: str,
        param: str | None = None,
        extra: dict[str, int] | None = None,
        retry_after_s: float = 1.0,
    ) -> None:
        super().__init__(code, message, param)
        self.extra = extra or {}
        self.retry_after_s = retry_after_s

    @property
    def kind(self) -> ErrorKind:
        return KINDS[self.code]
