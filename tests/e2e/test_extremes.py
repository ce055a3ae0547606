"""Tests of extreme field values with a real engine: each gets an answer or a 400, never a 500.

The values come from the tables of fields, so new fields are covered automatically.
`EXTREMES=5000 pytest tests/e2e/test_extremes.py` tries more examples than the suite.
"""

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from headrace import LLM
from headrace.protocols.fields.kinds import Flag, Integer, Kind, Number, Object, String
from headrace.protocols.openai import chat as openai_chat
from headrace.protocols.openai import completions as openai_completions
from headrace.protocols.requests import decode
from headrace_common.errors import RequestError
from tools.harness.tiny_models import END, VOCAB_SIZE, make_tiny_model

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments }}{{ call | tojson }}"
    "{% endfor %}{% endfor %}{{ x }}{{ x | tojson if x }}"
)
NUMBERS = [0, 1, 2, 5e-324, 1e-45, 1e-38, 1.2e-38, 1e-5, 9e-6, 0.5, 0.999999999, 1e30, 1e308]
NUMBERS += [100, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**64 - 1, 2**64, 10**300]
NUMBERS += [-number for number in NUMBERS] + [-0.0]
TEXTS = ["", " ", "a", "\x00", "\ufeff", "\u2028", "e\u0301\u0302", "\u0301" * 20, "\ufffd"]
TEXTS += ["\N{GRINNING FACE}", "\U0010ffff", "<|im_end|>", "{{ 7 * 7 }}", "a" * 40, "\n" * 9]
FORMS = [{}, {"type": "json_object"}, {"type": "text"}, {"json": {"type": "integer"}}, [], "auto"]
FORMS += [{"type": "object", "properties": {"a": {"maxLength": 3}}}, ["a", "b"], "none"]
ARGUMENTS = ["{}", '"\\ud800"', "[" * 2000, "[" * 900 + "]" * 900, "9" * 5000, "NaN", "-1e999"]

texts = st.sampled_from(TEXTS)
trees = st.recursive(
    st.sampled_from([*NUMBERS, True, None]) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=4,
)
arguments = st.fixed_dictionaries({"arguments": st.sampled_from(ARGUMENTS) | trees})
calls = st.fixed_dictionaries({"function": arguments}) | st.dictionaries(texts, trees, max_size=1)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"]), "content": texts},
    optional={"tool_calls": st.lists(calls, max_size=1)},
)
token_ids = st.sampled_from([0, 1, END, VOCAB_SIZE - 1, 7.0])
variables = st.sampled_from(["x", "bos_token", "range", "namespace", "self", "loop"])
biases = st.sampled_from([-100, 100, 5e-324, -0.0])
CUSTOM_VALUES: Mapping[str, st.SearchStrategy[Any]] = {
    "messages": st.lists(messages, min_size=1, max_size=2),
    "prompt": texts | st.lists(texts, min_size=1, max_size=3) | st.lists(token_ids, min_size=1),
    "max_tokens": st.sampled_from([1, 2, 3.0, 2**63 - 1]),
    "n": st.sampled_from([1, 2, 8]),
    "stop": texts | st.lists(texts, max_size=64),
    "stop_token_ids": st.lists(token_ids, max_size=64),
    "logit_bias": biases.map(lambda bias: {str(i): bias for i in range(VOCAB_SIZE)}),
    "chat_template_kwargs": st.dictionaries(variables, trees, max_size=3),
}


def extremes(kind: Kind) -> st.SearchStrategy[Any]:
    """Generate valid values of a field, including the limits of its range."""
    if isinstance(kind, Flag):
        return st.booleans()
    if isinstance(kind, Object):
        return st.fixed_dictionaries({}, optional={k: extremes(v) for k, v in kind.fields.items()})
    ends = [kind.low, kind.high] if isinstance(kind, Integer | Number) else []
    tried = TEXTS if isinstance(kind, String) else [*ends, *NUMBERS, *FORMS]
    return st.sampled_from([value for value in tried if is_taken(kind, value)] or [None])


def is_taken(kind: Kind, value: Any) -> bool:
    try:
        kind.check(value, "")
    except RequestError:
        return False
    return True


def bodies(table: Mapping[str, Kind], *required: str) -> st.SearchStrategy[dict[str, Any]]:
    """Generate bodies with at most six optional fields; more would mostly conflict."""
    skipped = {"model", "best_of", "stream", "attach", "suffix"}
    values = {name: extremes(kind) for name, kind in table.items() if name not in CUSTOM_VALUES}
    values |= {name: custom for name, custom in CUSTOM_VALUES.items() if name in table}
    some = st.lists(st.sampled_from(sorted(values.keys() - skipped)), max_size=6, unique=True)
    return some.flatmap(
        lambda names: st.fixed_dictionaries({name: values[name] for name in {*required, *names}})
    )


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = make_tiny_model(tmp_path_factory.mktemp("extremes") / "tiny")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with LLM.load(str(folder), threads=1, max_num_seqs=8, max_model_len=64) as loaded:
        yield loaded


def ask(llm: LLM, body: dict[str, Any]) -> None:
    """Send the body; an error must be a 400 that can be encoded as JSON."""
    call = llm.chat if "messages" in body else llm.generate
    try:
        call(**decode(json.dumps(body).encode()))
    except RequestError as error:
        assert error.kind.status == 400, error.message
        assert msgspec.json.encode([error.message, error.param])


SOME = settings(
    max_examples=int(os.environ.get("EXTREMES", 25)),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
HI = [{"role": "user", "content": "hi"}]
DEEP = [{"role": "assistant", "tool_calls": [{"function": {"arguments": "[" * 200_000}}]}]


@SOME
@given(bodies(openai_chat.TABLE, "messages", "max_tokens"))
@example({"messages": HI, "max_tokens": 2, "repetition_penalty": 1e-38})
@example({"messages": DEEP, "max_tokens": 2})
def test_a_chat_with_extreme_values_is_answered_or_refused(llm: LLM, body: dict[str, Any]) -> None:
    ask(llm, body)


@SOME
@given(bodies(openai_completions.TABLE, "prompt", "max_tokens"))
def test_a_completion_with_extreme_values_is_answered_or_refused(
    llm: LLM, body: dict[str, Any]
) -> None:
    ask(llm, body)
