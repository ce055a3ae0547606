from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.protocols.openai import completions as openai_completions
from headrace_common.errors import RequestError
from headrace_common.request import Ids, Request, Text
from tests.gateway.builders import JSON, parsed


def parse(**body: Any) -> Request:
    return parsed(openai_completions, {"prompt": "hi"} | body)


def refusal(**body: Any) -> tuple[str, str | None]:
    with pytest.raises(RequestError) as caught:
        parse(**body)
    return caught.value.code, caught.value.param


def test_a_prompt_has_four_forms() -> None:
    assert parse(prompt="a").prompts == (Text("a"),)
    assert parse(prompt=["a", "b"]).prompts == (Text("a"), Text("b"))
    assert parse(prompt=[1, 2]).prompts == parse(prompt=[1.0, 2]).prompts == (Ids((1, 2)),)
    assert parse(prompt=[[1], [2, 3]]).prompts == (Ids((1,)), Ids((2, 3)))


def test_more_than_1024_choices_over_all_prompts_are_refused() -> None:
    assert parse(prompt=["hi"] * 128, n=8).num_choices == 1024
    with pytest.raises(RequestError) as refused:
        parse(prompt=["hi"] * 129, n=8)
    assert (refused.value.code, refused.value.param) == ("invalid_value", "n")
    for figure in ("129", "8", "1032", "1024"):
        assert figure in refused.value.message


@pytest.mark.parametrize(
    ("prompt", "code", "path"),
    [
        (None, "missing_required_parameter", "prompt"),
        (5, "invalid_type", "prompt"),
        ([], "invalid_value", "prompt"),
        ([[]], "invalid_value", "prompt[0]"),
        ([1, "a"], "invalid_type", "prompt[1]"),
        ([1, True], "invalid_type", "prompt[1]"),
        ([1, 2.5], "invalid_type", "prompt[1]"),
        ([1.5], "invalid_type", "prompt[0]"),
        ([1, -1], "invalid_value", "prompt[1]"),
        ([1, 256], "invalid_value", "prompt[1]"),
        (["a", 1], "invalid_type", "prompt[1]"),
        (["a", [1]], "invalid_type", "prompt[1]"),
        ([[1], "a"], "invalid_type", "prompt[1]"),
        ([[1], [2, 256]], "invalid_value", "prompt[1][1]"),
        ([[256]], "invalid_value", "prompt[0][0]"),
        ([None], "invalid_type", "prompt[0]"),
        (["a"] * 1025, "invalid_value", "prompt"),
    ],
)
def test_a_wrong_prompt_is_named_by_its_place(prompt: Any, code: str, path: str) -> None:
    assert refusal(prompt=prompt) == (code, path)


def test_an_id_outside_the_vocabulary_is_shown_with_the_limit() -> None:
    with pytest.raises(RequestError, match=r"256.*0 to 255"):
        parse(prompt=[256])


def test_max_tokens_is_sixteen_by_default_and_may_be_zero() -> None:
    assert parse().sampling.max_tokens == 16
    assert parse(max_tokens=0).sampling.max_tokens == 0
    assert parse(max_tokens=-1).sampling.max_tokens is None
    assert parse(max_tokens=None).sampling.max_tokens == 16
    assert parse(max_completion_tokens=40).sampling.max_tokens == 40


def test_log_probabilities_are_a_count() -> None:
    assert parse().sampling.num_logprobs is None
    assert parse(logprobs=0).sampling.num_logprobs == 0
    assert refusal(logprobs=21) == ("invalid_value", "logprobs")
    assert refusal(logprobs=True) == ("invalid_type", "logprobs")


def test_an_echoed_prompt_is_scored_without_the_cache() -> None:
    request = parse(echo=True, logprobs=2)
    assert request.sampling.num_prompt_logprobs == 2
    assert not request.cache_prompt
    assert parse(echo=True).cache_prompt
    assert parse(echo=True).sampling.num_prompt_logprobs is None


def test_special_tokens_can_be_left_out_of_text() -> None:
    assert parse(add_special_tokens=False).prompts == (Text("hi", False),)


def test_a_suffix_needs_a_model_with_infill_tokens_and_a_text_prompt() -> None:
    assert parse(suffix="").prompts == (Text("hi"),)
    with pytest.raises(RequestError, match="was trained to fill in the middle") as refused:
        parse(suffix="x")
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "suffix")
    assert refusal(suffix="x", prompt=[1, 2]) == ("invalid_value", "suffix")
    assert refusal(suffix="x", echo=True) == ("invalid_value", "echo")


def test_chats_own_fields_are_unknown_here() -> None:
    assert parse(seed=1, messages=5, top_logprobs=99) == parse(seed=1)


NAMES = st.sampled_from(list(openai_completions.TABLE))


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(NAMES, JSON, max_size=6))
def test_any_json_is_a_request_or_a_400(body: dict[str, Any]) -> None:
    try:
        request = parse(**body)
    except RequestError as error:
        assert error.kind.status == 400
    else:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Request) == request
