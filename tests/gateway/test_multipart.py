"""Forms are read the same, wherever their pieces end."""

import time

import pytest

from headrace.core.errors import RequestError
from headrace.gateway.multipart import MultipartParser, PartEnd, PartHead, boundary_of

FILE = b"--b\r\n--\r\n\r\nline\r\n--bo\nend"
FORM = (
    b"preamble\r\n--bound\r\n"
    b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b"--bound\r\n"
    b'content-disposition: form-data; name="file"; filename="a \xc3\xa9.jsonl"\r\n'
    b"Content-Type: application/json\r\n\r\n" + FILE + b"\r\n"
    b'--bound\r\nContent-Disposition: form-data; name="empty"\r\n\r\n\r\n--bound--\r\nepilogue'
)


def parts(form: bytes, step: int) -> list[tuple[PartHead, bytes]]:
    parser, found = MultipartParser(b"bound"), []
    for start in range(0, len(form), step):
        for news in parser.feed(form[start : start + step]):
            if isinstance(news, PartHead):
                found.append((news, b""))
            elif isinstance(news, bytes):
                found[-1] = (found[-1][0], found[-1][1] + news)
            else:
                assert isinstance(news, PartEnd)
    assert parser.is_done
    return found


@pytest.mark.parametrize("step", [1, 2, 3, 5, 7, 11, 64, 4096])
def test_any_pieces_give_the_same_parts(step: int) -> None:
    assert parts(FORM, step) == [
        (PartHead("purpose", None), b"batch"),
        (PartHead("file", "a é.jsonl"), FILE),
        (PartHead("empty", None), b""),
    ]


def test_the_boundary_stands_in_the_content_type() -> None:
    assert boundary_of('multipart/form-data; boundary="a b"') == b"a b"
    for wrong in ("", "application/json", "multipart/form-data", "multipart/form-data; boundary="):
        with pytest.raises(RequestError) as refused:
            boundary_of(wrong)
        assert refused.value.code == "unsupported_media_type"


@pytest.mark.parametrize(
    ("given", "name", "filename"),
    [
        ('form-data; NAME = "a;b" ; filename="c:\\x \\"y\\" \\\\.z";', "a;b", 'c:\\x "y" \\.z'),
        ("form-data; name=file;filename= a b ", "file", "a b"),
        ("form-data; name=a; name=b; filename*=utf-8''c; ; size=", "a", None),
        ('form-data; name=""', "", None),
    ],
)
def test_parameters_are_read_quoted_or_not(given: str, name: str, filename: str | None) -> None:
    form = f"--bound\r\nContent-Disposition: {given}\r\n\r\nx\r\n--bound--"
    assert parts(form.encode(), 4096) == [(PartHead(name, filename), b"x")]


@pytest.mark.parametrize(
    "given",
    [
        "boundary*0=a; boundary*=b",
        f"boundary*{'9' * 5000}=a",
        'boundary=a"b',
        'boundary="a"b',
        "boundary",
        'a="' + ";" * 60_000,
        'a="' + "\\" * 60_000,
        "a" * 60_000,
        " " * 60_000 + "x",
    ],
)
def test_malformed_parameters_are_refused_at_once(given: str) -> None:
    began = time.thread_time()
    for _ in range(10):
        with pytest.raises(RequestError):
            boundary_of(f"multipart/form-data; {given}")
    head = f"--bound\r\nContent-Disposition: form-data; {given[:16_000]}\r\n\r\n"
    with pytest.raises(RequestError) as refused:
        parts(head.encode(), 4096)
    assert refused.value.code == "invalid_value"
    assert time.thread_time() - began < 5  # what goes over it again and again takes 20 s


@pytest.mark.parametrize(
    "form", [b"--bound\r\n" + b"a: b\r\n" * 5000, b"--boundless\r\n", b"--bound\r\na: b\r\n\r\n"]
)
def test_what_is_no_form_is_refused(form: bytes) -> None:
    with pytest.raises(RequestError) as refused:
        parts(form, 4096)
    assert refused.value.code == "invalid_value"
