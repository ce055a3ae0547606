"""Chat templates that come through a pipe, which can be read only once."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.text.template import ChatTemplate
from headrace_common.config import piped_text
from headrace_common.config.sources import load
from headrace_common.errors import ConfigError

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture
def pipe() -> Iterator[tuple[str, int]]:
    """The path of a pipe, as a shell's `<(…)` has it, and the end to write to."""
    reading, writing = os.pipe()
    yield f"/dev/fd/{reading}", writing
    os.close(reading)


def template_of(path: str) -> str | None:
    return load({"model": "headrace-mini", "chat_template": path}, {}, None).models[0].chat_template


def test_the_text_of_a_pipe_stands_in_the_place_of_its_path(
    pipe: tuple[str, int], tmp_path: Path
) -> None:
    path, writing = pipe
    os.write(writing, TEMPLATE.encode())
    os.close(writing)
    text = template_of(path)
    assert text == TEMPLATE + "\n"
    for _ in range(2):
        loaded = ChatTemplate.load(tmp_path, {}, text)
        assert loaded is not None and loaded.source.strip() == TEMPLATE


def test_a_named_pipe_waits_for_its_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "template")
    writer = threading.Thread(target=(tmp_path / "template").write_text, args=(TEMPLATE,))
    writer.start()
    assert template_of(str(tmp_path / "template")) == TEMPLATE + "\n"
    writer.join()


def test_a_pipe_without_end_is_refused(pipe: tuple[str, int]) -> None:
    path, writing = pipe

    def write_on() -> None:
        with open(writing, "wb", buffering=0) as out:
            for _ in range(piped_text.MAX_BYTES // 1000 + 100):
                out.write(1000 * b" ")

    writer = threading.Thread(target=write_on)
    writer.start()
    with pytest.raises(ConfigError, match=r"holds more than 1,048,576 bytes"):
        template_of(path)
    while writer.is_alive():
        os.read(int(path.rpartition("/")[2]), 1 << 16)


@pytest.mark.parametrize(
    ("content", "words"), [(b"", "is empty"), (b"\xff", "UTF-8"), (None, "sent nothing")]
)
def test_a_pipe_without_a_template_is_refused(
    content: bytes | None, words: str, pipe: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(piped_text, "_MAX_WAIT_S", 0.2)
    path, writing = pipe
    if content is not None:
        os.write(writing, content)
        os.close(writing)
    with pytest.raises(ConfigError, match=words):
        template_of(path)


def test_a_path_that_is_no_pipe_stays_a_path(tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    for path in (str(tmp_path / "template.jinja"), str(tmp_path / "missing"), "a\0b"):
        assert template_of(path) == path
