"""Answers requests for vectors or scores. Such requests open no streams."""

import secrets
import time
from collections.abc import Coroutine, Mapping
from typing import Any, NamedTuple

from headrace.generation.generation import Generation
from headrace.generation.request_span import named
from headrace.generation.vectors import Vectors
from headrace.metrics.traces import RequestSpan
from headrace.protocols.dialect import encode
from headrace.protocols.vectors import embeddings, rerank, score
from headrace.text.model_names import called
from headrace_common.log_context import PARENT
from headrace_common.request import Route
from headrace_common.worker_jobs import (
    CheckedBody,
    RankDocuments,
    VectorForm,
    WriteScores,
    WriteVectors,
)

ONE: Route = "/api/embeddings"
# The maximum number of bytes of vectors that a worker job encodes. A job encodes at least one
# vector.
_SLICE_BYTES = 256 << 10


class Requester(NamedTuple):
    """The route of a request for vectors, with the request's owner and priority."""

    route: Route
    owner: str
    priority: int = 0


class VectorAnswers:
    """Computes vectors or scores, and encodes them as the route's answer."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    async def answer(self, checked: CheckedBody, asker: Requester) -> bytes:
        """Return the body of the answer."""
        if asker.route == embeddings.ROUTE:
            return await self._embed(checked, asker)
        if asker.route in rerank.ROUTES:
            return await self._rerank(checked, asker)
        if asker.route in score.ROUTES:
            return await self._score(checked, asker)
        if asker.route == ONE:
            _, data = await self._embedded(checked, asker, "bare")
            return b'{"embedding":' + data + b"}"
        return await self._embed_bare(checked, asker)

    async def _embed(self, checked: CheckedBody, asker: Requester) -> bytes:
        as_base64 = checked.fields.get("encoding_format") == "base64"
        made, data = await self._embedded(checked, asker, "base64" if as_base64 else "float")
        rest = {"model": _name(checked.fields, made), "usage": _usage(made)}
        return b'{"object":"list","data":[' + data + b"]," + encode(rest)[1:]

    async def _embed_bare(self, checked: CheckedBody, asker: Requester) -> bytes:
        began = time.monotonic_ns()
        made, data = await self._embedded(checked, asker, "bare")
        rest = {
            "model": _name(checked.fields, made),
            "total_duration": time.monotonic_ns() - began,
            "prompt_eval_count": made.num_tokens,
        }
        return b'{"embeddings":[' + data + b"]," + encode(rest)[1:]

    async def _embedded(
        self, checked: CheckedBody, asker: Requester, form: VectorForm
    ) -> tuple[Vectors, bytes]:
        """Return the vectors, and the answer's JSON values for them, separated by commas.

        The JSON values have the number format and the dimensions that the request asks for.
        """
        fields = checked.fields
        asked = embeddings.to_request(checked, asker.owner, asker.priority)
        making = self._generation.vectors.make(
            asked, lambda it: embeddings.check(checked, it, it.ready)
        )
        made = await self._traced(asker.route, "embeddings", making)
        wanted = fields.get("dimensions")
        size = len(made.vectors[0])
        step = max(1, _SLICE_BYTES // size)
        parts = []
        for first in range(0, len(made.vectors), step):
            vectors = made.vectors[first : first + step]
            job = WriteVectors(size, first, wanted, form, made.model.embeds_units)
            parts.append(await self._generation.work.do(job, vectors))
        return made, b",".join(parts)

    async def _traced(
        self, route: Route, operation: str, making: Coroutine[Any, Any, Vectors]
    ) -> Vectors:
        began = time.monotonic()
        made = await making
        if (traces := self._generation.metrics.traces).is_on:
            model = made.model.names[0]
            attributes = named(route) | {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "headrace",
                "gen_ai.request.model": model,
                "gen_ai.usage.input_tokens": made.num_tokens,
            }
            seconds, name = time.monotonic() - began, f"{operation} {model}"
            traces.ended(RequestSpan(name, PARENT.get(), seconds, "", attributes))
        return made

    async def _rerank(self, checked: CheckedBody, asker: Requester) -> bytes:
        fields, is_cohere = checked.fields, asker.route == rerank.COHERE
        asked = rerank.to_request(checked, asker.route, asker.owner, asker.priority)
        made = await self._traced(asker.route, "rerank", self._generation.vectors.make(asked))
        scores = b"".join(made.vectors)
        with_documents = fields.get("return_documents", not is_cohere)
        job = RankDocuments(scores, made.model.names[0], fields.get("top_n"), with_documents)
        results = await self._generation.work.do(job, [checked.packed])
        rest = {
            "id": "rerank-" + secrets.token_hex(16),
            "object": "list",
            "model": _name(fields, made),
            "usage": _usage(made),
        }
        if is_cohere:
            tokens = {"input_tokens": made.num_tokens}
            rest["meta"] = {"api_version": {"version": "2"}, "tokens": tokens}
        return b'{"results":' + results + b"," + encode(rest)[1:]

    async def _score(self, checked: CheckedBody, asker: Requester) -> bytes:
        asked = score.to_request(checked, asker.route, asker.owner, asker.priority)
        made = await self._traced(asker.route, "score", self._generation.vectors.make(asked))
        job = WriteScores(b"".join(made.vectors), made.model.names[0])
        data = await self._generation.work.do(job, [checked.packed])
        rest = {
            "id": "score-" + secrets.token_hex(16),
            "object": "list",
            "created": int(time.time()),
            "model": _name(checked.fields, made),
            "usage": _usage(made),
        }
        return b'{"data":' + data + b"," + encode(rest)[1:]


def _name(fields: Mapping[str, Any], made: Vectors) -> str:
    return str(fields.get("alias") or called(made.model, fields.get("model")))


def _usage(made: Vectors) -> dict[str, int]:
    return {"prompt_tokens": made.num_tokens, "total_tokens": made.num_tokens}
