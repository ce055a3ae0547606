import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from headrace_common.checkpoints.find import find_model
from headrace_common.checkpoints.spec import Defaults, read_spec
from headrace_common.errors import ModelError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "eos_token_id": 7,
}


def folder(path: Path, generation: Any = None, **config: Any) -> Path:
    """A folder with an empty weight file; a key that is None is left out."""
    content = {key: value for key, value in (CONFIG | config).items() if value is not None}
    (path / "config.json").write_text(json.dumps(content))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    (path / "model.safetensors").touch()
    return path


def refusal(path: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        read_spec(path)
    assert str(path.parent) not in str(caught.value), "a message shows no path"
    return caught.value


def test_the_facts_of_a_folder_are_read(tmp_path: Path) -> None:
    spec = read_spec(folder(tmp_path, dtype="bfloat16"))
    assert (spec.architecture, spec.vocab_size, spec.max_positions) == (
        "LlamaForCausalLM",
        100,
        512,
    )
    assert (spec.end_token_ids, spec.dtype) == ((7,), "bfloat16")
    assert (spec.weight_files, spec.defaults) == (("model.safetensors",), Defaults())


def test_the_older_name_of_dtype_is_known(tmp_path: Path) -> None:
    assert read_spec(folder(tmp_path, torch_dtype="float16")).dtype == "float16"


@pytest.mark.parametrize("key", ["n_positions", "n_ctx", "max_sequence_length"])
def test_a_limit_of_another_name_is_found(tmp_path: Path, key: str) -> None:
    config = {"max_position_embeddings": None, key: 99}
    assert read_spec(folder(tmp_path, **config)).max_positions == 99


def test_a_model_may_state_no_limit(tmp_path: Path) -> None:
    assert read_spec(folder(tmp_path, max_position_embeddings=None)).max_positions is None


def test_yarn_states_a_limit_of_its_own(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert read_spec(folder(tmp_path, rope_scaling=yarn)).max_positions == 2048


def test_the_generation_config_decides_on_end_tokens(tmp_path: Path) -> None:
    assert read_spec(folder(tmp_path, {"eos_token_id": [3, 4]})).end_token_ids == (3, 4)


def test_a_generation_config_that_is_silent_on_ends_leaves_them_to_the_config(
    tmp_path: Path,
) -> None:
    assert read_spec(folder(tmp_path, {"top_k": 5})).end_token_ids == (7,)


def test_recommended_sampling_is_read_and_what_is_not_said_stays_open(tmp_path: Path) -> None:
    given = {"temperature": 0.6, "top_k": 20, "do_sample": True, "max_length": 20}
    assert read_spec(folder(tmp_path, given)).defaults == Defaults(temperature=0.6, top_k=20)


@pytest.mark.parametrize(
    "default",
    [
        {"temperature": "warm"},
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_p": 1.5},
        {"top_k": -2},
        {"repetition_penalty": 0},
    ],
)
def test_a_sampling_default_that_no_request_could_ask_for_is_refused(
    tmp_path: Path, default: Any
) -> None:
    error = refusal(folder(tmp_path, default))
    assert error.code == "model_corrupt" and "generation_config.json" in str(error)


@pytest.mark.parametrize(("ends", "found"), [(-1, ()), ([3, 100, 1 << 40], (3,)), ([], ())])
def test_an_end_token_that_is_no_token_ends_nothing(tmp_path: Path, ends: Any, found: Any) -> None:
    assert read_spec(folder(tmp_path, eos_token_id=ends)).end_token_ids == found


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", "LlamaForCausalLM"),
        ("text_config", [1]),
        ("quantization_config", "gptq"),
        ("dtype", {"x": 1}),
        ("eos_token_id", ["</s>"]),
        ("rope_scaling", "yarn"),
        ("rope_parameters", {"factor": "two"}),
        ("max_position_embeddings", "many"),
    ],
)
def test_a_key_of_the_wrong_type_is_named(tmp_path: Path, key: str, value: Any) -> None:
    error = refusal(folder(tmp_path, **{key: value}))
    assert error.code == "model_corrupt" and key in str(error)


def test_a_text_model_inside_another_is_found(tmp_path: Path) -> None:
    inner = {"vocab_size": 50, "max_position_embeddings": 64}
    spec = read_spec(folder(tmp_path, vocab_size=None, text_config=inner))
    assert (spec.vocab_size, spec.max_positions) == (50, 64)


def test_shards_are_named_by_the_index(tmp_path: Path) -> None:
    folder(tmp_path)
    shards = {"a": "two.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    (tmp_path / "one.safetensors").touch()
    (tmp_path / "two.safetensors").touch()
    assert read_spec(tmp_path).weight_files == ("one.safetensors", "two.safetensors")


def test_a_folder_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    assert refusal(tmp_path / "nowhere").code == "model_not_found"


def test_a_folder_without_a_config_is_no_model(tmp_path: Path) -> None:
    error = refusal(tmp_path)
    assert error.code == "model_corrupt" and "config.json" in str(error)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "adapter_config.json",
            {"base_model_name_or_path": "some/base"},
            "an adapter.*serve its base model some/base with --adapter",
        ),
        ("modules.json", [{"path": "0_CLIPModel"}], r"sentence-transformers.*\(0_CLIPModel\)"),
        ("open_clip_config.json", {}, "a CLIP model.*use a language"),
        ("model_index.json", {}, "a pipeline of diffusers"),
    ],
)
def test_a_folder_of_another_thing_is_called_what_it_is(
    tmp_path: Path, name: str, content: Any, words: str
) -> None:
    (tmp_path / name).write_text(json.dumps(content))
    assert re.search(words, str(refusal(tmp_path)))
    with pytest.raises(ModelError, match=words):
        find_model(str(tmp_path))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_file_with_half_of_a_surrogate_pair_is_corrupt(tmp_path: Path, name: str) -> None:
    folder(tmp_path)
    for key in ("eos_token_id", "min_p", "dtype", "\ud800"):
        (tmp_path / name).write_text(json.dumps({key: "\ud800"}))
        assert f"{name} of {tmp_path.name} is not JSON" in str(refusal(tmp_path))


@pytest.mark.parametrize("text", ["{", "[1]", "\x00\xff"])
def test_a_config_that_is_no_json_object_is_corrupt(tmp_path: Path, text: str) -> None:
    folder(tmp_path)
    (tmp_path / "config.json").write_text(text)
    error = refusal(tmp_path)
    assert error.code == "model_corrupt" and "config.json" in str(error)


@pytest.mark.parametrize("key", ["architectures", "vocab_size"])
def test_a_config_without_the_essentials_is_corrupt(tmp_path: Path, key: str) -> None:
    assert refusal(folder(tmp_path, **{key: None})).code == "model_corrupt"


def test_quantized_weights_are_refused_by_method(tmp_path: Path) -> None:
    error = refusal(folder(tmp_path, quantization_config={"quant_method": "gptq"}))
    assert error.code == "model_unsupported" and "gptq" in str(error)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-2.bin", "model.pt"])
def test_pickled_weights_are_refused_with_what_would_do(tmp_path: Path, name: str) -> None:
    folder(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    error = refusal(tmp_path)
    assert error.code == "model_unsupported"
    assert name in str(error) and "model.safetensors" in str(error)


def test_no_weights_at_all_are_missed_by_name(tmp_path: Path) -> None:
    (folder(tmp_path) / "model.safetensors").unlink()
    error = refusal(tmp_path)
    assert error.code == "model_corrupt" and "model.safetensors" in str(error)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder(tmp_path) / "model.safetensors.index.json").write_text(json.dumps(index))
    error = refusal(tmp_path)
    assert error.code == "model_corrupt" and "model-00001-of-00002.safetensors" in str(error)


def test_a_shard_outside_the_folder_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "secret").touch()
    (tmp_path / "model").mkdir()
    index = {"weight_map": {"a": "../secret"}}
    (folder(tmp_path / "model") / "model.safetensors.index.json").write_text(json.dumps(index))
    assert refusal(tmp_path / "model").code == "model_corrupt"


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {"a": 1}}])
def test_an_index_without_a_map_is_corrupt(tmp_path: Path, index: Any) -> None:
    (folder(tmp_path) / "model.safetensors.index.json").write_text(json.dumps(index))
    assert refusal(tmp_path).code == "model_corrupt"


ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan, 10**400])
@pytest.mark.parametrize(
    ("key", "wrap"),
    [
        ("factor", lambda it: {"rope_scaling": ROPE | {"factor": it}}),
        (
            "original_max_position_embeddings",
            lambda it: {"rope_parameters": {**ROPE, "original_max_position_embeddings": it}},
        ),
        ("rope_theta", lambda it: {"rope_theta": it}),
        ("max_position_embeddings", lambda it: {"max_position_embeddings": it}),
        (
            "short_factor",
            lambda it: {"text_config": {"vocab_size": 9, "a": {"short_factor": [1, [it]]}}},
        ),
    ],
)
def test_a_number_that_is_not_finite_is_named(
    number: float, key: str, wrap: Any, tmp_path: Path
) -> None:
    refused = refusal(folder(tmp_path, **wrap(number)))
    assert f"has a {key} that is not a finite number" in str(refused)
    assert refused.code == "model_corrupt"


def test_a_number_that_is_not_finite_in_the_sampling_defaults_is_named(tmp_path: Path) -> None:
    refused = refusal(folder(tmp_path, {"temperature": math.nan}))
    assert "generation_config.json" in str(refused) and "temperature" in str(refused)


def test_mambas_time_step_may_have_no_upper_bound(tmp_path: Path) -> None:
    assert read_spec(folder(tmp_path, time_step_limit=[0.0, math.inf])).vocab_size == 100


@pytest.mark.parametrize("stretch", [1e300, 10**300])
def test_a_context_that_no_integer_of_ours_holds_is_cut(stretch: float, tmp_path: Path) -> None:
    rope = ROPE | {"factor": stretch, "original_max_position_embeddings": stretch}
    assert read_spec(folder(tmp_path, rope_scaling=rope)).max_positions == 1 << 53
    assert read_spec(folder(tmp_path, max_position_embeddings=10**300)).max_positions == 1 << 53


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_hidden_layers": 10**7}, "a num_hidden_layers of 10,000,000; the limit is 4,096"),
        ({"num_experts": 10**6}, "a num_experts of 1,000,000; the limit is 4,096"),
        ({"vision_config": {"depth": 2**31}}, "a depth of 2,147,483,648; the limit is 4,096"),
        ({"num_layers": 4000, "num_local_experts": 4000}, "16,000,000 experts in all its layers"),
    ],
)
def test_more_layers_or_experts_than_can_be_built_are_refused_with_the_limit(
    tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    assert words in str(refusal(folder(tmp_path, **config)))
