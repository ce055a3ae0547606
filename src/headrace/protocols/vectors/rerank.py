"""POST /v1/rerank and /rerank, as Jina defines them, and Cohere's /v2/rerank.

These routes rank documents for a query.
"""

import math
from array import array
from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.protocols.dialect import encode
from headrace.protocols.fields.common import read_known
from headrace.protocols.fields.kinds import Array, Flag, Integer, Kind, String, wrong_type
from headrace_common.errors import RequestError
from headrace_common.request import Route
from headrace_common.vector_request import VectorRequest
from headrace_common.worker_jobs import CheckedBody

COHERE: Route = "/v2/rerank"
ROUTES: tuple[Route, ...] = ("/v1/rerank", "/rerank", COHERE)
KEYS = ("id", "object", "model", "results", "usage")
REQUIRED: tuple[str, ...] = ("query", "documents")
MAX_DOCUMENTS = 2048
_TEXT = String(least=1)


class Document(msgspec.Struct, frozen=True):
    """Reads a text, or an object with a text."""

    def check(self, value: Any, path: str) -> str:
        if type(value) is not dict:
            return _TEXT.check(value, path)
        if "text" not in value:
            raise wrong_type(value, path, "a string or an object with a text")
        return _TEXT.check(value["text"], f"{path}.text")

    def schema(self) -> dict[str, Any]:
        text = _TEXT.schema()
        holder = {"type": "object", "properties": {"text": text}, "required": ["text"]}
        return {"anyOf": [text, holder]}


TABLE: Mapping[str, Kind] = {
    "query": _TEXT,
    "documents": Array(Document(), MAX_DOCUMENTS, 1),
    "model": _TEXT,
    "top_n": Integer(low=1),
    "return_documents": Flag(),
}

TextPairs = tuple[tuple[str, ...], tuple[str, ...]]
"""The first texts and the second texts. A single first text is paired with every second text."""

pairs_of = msgspec.msgpack.Decoder(TextPairs).decode


def read(body: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that a body sets, after every check that needs no model.

    The field `pairs` has the query and the documents.
    """
    fields = read_known(TABLE, REQUIRED, body)
    fields["pairs"] = ((fields.pop("query"),), fields.pop("documents"))
    return fields


def to_request(checked: CheckedBody, route: Route, owner: str, priority: int = 0) -> VectorRequest:
    """Make the request to score; the query and the documents stay packed."""
    model = checked.fields.get("model")
    return VectorRequest(
        route, "score", checked.packed, "documents", True, model, owner, checked.ahead, priority,
        checked.digest,
    )  # fmt: skip


def ranking(
    packed: bytes, scores: "array[float]", top_n: int | None, shows_documents: bool
) -> bytes:
    """Return `results` as JSON, the most relevant first. Equal scores keep the request's order."""
    _, documents = pairs_of(packed)
    order = sorted(range(len(scores)), key=lambda number: -scores[number])[:top_n]
    results: list[dict[str, Any]] = []
    for number in order:
        entry: dict[str, Any] = {"index": number, "relevance_score": scores[number]}
        if shows_documents:
            entry["document"] = {"text": documents[number]}
        results.append(entry)
    return encode(results)


def relevance(vectors: bytes, num: int, applies_sigmoid: bool) -> "array[float]":
    """Return one score per packed vector. Raise RequestError if a vector has several scores."""
    scores = array("f", vectors)
    if len(scores) != num:
        raise RequestError(
            "unsupported_operation",
            f"This model is a classifier with {len(scores) // num} labels, so it cannot score "
            "relevance; serve a cross-encoder with one label.",
            "model",
        )
    if applies_sigmoid:
        scores = array("f", [1 / (1 + math.exp(-max(score, -700.0))) for score in scores])
    return scores
