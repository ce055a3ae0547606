"""Tests that sampling options have the names, types and ranges of the routes' fields."""

from typing import Any

import msgspec
import pytest

from headrace import RequestFailed, SamplingOptions
from headrace.protocols.fields.kinds import Flag, Integer, Number
from headrace.protocols.openai import chat, completions
from headrace_common.errors import RequestError
from headrace_common.sampling_options import with_options

TRIED: list[Any] = [
    *(-(10**9), -101, -100, -2.1, -2, -1, -0.5, 0, 1e-9, 0.5, 1, 1.1, 2, 2.1, 10, 10.1, 19, 20, 21),
    *(100, 100.5, 101, 128, 129, 10**9, True, "x", ["a"], [1], {}, {"5": 1.0}),
]


def accepts(check: Any, value: Any) -> bool:
    try:
        check(value)
    except (RequestError, msgspec.ValidationError):
        return False
    return True


@pytest.mark.parametrize("name", SamplingOptions.__struct_fields__)
@pytest.mark.parametrize("table", [chat.TABLE, completions.TABLE], ids=["chat", "completions"])
def test_an_option_takes_the_values_that_its_field_takes(table: Any, name: str) -> None:
    is_switch = name == "logprobs" and isinstance(table[name], Flag)
    kind = table["top_logprobs" if is_switch else name]
    for value in TRIED:
        if name == "max_tokens" and value == 0:
            continue  # The chat's route refuses 0; the route for raw text only reads the prompt.
        ours = accepts(lambda it: msgspec.convert({name: it}, SamplingOptions), value)
        theirs = accepts(lambda it, kind=kind: kind.check(it, name), value)
        if isinstance(kind, Integer | Number | Flag):
            assert ours == theirs, (name, value)
        else:
            assert theirs or not ours, (name, value)


def test_a_field_takes_precedence_over_an_option_under_any_of_its_names() -> None:
    options = SamplingOptions(temperature=0, max_tokens=5, logprobs=2, repetition_penalty=1.1)
    assert with_options({"temperature": 1}, options, True) == {
        "temperature": 1,
        "max_tokens": 5,
        "logprobs": True,
        "top_logprobs": 2,
        "repetition_penalty": 1.1,
    }
    fields = {"max_completion_tokens": 9, "logprobs": False, "repeat_penalty": 1.2}
    assert with_options(fields, options, True) == {"temperature": 0, **fields}
    assert with_options({}, options, False)["logprobs"] == 2


def test_only_sampling_options_are_options() -> None:
    with pytest.raises(RequestFailed, match="not of type dict") as refused:
        with_options({}, {"temperature": 0}, True)  # type: ignore[arg-type]
    assert refused.value.param == "options"


def test_options_show_only_what_is_set() -> None:
    assert repr(SamplingOptions(temperature=0, n=2)) == "SamplingOptions(temperature=0, n=2)"
