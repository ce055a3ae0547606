from hypothesis import given
from hypothesis import strategies as st

from headrace.protocols.fields import samplers
from headrace.protocols.fields.common import NO_EFFECT, UNSUPPORTED, ignored
from headrace.protocols.openai import chat as openai_chat
from headrace.protocols.openai import completions as openai_completions
from tests.gateway.builders import JSON


def test_unknown_fields_are_listed_in_the_order_of_the_body() -> None:
    body = {"penalty": 1.2, "prompt": "hi", "options": {}, "n_predict": 5}
    assert ignored(openai_completions.TABLE, body) == ("penalty", "options", "n_predict")


def test_a_field_of_the_other_route_is_unknown() -> None:
    assert ignored(openai_chat.TABLE, {"echo": True, "messages": []}) == ("echo",)
    assert ignored(openai_completions.TABLE, {"echo": True}) == ()


def test_known_fields_and_null_values_are_not_listed_as_ignored() -> None:
    known = [name for name in openai_chat.TABLE if name not in samplers.FIELDS]
    body = dict.fromkeys([*known, *UNSUPPORTED], 1) | {"colour": None}
    assert ignored(openai_chat.TABLE, body) == ()


def test_only_fields_that_ask_for_another_answer_are_listed_as_ignored() -> None:
    assert ignored(openai_chat.TABLE, dict.fromkeys(NO_EFFECT, "high")) == ("verbosity",)


def test_at_most_sixteen_ignored_fields_are_listed() -> None:
    body = {f"x{i}": i for i in range(1000)}
    assert ignored(openai_chat.TABLE, body) == tuple(f"x{i}" for i in range(16))


@given(st.dictionaries(st.text(), JSON), st.lists(st.text(" ,\r\n\x00é~!a", max_size=70)))
def test_every_body_gives_a_valid_header_of_ignored_fields(body: dict, names: list) -> None:
    told = ignored(openai_chat.TABLE, body | dict.fromkeys(names, 1))
    header = ", ".join(told)
    assert header.isascii() and (header.isprintable() or not header)
    assert tuple(filter(None, header.split(", "))) == told
    assert all(len(name) <= 64 for name in told)
