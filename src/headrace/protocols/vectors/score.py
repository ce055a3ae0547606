"""POST /v1/score and /score, as vLLM defines them: score pairs of texts."""

from array import array
from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.protocols.dialect import encode
from headrace.protocols.fields.common import read_known
from headrace.protocols.fields.kinds import Array, Kind, String
from headrace.protocols.vectors.rerank import MAX_DOCUMENTS
from headrace_common.errors import RequestError
from headrace_common.request import Route
from headrace_common.vector_request import VectorRequest
from headrace_common.worker_jobs import CheckedBody

ROUTES: tuple[Route, ...] = ("/v1/score", "/score")
KEYS = ("id", "object", "created", "model", "data", "usage")
REQUIRED: tuple[str, ...] = ("text_1", "text_2")
_TEXT = String(least=1)
_SECOND = "text_2"


class Texts(msgspec.Struct, frozen=True):
    """Reads a text or an array of texts."""

    def check(self, value: Any, path: str) -> str | tuple[str, ...]:
        if type(value) is not list:
            return _TEXT.check(value, path)
        return _TEXTS.check(value, path)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [_TEXT.schema(), _TEXTS.schema()]}


_TEXTS = Array(_TEXT, MAX_DOCUMENTS, 1)
TABLE: Mapping[str, Kind] = {"text_1": Texts(), _SECOND: Texts(), "model": _TEXT}


def read(body: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that a body sets, after every check that needs no model.

    The field `pairs` has the first and the second texts; a single first text is paired with every
    second text. `is_list` says whether the body has an array of second texts.
    """
    fields = read_known(TABLE, REQUIRED, body)
    second = fields.pop(_SECOND)
    fields["is_list"] = type(second) is tuple
    firsts, seconds = (it if type(it) is tuple else (it,) for it in (fields.pop("text_1"), second))
    if len(firsts) not in (1, len(seconds)):
        message = f"text_1 has {len(firsts):,} texts and text_2 has {len(seconds):,}; send one "
        message += "text as text_1, or as many as in text_2."
        raise RequestError("invalid_value", message, "text_1")
    fields["pairs"] = (firsts, seconds)
    return fields


def to_request(checked: CheckedBody, route: Route, owner: str, priority: int = 0) -> VectorRequest:
    """Make the request to score; the texts stay packed."""
    model, is_list = checked.fields.get("model"), checked.fields["is_list"]
    return VectorRequest(
        route, "score", checked.packed, _SECOND, is_list, model, owner, checked.ahead, priority,
        checked.digest,
    )  # fmt: skip


def entries(scores: "array[float]") -> bytes:
    """Return the answer's `data` as JSON, in the order of the request."""
    found = enumerate(scores)
    return encode([{"index": at, "object": "score", "score": score} for at, score in found])
