"""Embeddings as the clients ask for them, packed; no I/O."""

import base64
import binascii
from array import array
from typing import Any

import msgspec

from headrace.client.errors import Refused
from headrace.client.following import HttpRequest, to_body

_WORK_TIMEOUT_S = 3600.0  # a batch says nothing until all of it is done


def embedding_request(input: Any, fields: dict[str, Any]) -> HttpRequest:
    body = to_body({**fields, "input": input, "encoding_format": "base64"})
    headers = {"Content-Type": "application/json"}
    return HttpRequest("POST", "/v1/embeddings", headers, body, _WORK_TIMEOUT_S)


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
