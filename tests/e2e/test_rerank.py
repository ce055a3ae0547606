"""Tests of rankings by a tiny cross-encoder, and of embeddings during an engine kill."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers

from headrace import LLM, AsyncClient, Client, Ranked, RequestFailed
from tools.harness.eventually import eventually
from tools.harness.servers import ServerProcess, running_server
from tools.harness.tiny_models import make_tiny_encoder, make_tiny_model

QUERY = "which wheel turns"
DOCUMENTS = ["the mill race", "a wheel that turns, and turns again", "x", "the river is deep"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_encoder(tmp_path_factory.mktemp("cross"), "BertForSequenceClassification")


@pytest.fixture(scope="module")
def ranker(folder: Path) -> Iterator[ServerProcess]:
    with running_server(str(folder), "--max-num-seqs", "2", "--threads", "1") as server:
        yield server


def post(server: ServerProcess, path: str, **body: Any) -> Any:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60).json()


def relevance(folder: Path) -> tuple[list[float], int]:
    """Return the scores and the number of tokens that transformers computes pair by pair."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    model = load(folder, dtype=torch.float32).eval()
    scores, num_tokens = [], 0
    for document in DOCUMENTS:
        fed = tokenizer(QUERY, document, return_tensors="pt", truncation=False, padding=False)
        assert fed["token_type_ids"].sum() > 0
        num_tokens += fed["input_ids"].shape[1]
        with torch.inference_mode():
            scores.append(float(model(**fed).logits[0, 0].sigmoid()))
    return scores, num_tokens


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
def test_scores_equal_those_of_transformers(ranker: ServerProcess, folder: Path, path: str) -> None:
    expected, num_tokens = relevance(folder)
    answer = post(ranker, path, query=QUERY, documents=DOCUMENTS)
    results = answer["results"]
    assert all(abs(r["relevance_score"] - expected[r["index"]]) < 1e-5 for r in results)
    assert [r["index"] for r in results] == sorted(range(4), key=lambda i: -expected[i])
    assert [r["document"]["text"] for r in results] == [DOCUMENTS[r["index"]] for r in results]
    assert answer["usage"]["total_tokens"] == num_tokens


def test_top_n_returns_only_the_best_documents(ranker: ServerProcess) -> None:
    whole = post(ranker, "/rerank", query=QUERY, documents=DOCUMENTS)["results"]
    documents = [{"text": text} for text in DOCUMENTS]
    body = {"query": QUERY, "documents": documents, "top_n": 2, "return_documents": False}
    best = post(ranker, "/rerank", **body)["results"]
    assert [r["index"] for r in best] == [r["index"] for r in whole[:2]]
    assert all(r.keys() == {"index", "relevance_score"} for r in best)


def test_coheres_route_ranks_without_documents(ranker: ServerProcess) -> None:
    whole = post(ranker, "/rerank", query=QUERY, documents=DOCUMENTS, return_documents=False)
    body = {"model": "any", "query": QUERY, "documents": DOCUMENTS, "top_n": 2}
    answer = post(ranker, "/v2/rerank", **{**body, "model": whole["model"]})
    assert answer["results"] == whole["results"][:2] and answer["id"]
    assert answer["meta"]["tokens"]["input_tokens"] == whole["usage"]["total_tokens"]


def test_scores_accept_one_pair_one_text_against_a_list_and_two_lists(
    ranker: ServerProcess,
) -> None:
    def scores(path: str, text_1: Any, text_2: Any) -> list[float]:
        answer = post(ranker, path, text_1=text_1, text_2=text_2)
        assert [entry["index"] for entry in answer["data"]] == list(range(len(answer["data"])))
        return [entry["score"] for entry in answer["data"]]

    results = post(ranker, "/rerank", query=QUERY, documents=DOCUMENTS)["results"]
    ranked = {entry["index"]: entry["relevance_score"] for entry in results}
    expected = [ranked[number] for number in range(len(DOCUMENTS))]
    assert scores("/v1/score", QUERY, DOCUMENTS) == expected
    assert scores("/score", [QUERY], DOCUMENTS[1]) == expected[1:2]
    # The first texts have different lengths, so the second texts start at different positions.
    firsts = ["a", QUERY, "the mill", QUERY]
    alone = [scores("/score", *pair)[0] for pair in zip(firsts, DOCUMENTS, strict=True)]
    assert scores("/v1/score", firsts, DOCUMENTS) == pytest.approx(alone, abs=1e-6)
    assert alone[1] == pytest.approx(expected[1]) and len(set(alone)) == 4


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text_1": "a"}, "text_2"),
        ({"text_1": ["a", "b"], "text_2": "c"}, "text_1"),
        ({"text_1": ["a", "b"], "text_2": ["c"] * 3}, "text_1"),
        ({"text_1": [], "text_2": ["c"]}, "text_1"),
        ({"text_1": "a", "text_2": ["c", {"text": "d"}]}, "text_2[1]"),
        ({"text_1": "a", "text_2": ["a " * 200]}, "text_2[0]"),
        ({"text_1": "a", "text_2": "a " * 200}, "text_2"),
        ({"text_1": "a", "text_2": ["a"] * 2049}, "text_2"),
    ],
    ids=range(8),
)
def test_an_invalid_score_request_names_the_parameter(
    ranker: ServerProcess, body: dict[str, Any], param: str
) -> None:
    assert post(ranker, "/v1/score", **body)["error"]["param"] == param


def test_python_callers_get_the_same_ranking(ranker: ServerProcess, folder: Path) -> None:
    expected = post(ranker, "/rerank", query=QUERY, documents=DOCUMENTS)["results"]

    async def ask() -> list[Ranked]:
        async with AsyncClient(ranker.url) as client:
            return await client.rerank(QUERY, DOCUMENTS, top_n=3)

    with Client(ranker.url) as client, LLM.load(str(folder), threads=1) as llm:
        documents = [{"text": text} for text in DOCUMENTS]
        for found in (client.rerank(QUERY, documents), llm.rerank(QUERY, DOCUMENTS)):
            assert [ranked.index for ranked in found] == [entry["index"] for entry in expected]
            for ranked, entry in zip(found, expected, strict=True):
                assert abs(ranked.score - entry["relevance_score"]) < 1e-5
        assert asyncio.run(ask()) == client.rerank(QUERY, DOCUMENTS)[:3]
        for ask_for in (client.rerank, llm.rerank):
            with pytest.raises(RequestFailed) as refused:
                ask_for(QUERY, ["a", ""])
            assert refused.value.param == "documents[1]"


def test_unsupported_requests_to_a_ranker_name_the_reason(ranker: ServerProcess) -> None:
    long = post(ranker, "/rerank", query=QUERY, documents=["a", "a " * 200])["error"]
    assert (long["code"], long["param"]) == ("context_length_exceeded", "documents[1]")
    wrong = post(ranker, "/rerank", query=QUERY, documents=["a", {"title": "a"}])["error"]
    assert (wrong["code"], wrong["param"]) == ("invalid_type", "documents[1]")
    embeds = post(ranker, "/v1/embeddings", input="a")["error"]
    assert embeds["code"] == "unsupported_operation" and "/v1/rerank" in embeds["message"]
    chats = post(ranker, "/v1/completions", prompt="a")["error"]
    assert chats["code"] == "unsupported_operation"


@pytest.mark.slow
def test_embeddings_are_complete_after_an_engine_kill(tmp_path: Path) -> None:
    """Send more inputs than slots, and kill the engine while it computes."""
    make_tiny_model(tmp_path, "Qwen3Model")
    inputs = [[number % 250 + 1] * (300 + number % 40) for number in range(600)]
    with running_server(str(tmp_path), "--max-num-seqs", "4", "--threads", "1") as server:
        whole = post(server, "/v1/embeddings", input=inputs[:40])["data"]
        got: list[Any] = []
        asking = threading.Thread(
            target=lambda: got.append(post(server, "/v1/embeddings", input=inputs))
        )
        asking.start()

        def killed_while_running() -> bool:
            state = httpx.get(f"{server.url}/manage/state").json()
            if state["running"] > 0:
                server.kill_engine()
            return bool(state["running"] > 0)

        eventually(killed_while_running, within_s=60)
        asking.join(timeout=120)
        (answer,) = got
    assert [entry["index"] for entry in answer["data"]] == list(range(600))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, inputs))
    for entry, alone in zip(answer["data"], whole, strict=False):
        pairs = zip(entry["embedding"], alone["embedding"], strict=True)
        assert max(abs(a - b) for a, b in pairs) < 1e-5
