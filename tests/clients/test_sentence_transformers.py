"""Our vectors and scores against sentence-transformers' on the same tiny models: `make test-embed`.

It runs in an environment of its own, because sentence-transformers brings what nothing else needs.
"""

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from sentence_transformers import CrossEncoder, SentenceTransformer

from headrace import LLM
from tools.harness.servers import running_server
from tools.harness.tiny_models import (
    POOLING_MODES,
    make_tiny_encoder,
    make_tiny_model,
    write_pooling,
)

TEXTS = ["a river", "the mill race is running, the wheel turns " * 2, "x", "Over and OVER again."]
PROMPTS = {"query": "query: ", "document": "text: "}


def farthest(ours: Any, theirs: Any) -> float:
    return float(np.abs(np.array(ours, dtype=np.float32) - np.array(theirs)).max())


def original(folder: Path) -> SentenceTransformer:
    model = SentenceTransformer(str(folder), device="cpu")
    model.max_seq_length = 128  # the tests' tokenizers say 16, which would cut the texts
    if model.tokenizer.pad_token is None:  # it asks for one before it pads
        model.tokenizer.pad_token = model.tokenizer.eos_token
    return model


@pytest.mark.parametrize("mode", POOLING_MODES)
@pytest.mark.parametrize("architecture", ["BertModel", "RobertaModel", "Qwen3Model", "LlamaModel"])
def test_vectors_are_equal(tmp_path: Path, architecture: str, mode: str) -> None:
    make = make_tiny_model if "ert" not in architecture else make_tiny_encoder
    folder = write_pooling(make(tmp_path, architecture), mode)
    with LLM.load(str(folder), threads=1, max_step_tokens=24) as llm:
        ours = llm.embed(TEXTS)
    model = original(folder)
    theirs = [model.encode(text) for text in TEXTS]
    assert farthest(ours, theirs) < 1e-5


def test_prompts_are_those_of_the_files(tmp_path: Path) -> None:
    folder = make_tiny_encoder(tmp_path)
    write_pooling(folder, "mean_tokens", prompts=PROMPTS, default_prompt_name="document")
    with LLM.load(str(folder), threads=1) as llm:
        usual, query = llm.embed(TEXTS), llm.embed(TEXTS, prompt_name="query")
    model = original(folder)
    assert farthest(usual, model.encode(TEXTS)) < 1e-5
    assert farthest(query, model.encode(TEXTS, prompt_name="query")) < 1e-5
    assert farthest(usual, query) > 1e-3


@pytest.mark.parametrize("stages", [(), ("Dense",), ("Dense", "Normalize")])
@pytest.mark.parametrize("modes", [("mean_tokens",), POOLING_MODES])
def test_stages_behind_the_pooling_are_computed(
    tmp_path: Path, modes: tuple[str, ...], stages: tuple[str, ...]
) -> None:
    folder = write_pooling(make_tiny_encoder(tmp_path), *modes, stages=stages)
    with LLM.load(str(folder), threads=1) as llm:
        ours = llm.embed(TEXTS)
    assert farthest(ours, original(folder).encode(TEXTS)) < 1e-5


@pytest.mark.parametrize("said", [{"max_seq_length": 20}, {}, {"do_lower_case": True}])
def test_texts_are_read_as_the_files_say(tmp_path: Path, said: dict[str, Any]) -> None:
    """Without a limit in its config, the tokenizer's limit of 128 cuts the text."""
    folder = write_pooling(make_tiny_encoder(tmp_path), "mean_tokens")
    if "do_lower_case" in said:
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        tokenizer["normalizer"]["lowercase"] = False
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "sentence_bert_config.json").write_text(json.dumps(said))
    texts = [*TEXTS, TEXTS[1] * 9, "[SEP] Over"]
    with LLM.load(str(folder), threads=1) as llm:
        ours = llm.embed(texts)
    theirs = SentenceTransformer(str(folder), device="cpu")
    assert farthest(ours, [theirs.encode(text) for text in texts]) < 1e-5


def test_files_that_it_writes_itself_are_read(tmp_path: Path) -> None:
    made = original(write_pooling(make_tiny_encoder(tmp_path / "one"), "mean_tokens"))
    made.save(str(tmp_path / "two"))
    with LLM.load(str(tmp_path / "two"), threads=1) as llm:
        assert farthest(llm.embed(TEXTS), made.encode(TEXTS)) < 1e-5


@pytest.mark.parametrize("architecture", ["BertFor", "RobertaFor"])
def test_scores_are_equal(tmp_path: Path, architecture: str) -> None:
    folder = make_tiny_encoder(tmp_path, f"{architecture}SequenceClassification")
    model = CrossEncoder(str(folder), device="cpu", max_length=128)
    theirs = model.predict([("which wheel", text) for text in TEXTS])
    with running_server(str(folder), "--threads", "1") as server:
        body = {"query": "which wheel", "documents": TEXTS}
        results = httpx.post(f"{server.url}/rerank", json=body, timeout=60).json()["results"]
    ours = [r["relevance_score"] for r in sorted(results, key=lambda r: r["index"])]
    assert farthest(ours, theirs) < 1e-5
