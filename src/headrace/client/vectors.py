"""Embeddings, packed, and rankings as the clients ask for them; no I/O."""

import base64
import binascii
from array import array
from typing import Any

import msgspec

from headrace.client.errors import Refused
from headrace.client.following import HttpRequest, to_body
from headrace_common.answer import Ranked

_WORK_TIMEOUT_S = 3600.0  # a batch says nothing until all of it is done


def embedding_request(input: Any, fields: dict[str, Any]) -> HttpRequest:
    return _request("/v1/embeddings", {**fields, "input": input, "encoding_format": "base64"})


def ranking_request(query: str, documents: Any, fields: dict[str, Any]) -> HttpRequest:
    given = {"query": query, "documents": documents, "return_documents": False}
    return _request("/v1/rerank", fields | given)


def _request(path: str, fields: dict[str, Any]) -> HttpRequest:
    headers = {"Content-Type": "application/json"}
    return HttpRequest("POST", path, headers, to_body(fields), _WORK_TIMEOUT_S)


def to_vectors(answer: dict[str, Any], input: Any) -> Any:
    """One vector, or for several inputs a list of them; Refused if the answer holds none."""
    try:
        entries = msgspec.convert(answer["data"], list[dict[str, Any]])
        vectors = [
            array("f", base64.b64decode(entry["embedding"], validate=True)).tolist()
            for entry in sorted(entries, key=lambda entry: int(entry["index"]))
        ]
        are_several = isinstance(input, list | tuple) and not isinstance(input[0], int)
        return vectors if are_several else vectors[0]
    except (LookupError, TypeError, ValueError, binascii.Error):
        message = "The answer holds no embeddings; this server is not Headrace."
        raise Refused(200, message, "unknown") from None


def to_ranking(answer: dict[str, Any]) -> list[Ranked]:
    """The most relevant first; Refused if the answer holds none."""
    try:
        return msgspec.convert(answer["results"], list[Ranked])
    except (LookupError, TypeError, msgspec.ValidationError):
        message = "The answer holds no ranking; this server is not Headrace."
        raise Refused(200, message, "unknown") from None
