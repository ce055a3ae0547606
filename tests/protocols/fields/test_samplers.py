from typing import Any

import msgspec
import pytest

from headrace.protocols.fields import samplers
from headrace.protocols.fields.common import COMMON, ignored
from headrace.protocols.openai import chat as openai_chat
from headrace.protocols.requests import to_request
from headrace.protocols.worker import Jobs
from headrace.text.text_model import TextModel
from headrace_common.config.settings import ModelConfig
from headrace_common.errors import RequestError
from headrace_common.sampling import LLAMA_CPP_ORDER, PLAIN_ORDER, Sampling
from headrace_common.worker_jobs import CheckedBody
from tests.gateway.builders import parsed

USER = {"role": "user", "content": "hi"}
MINI = TextModel(ModelConfig())


def sampling(**body: Any) -> Sampling:
    return parsed(openai_chat, {"messages": [USER], "seed": 1} | body).sampling


def refusal(**body: Any) -> tuple[str, str | None]:
    with pytest.raises(RequestError) as caught:
        sampling(**body)
    return caught.value.code, caught.value.param


def named(**body: Any) -> tuple[str, ...]:
    return ignored(COMMON, body)


def test_repeat_penalty_is_the_repetition_penalty() -> None:
    assert sampling(repeat_penalty=1.3) == sampling(repetition_penalty=1.3)
    assert sampling(repeat_penalty=1.3, repetition_penalty=1.1).repetition_penalty == 1.1
    assert refusal(repeat_penalty=-1) == ("invalid_value", "repeat_penalty")


def test_a_request_without_sampler_fields_is_sampled_as_before() -> None:
    assert sampling() == Sampling(seed=1, temperature=sampling().temperature)
    off = {"typical_p": 1.5, "top_n_sigma": -3, "xtc_probability": 0, "dynatemp_range": -1}
    assert sampling(**off, repeat_last_n=-1, min_keep=0, samplers=[]) == sampling()
    assert sampling(samplers="") == sampling()


@pytest.mark.parametrize(
    "asked",
    [{"typical_p": 0.5}, {"top_n_sigma": 1}, {"xtc_probability": 0.5}, {"dynatemp_range": 0.5}],
)
def test_a_sampler_of_llama_cpp_brings_the_sampler_order_of_llama_cpp(
    asked: dict[str, float],
) -> None:
    without_dry = tuple(name for name in LLAMA_CPP_ORDER if name != "dry")
    assert sampling(**asked).samplers == without_dry
    assert sampling(**asked, dry_multiplier=1).samplers == LLAMA_CPP_ORDER


def test_min_keep_alone_keeps_the_order() -> None:
    assert sampling(min_keep=2).samplers == PLAIN_ORDER
    assert sampling(min_keep=1).samplers == ()


def test_samplers_missing_from_the_list_are_off() -> None:
    asked = sampling(
        samplers=["top_k", "temp"], top_k=5, top_p=0.5, repeat_penalty=2, typical_p=0.1
    )
    assert (asked.samplers, asked.top_k) == (("top_k", "temperature"), 5)
    assert (asked.top_p, asked.repetition_penalty, asked.typical_p) == (1, 1, 1)
    assert sampling(samplers=["top_k"], temperature=0).temperature == 1


def test_an_order_in_letters_equals_the_order_in_names() -> None:
    assert sampling(samplers="edskypmxt", dry_multiplier=1).samplers == LLAMA_CPP_ORDER
    assert named(samplers="edskypmxt") == ()
    names = ["Top-K", "topp", "typical", "Temp"]
    assert sampling(samplers=names).samplers == ("top_k", "top_p", "typ_p", "temperature")


def test_unsupported_samplers_are_named() -> None:
    asked = ["top_k", "infill", "adaptive_p", "a, b", "infill"]
    assert named(samplers=asked) == ("samplers.infill",)
    assert named(samplers="kiz") == ("samplers.infill", "samplers.z")
    assert sampling(samplers=asked).samplers == ("top_k",)


def test_a_field_without_effect_is_named_unless_its_value_is_neutral() -> None:
    assert named(adaptive_target=0.5, dry_multiplier=0.8, id_slot=3, n_keep=0) == (
        "adaptive_target",
        "id_slot",
    )
    neutral = {"mirostat": 0, "dry_multiplier": 0.0, "lora": [], "response_fields": []}
    assert named(**neutral, post_sampling_probs=False, t_max_predict_ms=0, id_slot=-1) == ()
    assert sampling(adaptive_target=0.5) == sampling()


@pytest.mark.parametrize("version", [1, 2])
def test_only_the_temperature_runs_before_mirostat(version: int) -> None:
    asked = {"top_k": 5, "top_p": 0.5, "min_p": 0.1, "repeat_penalty": 2, "xtc_probability": 1}
    asked |= {"dynatemp_range": 0.5, "samplers": ["top_k", "min_p"], "temperature": 0.7}
    only = sampling(**asked, mirostat=version, mirostat_tau=3)
    wanted = {"samplers": ("temperature", "mirostat"), "mirostat": version, "mirostat_tau": 3}
    assert only == Sampling(seed=1, temperature=0.7, **wanted)
    assert sampling(samplers=["mirostat"]).samplers == ()
    assert named(samplers=["mirostat"]) == ("samplers.mirostat",)


def sampling_on_mini(**body: Any) -> Sampling:
    """Return the sampling that the gateway builds from a body that a worker has parsed."""
    sent = msgspec.json.encode({"messages": [USER], "seed": 1} | body)
    packed = msgspec.msgpack.encode(Jobs(MINI).read(sent, openai_chat.ROUTE))
    checked = msgspec.msgpack.decode(packed, type=CheckedBody)
    return to_request(openai_chat, checked, MINI).sampling


def test_dry_breakers_are_tokenized_only_if_dry_is_on() -> None:
    asked = {"dry_multiplier": 0.8, "dry_base": 2, "dry_allowed_length": 3}
    breakers = sampling_on_mini(**asked).dry_breakers
    assert [one.tail for one in breakers] == [()] and breakers[0].heads
    assert sampling_on_mini(**asked, dry_sequence_breakers=[]).dry_breakers == ()
    assert len(sampling_on_mini(**asked, dry_sequence_breakers=["ab", ":"]).dry_breakers) > 1
    for off in ({"dry_multiplier": 0}, {"samplers": ["top_k", "temp"]}, {"mirostat": 1}):
        assert "dry" not in sampling_on_mini(**asked | off).samplers
        assert sampling_on_mini(**asked | off).dry_breakers == ()
    assert sampling(samplers=["dry", "top_k"], dry_multiplier=1).samplers == ("dry", "top_k")
    assert sampling(samplers=["dry", "top_k"]).samplers == ("top_k",)


@pytest.mark.parametrize(
    "asked",
    [
        *({"mirostat": 3}, {"mirostat": -1}, {"mirostat_tau": -1}, {"mirostat_eta": 101}),
        *({"dry_multiplier": -1}, {"dry_base": 0.9}, {"dry_allowed_length": -1}),
        *({"dry_penalty_last_n": -2}, {"dry_sequence_breakers": [":"] * 33}),
    ],
)
def test_settings_out_of_range_are_refused(asked: dict[str, float]) -> None:
    assert refusal(**asked) == ("invalid_value", *asked)


def test_a_breaker_that_is_too_long_is_refused_by_its_path() -> None:
    assert refusal(dry_sequence_breakers=[":", "a" * 41]) == (
        "invalid_value",
        "dry_sequence_breakers[1]",
    )


@pytest.mark.parametrize("name", samplers.FIELDS)
def test_a_value_of_another_type_is_refused_by_its_path(name: str) -> None:
    assert refusal(**{name: {"a": 1}}) == ("invalid_type", name)


def test_a_name_that_is_not_a_string_is_refused_by_its_path() -> None:
    assert refusal(samplers=["top_k", 3]) == ("invalid_type", "samplers[1]")
    assert refusal(samplers=["x"] * 65) == ("invalid_value", "samplers")
    assert refusal(repeat_last_n=-2) == ("invalid_value", "repeat_last_n")


def test_biases_may_be_pairs_and_false_forbids() -> None:
    pairs = sampling(logit_bias=[[5, 2.5], [7, -1], [9, False]]).logit_bias
    assert (pairs[5], pairs[7]) == (2.5, -1) and pairs[9] < -1e8
    assert sampling(logit_bias={"5": 2.5, "7": -1, "9": False}).logit_bias == pairs
    assert sampling(logit_bias=[]) == sampling()
    assert refusal(logit_bias=[[5, 1], [7]]) == ("invalid_value", "logit_bias[1]")
    assert refusal(logit_bias=[["a", 1]]) == ("invalid_type", "logit_bias[0][0]")
    assert refusal(logit_bias=[[5, True]]) == ("invalid_type", "logit_bias[0][1]")
    assert refusal(logit_bias=[[5, 101]]) == ("invalid_value", "logit_bias[0][1]")
    assert refusal(logit_bias=3) == ("invalid_type", "logit_bias")
