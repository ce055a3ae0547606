"""Vectors and scores of tiny models in process: against transformers, alone and together."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from headrace import LLM
from headrace.errors import RequestFailed
from tools.harness.tiny_models import make_tiny_encoder, make_tiny_model, write_pooling

TEXTS = ["a river", "the mill race is running, the wheel turns " * 2, "x", "over and over again."]
"""Of lengths that fall into several forwards."""


def reference(folder: Path, text: str, pooling: str, **kwargs: Any) -> torch.Tensor:
    """By transformers, one text at a time, in float32."""
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
    """As old exporters did it: a buffer of whole numbers among the weights."""
    file = folder / "model.safetensors"
    buffer = {"embeddings.position_ids": torch.arange(128)[None]}
    save_file(load_file(file) | buffer, file, {"format": "pt"})


def test_vectors_are_those_of_transformers(case: tuple[LLM, Path, str]) -> None:
    """Cut in chunks of 24 tokens where the model takes parts, and whole where it does not."""
    llm, folder, pooling = case
    ours = llm.embed(TEXTS)
    assert farthest(ours, [reference(folder, text, pooling) for text in TEXTS]) < 1e-5


def test_alone_equals_together(case: tuple[LLM, Path, str]) -> None:
    llm, _, _ = case
    alone = [torch.tensor(llm.embed(text)) for text in TEXTS]
    assert farthest(llm.embed(TEXTS * 4), alone * 4) < 1e-5


def prompted(folder: Path, *modes: str, **settings: Any) -> Path:
    return write_pooling(make_tiny_encoder(folder), *modes, **settings)


def test_a_prompt_by_name_goes_before_the_text(tmp_path: Path) -> None:
    prompts = {"query": "query: ", "passage": "text: "}
    prompted(tmp_path, "mean_tokens", prompts=prompts, default_prompt_name="passage")
    with LLM.load(str(tmp_path), threads=1) as llm:
        usual, query = llm.embed(TEXTS), llm.embed(TEXTS, prompt_name="query")
        assert farthest(usual, [reference(tmp_path, "text: " + t, "mean") for t in TEXTS]) < 1e-5
        assert farthest(query, [reference(tmp_path, "query: " + t, "mean") for t in TEXTS]) < 1e-5
        with pytest.raises(RequestFailed, match="passage, query"):
            llm.embed("a", prompt_name="other")


def test_a_vector_is_cut_where_the_model_allows_it(tmp_path: Path) -> None:
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


def test_what_its_makers_pool_otherwise_is_not_embedded(tmp_path: Path) -> None:
    prompted(tmp_path, "max_tokens")
    with (
        LLM.load(str(tmp_path), threads=1) as llm,
        pytest.raises(RequestFailed, match="asks for max_tokens"),
    ):
        llm.embed("a")
    with LLM.load(str(tmp_path), threads=1, pooling="cls") as llm:
        assert farthest([llm.embed("a")], [reference(tmp_path, "a", "cls")]) < 1e-5


def test_an_encoder_generates_nothing_and_takes_its_whole_length(tmp_path: Path) -> None:
    make_tiny_encoder(tmp_path, "RobertaModel")
    with LLM.load(str(tmp_path), threads=1, max_step_tokens=16) as llm:
        with pytest.raises(RequestFailed, match="/v1/embeddings"):
            llm.generate("a")
        assert llm.ready.max_model_len == 127  # the first position is the padding's
        assert len(llm.embed([[5] * 127, [6]])) == 2  # longer than a step
        with pytest.raises(RequestFailed) as refused:
            llm.embed(["a", "a " * 126])
        assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input[1]")
