"""Builds embedding and rerank requests and parses the responses. Does no I/O."""

import base64
import binascii
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.client.errors import Refused
from headrace.client.following import HttpRequest, to_body
from headrace_common.answer import Ranked

if TYPE_CHECKING:
    from numpy import float32
    from numpy.typing import NDArray

# The time is long, because the server sends nothing until all vectors are computed.
_WORK_TIMEOUT_S = 3600.0


def embedding_request(input: Any, fields: dict[str, Any]) -> HttpRequest:
    return _request("/v1/embeddings", {**fields, "input": input, "encoding_format": "base64"})


def ranking_request(query: str, documents: Any, fields: dict[str, Any]) -> HttpRequest:
    given = {"query": query, "documents": documents, "return_documents": False}
    return _request("/v1/rerank", fields | given)


def _request(path: str, fields: dict[str, Any]) -> HttpRequest:
    headers = {"Content-Type": "application/json"}
    return HttpRequest("POST", path, headers, to_body(fields), _WORK_TIMEOUT_S)


def to_vectors(answer: dict[str, Any], input: Any) -> "NDArray[float32]":
    """Return one vector, or a matrix with one row for each input of a list.

    Raises Refused if the answer has no vectors.
    """
    # Most programs with a client embed nothing, so that they need not wait for this import.
    import numpy as np

    try:
        entries = msgspec.convert(answer["data"], list[dict[str, Any]])
        rows = [
            np.frombuffer(base64.b64decode(entry["embedding"], validate=True), np.float32)
            for entry in sorted(entries, key=lambda entry: int(entry["index"]))
        ]
        are_several = isinstance(input, list | tuple) and not isinstance(input[0], int)
        return np.stack(rows) if are_several else rows[0].copy()
    except (LookupError, TypeError, ValueError, binascii.Error):
        message = "The answer holds no embeddings; this server is not Headrace."
        raise Refused(200, message, "unknown") from None


def to_ranking(answer: dict[str, Any]) -> list[Ranked]:
    """Return the ranking, most relevant first. Raises Refused if the answer has no ranking."""
    try:
        return msgspec.convert(answer["results"], list[Ranked])
    except (LookupError, TypeError, msgspec.ValidationError):
        message = "The answer holds no ranking; this server is not Headrace."
        raise Refused(200, message, "unknown") from None
