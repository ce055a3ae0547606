"""Defines the exceptions of all packages as a tree. Programs read `code`; people read the message.

A message says what is wrong, what the limit is and what to do. Messages to clients never contain a
path or the text of another exception.
"""

from typing import Self

import msgspec


class HeadraceError(Exception):
    """The base of all errors. `code` is stable, so that programs can act on it."""

    code = "internal_error"


class ConfigError(HeadraceError):
    """A flag, variable, configuration key, address or API key is wrong."""

    code = "config_invalid"


class RequestFailed(HeadraceError):
    """A request was refused, or the answer was cut off.

    `param` names the wrong field, or is None.
    """

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


class StreamFailed(RequestFailed):
    """The stream ended before its answer was complete, because it failed or was stopped."""


class ModelError(HeadraceError):
    """The model cannot be served."""

    code = "model_unsupported"

    def __init__(self, message: str, code: str = "model_unsupported") -> None:
        super().__init__(message)
        self.code = code


class ErrorKind(msgspec.Struct, frozen=True):
    """The HTTP status and type of an error code."""

    status: int
    type: str
    retry: bool = False


_CODES = {
    ErrorKind(400, "invalid_request_error"): (
        "invalid_http invalid_json invalid_type invalid_value missing_required_parameter "
        "unsupported_parameter unsupported_content unsupported_operation invalid_image "
        "image_too_large image_url_refused image_fetch_failed template_failed empty_prompt "
        "duplicate_id context_length_exceeded invalid_cursor batch_not_ended file_in_use "
        "quota_exceeded model_unsupported mutually_exclusive_parameters"
    ),
    ErrorKind(400, "cancelled_error"): "cancelled client_gone replaced",
    ErrorKind(401, "authentication_error"): "invalid_api_key",
    ErrorKind(403, "permission_error"): "forbidden download_denied",
    ErrorKind(404, "not_found_error"): (
        "route_not_found model_not_found stream_not_found file_not_found batch_not_found "
        "conversation_not_found item_not_found"
    ),
    ErrorKind(405, "invalid_request_error"): "method_not_allowed",
    ErrorKind(408, "timeout_error", retry=True): "headers_timeout body_timeout",
    ErrorKind(409, "conflict_error"): "idempotency_key_reused",
    ErrorKind(409, "conflict_error", retry=True): "conversation_locked",
    ErrorKind(410, "not_found_error"): "stream_gone",
    ErrorKind(413, "invalid_request_error"): "request_too_large",
    ErrorKind(415, "invalid_request_error"): "unsupported_media_type",
    ErrorKind(429, "rate_limit_error", retry=True): (
        "server_overloaded queue_timeout rate_limit_exceeded"
    ),
    ErrorKind(431, "invalid_request_error"): "headers_too_large",
    ErrorKind(500, "server_error"): (
        "poison_request model_changed resume_mismatch stream_unsound load_failed download_failed "
        "internal_error"
    ),
    ErrorKind(503, "unavailable_error", retry=True): (
        "model_loading engine_failed storage_stalled server_restarting storage_unavailable "
        "no_idle_slot server_shutdown"
    ),
    ErrorKind(504, "timeout_error"): "request_timeout",
}
KINDS = {code: kind for kind, codes in _CODES.items() for code in codes.split()}
"""The HTTP status and type of every error code with which a request can end."""


OVERRAN = "The chat template overran"
"""The first words of a `template_failed` error's message if the chat template takes too long."""


class RequestError(RequestFailed):
    """A request was refused, or a stream ended, for the reason `code`.

    `param` names the field as a path (`messages[2].content`). `extra` contains additional fields of
    the error object. An answer with status 429 or 503 has `retry_after_s` in the header
    Retry-After.
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
        self.noted: dict[str, int | str] = {}

    def noting(self, **figures: int | str) -> Self:
        """Add figures for the request's log line, and return the error."""
        self.noted |= figures
        return self

    @property
    def kind(self) -> ErrorKind:
        return KINDS[self.code]
