"""all-MiniLM-L6-v2, however it is served: sentence-transformers' own vectors and neighbours."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

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


@pytest.fixture(scope="module")
def theirs(mini_lm: Path) -> Any:
    return SentenceTransformer(str(mini_lm), device="cpu").encode(TEXTS, batch_size=1)


@pytest.fixture(scope="module", params=["LLM", "serve FOLDER", "--models-dir"])
def ours(request: pytest.FixtureRequest, mini_lm: Path, tmp_path_factory: Any) -> Iterator[Any]:
    if request.param == "LLM":
        with LLM.load(str(mini_lm), threads=1) as llm:
            yield np.array(llm.embed(TEXTS))
        return
    folder: Path = tmp_path_factory.mktemp("models")
    (folder / "mini-lm").symlink_to(mini_lm)
    one = (str(mini_lm),) if request.param == "serve FOLDER" else ("--models-dir", str(folder))
    with running_server(*one, "--threads", "1") as server:
        body = {"input": TEXTS}
        answer = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=300).json()
    yield np.array([entry["embedding"] for entry in answer["data"]])


def test_vectors_are_equal(ours: Any, theirs: Any) -> None:
    """Also of a text of a thousand tokens, of which both read 256."""
    assert float(np.abs(ours - theirs).max()) < 1e-5


def test_neighbours_are_the_same(ours: Any, theirs: Any) -> None:
    of_ours, of_theirs = ours @ ours.T, theirs @ theirs.T
    assert (np.argsort(-of_ours[:3, :3]) == np.argsort(-of_theirs[:3, :3])).all()
    assert of_ours[0, 1] > 0.6 > 0.2 > of_ours[0, 2]
