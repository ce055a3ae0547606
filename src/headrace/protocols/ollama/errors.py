"""Errors as Ollama's clients know them: a sentence."""

import re
from collections.abc import Mapping
from typing import Any

from headrace.protocols.dialect import encode
from headrace.streams.events import Error
from headrace_common.errors import RequestError

_OWN_PATHS = (
    (re.compile(r"\bresponse_format(\.json_schema\.schema)?"), "format"),
    (re.compile(r"\bchat_template_kwargs\.enable_thinking\b"), "think"),
)
"""Paths of fields in chat, and their names here."""


class OllamaErrors:
    """A message under `error`, in a stream a line of its own; the code is ours."""

    REQUEST_ID = "X-Request-Id"
    OWN_PATHS = _OWN_PATHS
    SCHEMA: Mapping[str, Any] = {
        "title": "OllamaError",
        "type": "object",
        "required": ["error", "code"],
        "properties": {"error": {"type": "string"}, "code": {"type": "string"}},
    }

    def status(self, error: RequestError | Error) -> int:
        return error.status if isinstance(error, Error) else error.kind.status

    def body(self, error: RequestError | Error, request_id: str = "") -> bytes:
        message = error.message
        for known, own in _OWN_PATHS:
            message = known.sub(own, message)
        return encode({"error": message, "code": error.code})

    def frame(self, error: RequestError | Error) -> bytes:
        return self.body(error) + b"\n"


ERRORS = OllamaErrors()
