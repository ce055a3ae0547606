from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers.models.auto import modeling_auto as tables
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from headrace_common.checkpoints.spec import Defaults, ModelSpec
from headrace_common.errors import ModelError
from headrace_engine.models.registry import is_native
from headrace_engine.runner.lanes.choose import choose_lane, matches

DENSE = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 10,
    "max_position_embeddings": 64,
}


def spec(architecture: str, model_type: str, **config: Any) -> ModelSpec:
    content = DENSE | {"model_type": model_type} | config
    return ModelSpec(
        Path("/models/some"), architecture, 10, 64, (), Defaults(), "float32", (), content
    )


def refusal(model: ModelSpec, wanted: str = "auto") -> str:
    with pytest.raises(ModelError) as caught:
        choose_lane(model, wanted)
    assert caught.value.code == "model_unsupported"
    return str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "model_type", "lane"),
    [
        ("LlamaForCausalLM", "llama", "native-text"),
        ("Qwen3ForCausalLM", "qwen3", "native-text"),
        ("MixtralForCausalLM", "mixtral", "generic-text"),
        ("GPT2LMHeadModel", "gpt2", "generic-text"),
        ("Lfm2ForCausalLM", "lfm2", "generic-text"),
    ],
)
def test_a_registered_architecture_is_native_and_any_other_generic(
    architecture: str, model_type: str, lane: str
) -> None:
    assert choose_lane(spec(architecture, model_type), "auto").traits.id == lane


def test_any_model_can_be_forced_to_the_generic_lane() -> None:
    assert (
        choose_lane(spec("Qwen3ForCausalLM", "qwen3"), "generic-text").traits.id == "generic-text"
    )


def test_a_gguf_file_on_a_lane_of_transformers_is_told_its_own_lanes() -> None:
    of_file = msgspec.structs.replace(
        spec("LlamaForCausalLM", "llama"), weight_files=("some.gguf",)
    )
    for lane in ("generic-text", "generic-seq2seq-source", "generic-multimodal"):
        assert "only native-text and llama-cpp run GGUF files. Omit --lane" in refusal(
            of_file, lane
        )


def test_a_lane_that_cannot_be_forced_says_why() -> None:
    text = refusal(spec("GPT2LMHeadModel", "gpt2"), "native-text")
    assert "native-text" in text and "GPT2LMHeadModel has no native implementation" in text


def test_an_option_that_is_not_implemented_leads_to_the_generic_lane() -> None:
    scaled = spec("LlamaForCausalLM", "llama", rope_scaling={"rope_type": "longrope"})
    assert choose_lane(scaled, "auto").traits.id == "generic-text"
    assert "longrope" in refusal(scaled, "native-text")


def test_an_unknown_architecture_names_the_lanes_and_their_reasons() -> None:
    text = refusal(spec("FrobnicateForCausalLM", "frobnicate"))
    assert "native-text:" in text and "generic-text:" in text and "Frobnicate" in text


def test_code_from_a_repository_is_refused_by_name() -> None:
    own_code = {"AutoModelForCausalLM": "modeling.Frobnicate"}
    text = refusal(spec("FrobnicateForCausalLM", "frobnicate", auto_map=own_code))
    assert "needs code from its repository, which Headrace never runs" in text


def test_an_image_model_is_not_taken_for_a_text_model() -> None:
    text = refusal(spec("Gemma3ForConditionalGeneration", "gemma3", vision_config={}))
    assert "processes more than text" in text


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [
        ("SwitchTransformersForConditionalGeneration", "switch_transformers"),
        ("NllbMoeForConditionalGeneration", "nllb-moe"),
    ],
)
def test_an_encoder_decoder_whose_experts_skip_tokens_is_refused(
    architecture: str, model_type: str
) -> None:
    config = CONFIG_MAPPING[model_type]().to_dict()
    assert "limits how many tokens each expert processes" in refusal(spec(architecture, **config))


def test_the_refusal_of_a_folder_does_not_show_its_path() -> None:
    assert "/models" not in refusal(spec("FrobnicateForCausalLM", "frobnicate"))


def test_no_two_lanes_are_for_one_model_and_each_text_model_has_one() -> None:
    kinds = [
        tables.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        tables.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        tables.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        tables.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        tables.MODEL_MAPPING_NAMES,
    ]
    known = {(kind, name) for table in kinds for kind, name in table.items()}
    assert len(known) > 500
    for kind, name in sorted(known, key=str):
        if not isinstance(name, str):  # a few kinds have several base models
            continue
        content = CONFIG_MAPPING[kind]().to_dict() if is_native(name) else {}
        for key in ("model_type", "vision_config", "audio_config"):  # `sides` give them back
            content.pop(key, None)
        for sides in ({}, {"vision_config": {}}, {"audio_config": {}}):
            found = matches(spec(name, kind, **content, **sides))
            is_text = kinds[0].get(kind) == name and not sides
            assert len(found) == 1 if is_text else len(found) <= 1, (kind, name, sides, found)
            assert not (name.endswith("ForCausalLM") and sides and found)


def test_a_model_of_ours_that_sees_has_a_lane_of_its_own_where_images_can_be_prepared(
    tmp_path: Path,
) -> None:
    hybrid = {"linear_num_key_heads": 1, "linear_num_value_heads": 1, "num_hidden_layers": 4}
    text = DENSE | hybrid
    seeing = msgspec.structs.replace(
        spec("Qwen3_5ForConditionalGeneration", "qwen3_5", text_config=text, vision_config={}),
        folder=tmp_path,
    )
    assert matches(seeing) == ["native-text"]
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert matches(seeing) == ["native-multimodal"]
    assert choose_lane(seeing, "native-text").traits.id == "native-text"
    assert "processes images" in refusal(spec("LlamaForCausalLM", "llama"), "native-multimodal")
