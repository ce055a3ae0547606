"""Compares embeddings and scores of tiny models with those of transformers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from headrace import LLM
from headrace_common.errors import ModelError, RequestFailed
from headrace_engine.runner.pooling import normalize
from tools.harness.tiny_models import (
    POOLING_MODES,
    make_tiny_encoder,
    make_tiny_model,
    write_pooling,
)

TEXTS = ["a river", "the mill race is running, the wheel turns " * 2, "x", "over and over again."]
"""Texts whose lengths need several forward passes."""


def reference(folder: Path, text: str, pooling: str, **kwargs: Any) -> torch.Tensor:
    """Return the vector that transformers computes for one text in float32."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    fed = tokenizer(text, return_tensors="pt", truncation=False, padding=False)
    fed.pop("token_type_ids", None)
    with torch.inference_mode():
        rows = model(**fed).last_hidden_state[0]
    vector = {"mean": rows.mean(0), "last": rows[-1], "cls": rows[0]}[pooling]
    return vector / vector.norm()


def farthest(ours: list[list[float]], theirs: list[torch.Tensor]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max(float((torch.tensor(one) - other).abs().max()) for one, other in pairs)


CASES = {
    "Qwen3ForCausalLM": "last",
    "Qwen3Model": "mean",
    "LlamaModel": "cls",
    "BertModel": "mean",
    "BertForMaskedLM": "cls",
    "RobertaModel": "last",
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[tuple[LLM, Path, str]]:
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    pooling = CASES[name]
    is_encoder = "ert" in name
    (make_tiny_encoder if is_encoder else make_tiny_model)(folder, name)
    if name == "BertModel":
        _add_positions(folder)
    mode = {"mean": "mean_tokens", "last": "lasttoken", "cls": "cls_token"}[pooling]
    write_pooling(folder, mode)
    options = {"max_num_seqs": 3, "max_step_tokens": 24, "threads": 1}
    with LLM.load(str(folder), **options) as llm:
        yield llm, folder, pooling


def _add_positions(folder: Path) -> None:
    """Add a buffer of integers to the weights, as old exporters did."""
    file = folder / "model.safetensors"
    buffer = {"embeddings.position_ids": torch.arange(128)[None]}
    save_file(load_file(file) | buffer, file, {"format": "pt"})


def test_vectors_equal_those_of_transformers(case: tuple[LLM, Path, str]) -> None:
    """Uses chunks of 24 tokens if the model supports chunking."""
    llm, folder, pooling = case
    ours = llm.embed(TEXTS)
    assert farthest(ours, [reference(folder, text, pooling) for text in TEXTS]) < 1e-5


def test_texts_embedded_alone_or_together_have_equal_vectors(case: tuple[LLM, Path, str]) -> None:
    llm, _, _ = case
    alone = [torch.tensor(llm.embed(text)) for text in TEXTS]
    assert farthest(llm.embed(TEXTS * 4), alone * 4) < 1e-5


def prompted(folder: Path, *modes: str, **settings: Any) -> Path:
    return write_pooling(make_tiny_encoder(folder), *modes, **settings)


def test_a_named_prompt_is_put_before_the_text(tmp_path: Path) -> None:
    prompts = {"query": "query: ", "passage": "text: "}
    prompted(tmp_path, "mean_tokens", prompts=prompts, default_prompt_name="passage")
    with LLM.load(str(tmp_path), threads=1) as llm:
        usual, query = llm.embed(TEXTS), llm.embed(TEXTS, prompt_name="query")
        assert farthest(usual, [reference(tmp_path, "text: " + t, "mean") for t in TEXTS]) < 1e-5
        assert farthest(query, [reference(tmp_path, "query: " + t, "mean") for t in TEXTS]) < 1e-5
        with pytest.raises(RequestFailed, match="passage, query"):
            llm.embed("a", prompt_name="other")


def test_a_vector_is_shortened_if_the_model_allows_it(tmp_path: Path) -> None:
    make_tiny_encoder(tmp_path, matryoshka_dimensions=[8, 16])
    with LLM.load(str(tmp_path), threads=1) as llm:
        whole = torch.tensor(llm.embed(TEXTS[0]))
        head = whole[:8] / whole[:8].norm()
        assert farthest([llm.embed(TEXTS[0], dimensions=8)], [head]) < 1e-6
        for wrong in (9, 49):
            with pytest.raises(RequestFailed) as refused:
                llm.embed(TEXTS[0], dimensions=wrong)
            assert refused.value.param == "dimensions"
    with LLM.load(str(tmp_path), threads=1, embedding_dimensions="any") as llm:
        assert len(llm.embed(TEXTS[0], dimensions=9)) == 9


def test_a_model_with_an_unknown_pooling_layer_is_not_used_for_embeddings(tmp_path: Path) -> None:
    prompted(tmp_path, "max_tokens", stages=("LSTM",))
    with (
        LLM.load(str(tmp_path), threads=1) as llm,
        pytest.raises(RequestFailed, match="is LSTM"),
    ):
        llm.embed("a")
    with LLM.load(str(tmp_path), threads=1, pooling="cls") as llm:
        assert farthest([llm.embed("a")], [reference(tmp_path, "a", "cls")]) < 1e-5


def test_an_encoder_refuses_to_generate_and_uses_its_whole_context(tmp_path: Path) -> None:
    make_tiny_encoder(tmp_path, "RobertaModel")
    with LLM.load(str(tmp_path), threads=1, max_step_tokens=16) as llm:
        with pytest.raises(RequestFailed, match="/v1/embeddings"):
            llm.generate("a")
        assert llm.ready.max_model_len == 127  # the first position is the padding's
        assert len(llm.embed([[5] * 127, [6]])) == 2  # longer than a step
        with pytest.raises(RequestFailed) as refused:
            llm.embed(["a", "a " * 126])
        assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input[1]")


def rows_of(folder: Path, text: str, **options: Any) -> torch.Tensor:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    fed = tokenizer(text, return_tensors="pt", padding=False, **options)
    fed.pop("token_type_ids", None)
    with torch.inference_mode():
        return model(**fed).last_hidden_state[0]


def test_every_pooling_is_computed_whole_and_in_chunks(tmp_path: Path) -> None:
    """Concatenates all pooling modes, without normalization."""
    write_pooling(make_tiny_model(tmp_path, "Qwen3Model"), *POOLING_MODES, stages=())
    expected = []
    for text in TEXTS:
        rows = rows_of(tmp_path, text)
        num, weights = len(rows), torch.arange(1, len(rows) + 1)
        parts = (
            rows[0],
            rows.amax(0),
            rows.mean(0),
            rows.sum(0) / num**0.5,
            (weights[:, None] * rows).sum(0) / weights.sum(),
            rows[-1],
        )
        expected.append(torch.cat(parts))
    for room in (8, 512):
        with LLM.load(str(tmp_path), threads=1, max_step_tokens=room) as llm:
            assert farthest(llm.embed(TEXTS), expected) < 2e-5


def test_a_dense_layer_after_pooling_is_applied(tmp_path: Path) -> None:
    prompted(tmp_path, "cls_token", "mean_tokens", stages=("Dense",))
    layer = load_file(tmp_path / "2_Dense" / "model.safetensors")
    rows = rows_of(tmp_path, TEXTS[0])
    pooled = torch.cat((rows[0], rows.mean(0)))
    expected = torch.tanh(layer["linear.weight"] @ pooled + layer["linear.bias"])
    with LLM.load(str(tmp_path), threads=1, embedding_dimensions="any") as llm:
        assert llm.ready.vector_size == 24
        assert farthest([llm.embed(TEXTS[0])], [expected]) < 1e-5
        assert farthest([llm.embed(TEXTS[0], dimensions=5)], [expected[:5]]) < 1e-5
    (tmp_path / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"2_Dense/model\.safetensors"):
        LLM.load(str(tmp_path), threads=1)


def test_a_long_text_is_truncated_at_the_published_length(tmp_path: Path) -> None:
    """Counts the special tokens in that length; token ids are not truncated."""
    prompted(tmp_path, "mean_tokens")
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 20}')
    short = rows_of(tmp_path, TEXTS[1], truncation=True, max_length=20)
    assert len(short) == 20
    with LLM.load(str(tmp_path), threads=1) as llm:
        assert farthest([llm.embed(TEXTS[1])], [normalize(short.mean(0))]) < 1e-5
        assert farthest([llm.embed(TEXTS[1] * 500)], [normalize(short.mean(0))]) < 1e-5
        assert farthest([llm.embed([5] * 21)], [normalize(short.mean(0))]) > 1e-3


def test_texts_are_lowercased_if_the_config_says_so(tmp_path: Path) -> None:
    prompted(tmp_path, "mean_tokens")
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["normalizer"]["lowercase"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with LLM.load(str(tmp_path), threads=1) as llm:
        small, large = llm.embed(["over and", "OVER And"])
        assert farthest([large], [torch.tensor(small)]) > 1e-3
    (tmp_path / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    with LLM.load(str(tmp_path), threads=1) as llm:
        for text in ("OVER And", "over and"):
            assert llm.embed(text).tolist() == small.tolist()


def test_weights_are_found_in_the_folder_that_older_versions_made(tmp_path: Path) -> None:
    prompted(tmp_path, "cls_token")
    expected = reference(tmp_path, TEXTS[0], "cls")
    inner = tmp_path / "0_Transformer"
    inner.mkdir()
    for file in [one for one in tmp_path.iterdir() if one.is_file()]:
        if file.name != "modules.json":
            file.rename(inner / file.name)
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with LLM.load(str(tmp_path), threads=1) as llm:
        assert farthest([llm.embed(TEXTS[0])], [expected]) < 1e-5
