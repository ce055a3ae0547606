"""Under which names a request wants its stream: conversation, idempotency key, its own bytes."""

import hashlib

from starlette.datastructures import Headers

from headrace.core.errors import RequestError
from headrace.streams.record import Names

_MAX_CONVERSATION, _MAX_KEY = 512, 255


def names_of(owner: str, headers: Headers, route: str, body: bytes) -> Names:
    """RequestError `invalid_value` for a name that is none."""
    return Names(
        owner=owner,
        conversation=_name(headers, "X-Conversation-Id", _MAX_CONVERSATION),
        key=_name(headers, "Idempotency-Key", _MAX_KEY),
        digest=hashlib.sha256(route.encode() + b"\n" + body).digest(),
    )


def _name(headers: Headers, header: str, longest: int) -> str | None:
    value = headers.get(header)
    if value is None:
        return None
    if not (0 < len(value) <= longest and value.isascii() and value.isprintable()):
        raise RequestError(
            "invalid_value", f"{header} takes 1 to {longest} printable ASCII characters.", header
        )
    return value
