"""Tests the parser of multipart forms."""

import time

import pytest

from headrace.gateway.multipart import STEP_BYTES, FormParser, PartHead, boundary_of
from headrace_common.errors import RequestError

FILE = b"--b\r\n--\r\n\r\nline\r\n--bo\nend"
FORM = (
    b"\r\n--bound\r\n"
    b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b"--bound\r\n"
    b'content-disposition: form-data; name="file"; filename="a \xc3\xa9.jsonl"\r\n'
    b"Content-Type: application/json\r\n\r\n" + FILE + b"\r\n"
    b'--bound\r\nContent-Disposition: form-data; name="empty"\r\n\r\n\r\n--bound--\r\nepilogue'
)


def parts(form: bytes, step: int = 4096) -> list[tuple[PartHead, bytes]]:
    parser, found = FormParser(b"bound"), []
    for start in range(0, len(form), step):
        for news in parser.feed(form[start : start + step]):
            if isinstance(news, PartHead):
                found.append((news, b""))
            else:
                found[-1] = (found[-1][0], found[-1][1] + news)
    assert parser.is_done
    return found


def part(disposition: str, data: str = "x") -> str:
    return f"--bound\r\nContent-Disposition: {disposition}\r\n\r\n{data}\r\n"


@pytest.mark.parametrize("step", [1, 2, 3, 5, 7, 11, 64, 4096])
def test_a_form_has_the_same_parts_however_it_is_split(step: int) -> None:
    assert parts(FORM, step) == [
        (PartHead("purpose", None), b"batch"),
        (PartHead("file", "a é.jsonl"), FILE),
        (PartHead("empty", None), b""),
    ]


def test_the_boundary_is_read_from_the_content_type() -> None:
    assert boundary_of('multipart/form-data; boundary="a b"') == b"a b"
    assert boundary_of("Multipart/Form-Data; charset=utf-16; boundary=" + "b" * 70) == b"b" * 70
    for wrong in ("", "application/json", "multipart/form-data", "multipart/mixed; boundary=b"):
        with pytest.raises(RequestError) as refused:
            boundary_of(wrong)
        assert refused.value.code == "unsupported_media_type"


@pytest.mark.parametrize(
    "given",
    ["", " ", '"a "', "é", '"a\nb"', "b" * 71, "b" * 10_000, "a;" * 30_000, '"' + "\\" * 60_000],
)
def test_an_invalid_boundary_is_refused_quickly(given: str) -> None:
    began = time.thread_time()
    for _ in range(10):
        with pytest.raises(RequestError) as refused:
            boundary_of(f"multipart/form-data; boundary={given}")
        assert refused.value.code == "unsupported_media_type"
    assert time.thread_time() - began < 0.5


@pytest.mark.parametrize(
    ("given", "name", "filename"),
    [
        ('form-data; NAME="a;b" ; filename="c \\"y\\" z";', "a;b", 'c "y" z'),
        ("form-data; name=file;filename= a b ", "file", "a b"),
        ("form-data; name=a; filename*=utf-8''c; ; size=", "a", None),
        ('form-data; name=""', "", None),
        ('form-data; name=file; filename="../../etc/a.jsonl"', "file", "a.jsonl"),
        ('form-data; name=file; filename="C:\\x\\a.jsonl"', "file", "a.jsonl"),
        ('form-data; name=file; filename="a\0b\tc.jsonl"', "file", "abc.jsonl"),
    ],
)
def test_names_are_parsed_with_or_without_quotes_and_stripped_of_paths(
    given: str, name: str, filename: str | None
) -> None:
    form = part(given) + "--bound--"
    assert parts(form.encode()) == [(PartHead(name, filename), b"x")]


def test_a_form_nested_in_a_part_is_data() -> None:
    inner = "--in\r\nContent-Disposition: form-data; name=a\r\n\r\nx\r\n--in--"
    form = part("form-data; name=file\r\nContent-Type: multipart/mixed; boundary=in", inner)
    assert parts((form + "--bound--").encode()) == [(PartHead("file", None), inner.encode())]


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ("--boundless\r\n", "malformed"),
        ("preamble\r\n--bound\r\n", "malformed"),
        ("--bound\r\na: b\r\n\r\n", "Content-Disposition"),
        ("--bound\r\n" + "a: b\r\n" * 9, "8 headers"),
        ("--bound\r\na: " + "b" * 3000, "2048 bytes"),
        ("--bound\r\n" + "a" * 3000, "2048 bytes"),
        ("--bound\r\nContent-Disposition: " + " " * 3000, "2048 bytes"),
        (part("form-data"), "Content-Disposition"),
        (part("attachment; name=a"), "Content-Disposition"),
        (part("form-data; name=a\r\nContent-Disposition: form-data; name=b"), "two"),
        (part("form-data; name=a" + ";a" * 900), "32 parameters"),
        (part("form-data; name=a", "") * 18, "17 parts"),
    ],
)
def test_a_malformed_form_or_one_beyond_a_limit_is_refused(form: str, why: str) -> None:
    with pytest.raises(RequestError, match=why) as refused:
        parts(form.encode())
    assert refused.value.code == "invalid_value"


def test_a_refused_form_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RequestError):
        parts(b"--boundless\r\n")
    assert not caplog.records


@pytest.mark.parametrize("data", [b"\r\n--bound-", b"\r\n--bound\r", b"\r" * 9, b";\0\r\n--b"])
def test_a_parsing_step_is_quick_even_if_the_data_resembles_a_boundary(data: bytes) -> None:
    parser = FormParser(b"bound")
    parser.feed(part("form-data; name=file").removesuffix("x\r\n").encode())
    form, took = data * ((1 << 18) // len(data)), []
    for start in range(0, len(form), STEP_BYTES):
        began = time.thread_time()
        parser.feed(form[start : start + STEP_BYTES])
        took.append(time.thread_time() - began)
    assert sorted(took)[len(took) // 2] < 0.02
