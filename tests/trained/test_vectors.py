"""all-MiniLM-L6-v2, however it is served: sentence-transformers' own vectors and neighbours."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from sentence_transformers import SentenceTransformer, util
from sklearn.cluster import AgglomerativeClustering, KMeans

from headrace import LLM
from tools.harness.servers import running_server

TEXTS = [
    "The weather is lovely today.",
    "It's so sunny outside!",
    "He drove to the stadium.",
    "x",
    "STRASSE, Straße and Ünïcödé 漢字",
    "a [SEP] within",
    "a long text goes on, " * 200,
]
QUERIES = (
    "Somebody is having lunch.",
    "Someone in an animal costume plays the drums.",
    "How fast can a big cat run?",
)
SENTENCES = (
    *(
        "A woman is eating a sandwich.",
        "A woman is eating some soup.",
        "The boy bites into an apple.",
    ),
    *("A girl in a tiger suit is playing the drums.", "Someone plays the violin on the stairs."),
    *("A cheetah sprints after its prey.", "The cheetah overtook a gazelle on the plain."),
    *("A man rides a grey horse along the beach.", "A rider crosses the field on a white pony."),
    *("Rain is expected for the whole weekend.", "The forecast promises showers until Monday."),
    *("Two men pushed carts through the woods.", "The new film is wonderful."),
    *("That movie was a delight to watch.", "Where can I renew my passport?"),
    *("How do I get a new passport?", "What must I do to learn the guitar quickly?"),
)
Embed = Callable[[list[str]], "np.ndarray[Any, np.dtype[np.float32]]"]


@pytest.fixture(scope="module")
def original(mini_lm: Path) -> SentenceTransformer:
    return SentenceTransformer(str(mini_lm), device="cpu")


@pytest.fixture(scope="module", params=["LLM", "serve FOLDER", "--models-dir"])
def embed(request: pytest.FixtureRequest, mini_lm: Path, tmp_path_factory: Any) -> Iterator[Embed]:
    if request.param == "LLM":
        with LLM.load(str(mini_lm), threads=1) as llm:
            assert llm.ready.lane == "generic-text"
            yield lambda texts: np.array(llm.embed(texts), np.float32)
        return
    folder: Path = tmp_path_factory.mktemp("models")
    (folder / "mini-lm").symlink_to(mini_lm)
    one = (str(mini_lm),) if request.param == "serve FOLDER" else ("--models-dir", str(folder))
    with running_server(*one, "--threads", "1") as server:

        def posted(texts: list[str]) -> Any:
            body = {"input": texts}
            answer = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=300).json()
            return np.array([entry["embedding"] for entry in answer["data"]], np.float32)

        yield posted


def test_vectors_are_equal(embed: Embed, original: SentenceTransformer) -> None:
    """Also of a text of a thousand tokens, of which both read 256."""
    assert np.abs(embed(TEXTS) - original.encode(TEXTS, batch_size=1)).max() < 1e-5


def searched(vectors: Any) -> Any:
    """The five nearest sentences of each query, the nearest first."""
    first = len(QUERIES)
    found = util.semantic_search(vectors[:first], vectors[first:], top_k=5)
    return [[hit["corpus_id"] for hit in hits] for hits in found]


def compared(vectors: Any) -> Any:
    """All texts in the order of their similarity to each."""
    return np.argsort(-util.cos_sim(vectors, vectors).numpy(), axis=1, kind="stable").tolist()


def paraphrases(vectors: Any) -> Any:
    """The thirty pairs that are most alike, in order."""
    found = util.paraphrase_mining_embeddings(vectors)
    return [(first, second) for _, first, second in found[:30]]


EXAMPLES = {
    "semantic search": searched,
    "similarity": compared,
    "paraphrase mining": paraphrases,
    "k-means": lambda vectors: KMeans(6, random_state=0, n_init=10).fit_predict(vectors).tolist(),
    "agglomerative clustering": lambda vectors: (
        AgglomerativeClustering(n_clusters=None, distance_threshold=1.2).fit_predict(vectors)
    ).tolist(),
    "fast clustering": lambda vectors: util.community_detection(vectors, 0.5, min_community_size=2),
}
"""The kinds of example in sentence-transformers' documentation, on sentences of our own."""


@pytest.mark.parametrize("example", EXAMPLES)
def test_its_examples_find_the_same_neighbours(
    embed: Embed, original: SentenceTransformer, example: str
) -> None:
    texts = [*QUERIES, *SENTENCES]
    found = EXAMPLES[example](original.encode(texts, convert_to_numpy=True))
    assert EXAMPLES[example](embed(texts)) == found


def test_the_neighbours_are_those_that_a_reader_would_name(embed: Embed) -> None:
    texts = [*QUERIES, *SENTENCES]
    vectors = embed(texts)
    nearest = [SENTENCES[hits[0]] for hits in searched(vectors)]
    assert "eating" in nearest[0] and "drums" in nearest[1] and "cheetah" in nearest[2].lower()
    groups = [[texts[num] for num in group] for group in EXAMPLES["fast clustering"](vectors)]
    assert any(all("passport" in text for text in group) for group in groups)
