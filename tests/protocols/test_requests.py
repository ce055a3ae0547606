import pytest

from headrace.protocols.requests import MAX_CONTAINERS, MAX_VALUES, decode
from headrace_common.errors import RequestError


def nested(depth: int) -> bytes:
    return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


def refusal(body: bytes) -> RequestError:
    with pytest.raises(RequestError) as caught:
        decode(body)
    assert caught.value.code == "invalid_json"
    return caught.value


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"{} x",
        b"[]",
        b"null",
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":1e999}',
        b'{"a":' + b"9" * 400 + b"}",
        b'{"a":[{"b":-' + b"9" * 400 + b"}]}",
        b'{"a":"\xff"}',
        b'{"a":"\\ud800"}',
        b'{"a":"\\udc00\\ud800"}',
        b"\xef\xbb\xbf{}",
        b'{"a":"\t"}',
        b"{'a':1}",
    ],
)
def test_a_body_that_is_not_strict_json_is_refused(body: bytes) -> None:
    refusal(body)


def test_deep_nesting_is_a_400() -> None:
    assert decode(nested(64))
    assert "64 levels" in refusal(nested(65)).message
    assert "64 levels" in refusal(nested(200_000)).message


def test_the_last_of_duplicate_keys_counts() -> None:
    assert decode(b'{"a":1,"a":2}') == {"a": 2}


def test_a_surrogate_pair_is_one_character() -> None:
    assert decode(b'{"a":"\\ud83d\\ude00"}') == {"a": "\N{GRINNING FACE}"}


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":[' + b"[]," * MAX_CONTAINERS + b"[]]}",
        b'{"a":[' + b"1," * MAX_VALUES + b"1]}",
        b'{"a":["' + b'","' * (3 * MAX_VALUES) + b'"]}',
    ],
)
def test_a_body_of_too_many_values_is_refused_before_decoding(body: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        decode(body)
    assert "the limit is" in caught.value.message


def test_brackets_in_a_string_do_not_count_as_values() -> None:
    text = b"[1,{2}" * MAX_CONTAINERS + b'\\"' * 10
    assert decode(b'{"a":"' + text + b'"}') == {"a": text.replace(b"\\", b"").decode()}
