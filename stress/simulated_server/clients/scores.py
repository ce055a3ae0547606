"""Clients of the routes for scores and rankings, and of all routes for vectors."""

import base64
import json
from array import array
from typing import Any

from detangle import choice, flip, randint

from stress.simulated_server.clients.common import Backoff, refused
from stress.simulated_server.http import Broken, connect
from stress.simulated_server.processes import VECTOR_SIZE
from stress.simulated_server.requests import MODEL, Request
from stress.simulated_server.world import World

Json = dict[str, Any]


async def ranks(world: World, request: Request) -> None:
    """Rank documents and score the same pairs: a pair's score is equal on all routes."""
    query = f"query {request.seed % 5}"
    documents = [f"{number % 7} {request.content}" for number in range(randint(1, 20))]
    scores = await _scores(world, query, documents)
    for document, score in zip(documents, scores, strict=True):
        known = world.scores.setdefault((query, document), score)
        assert score == known, f"{query}, {document}: {score} instead of {known}"
    top_n = choice((None, 1, 3))
    body = {"model": MODEL, "query": query, "documents": documents, "return_documents": True}
    body |= {"top_n": top_n} if top_n else {}
    route = choice(("/v1/rerank", "/rerank", "/v2/rerank"))
    results = (await answer_of(world, route, body))["results"]
    assert len(results) == min(top_n or len(documents), len(documents)), f"{len(results)} results"
    found = [(it["index"], it["relevance_score"]) for it in results]
    best = sorted(enumerate(scores), key=lambda it: -it[1])[: len(found)]
    assert found == best, f"{found} instead of {best}"
    assert all(it["document"]["text"] == documents[it["index"]] for it in results)
    world.counts["rankings"] += 1


async def _scores(world: World, query: str, documents: list[str]) -> list[float]:
    texts = {"text_1": [query] * len(documents) if flip(0.3) else query, "text_2": documents}
    answer = await answer_of(world, choice(("/v1/score", "/score")), {"model": MODEL} | texts)
    assert [it["index"] for it in answer["data"]] == [*range(len(documents))]
    return [it["score"] for it in answer["data"]]


async def embeds_elsewhere(world: World, request: Request) -> None:
    """Embed the same texts on all routes and in all encodings: the vectors are equal."""
    texts = [f"{request.seed} {number}" for number in range(randint(1, 5))]
    body = {"model": MODEL, "input": texts}
    plain = [it["embedding"] for it in (await answer_of(world, "/v1/embeddings", body))["data"]]
    assert all(len(it) == VECTOR_SIZE for it in plain), f"{plain}"
    packed = await answer_of(world, "/v1/embeddings", body | {"encoding_format": "base64"})
    for vector, it in zip(plain, packed["data"], strict=True):
        found = array("f", base64.b64decode(it["embedding"])).tolist()
        assert _are_close(found, vector), f"{found} instead of {vector}"
    listed = (await answer_of(world, "/api/embed", body))["embeddings"]
    one = await answer_of(world, "/api/embeddings", {"model": MODEL, "prompt": texts[0]})
    for vector, found in zip([*plain, plain[0]], [*listed, one["embedding"]], strict=True):
        assert _are_close(found, vector), f"{found} instead of {vector}"
    world.counts["texts embedded on all routes"] += len(texts)


def _are_close(one: list[float], other: list[float]) -> bool:
    return len(one) == len(other) and all(
        abs(x - y) < 1e-4 for x, y in zip(one, other, strict=True)
    )


async def answer_of(
    world: World, route: str, body: Json, allowed: tuple[int, ...] = (200,)
) -> Json:
    """Repeat a POST without a stream until its answer has an allowed status."""
    backoff = Backoff()
    while True:
        try:
            connection = connect(world.server, "POST", route, {}, body)
            if await connection.begin() in allowed:
                answer: Json = json.loads(await connection.read())
                return answer
            await refused(world, connection)
        except Broken:
            pass
        await backoff.pause()
