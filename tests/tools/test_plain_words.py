"""The check of our prose finds planted faults and leaves good sentences alone."""

from pathlib import Path

import pytest

from tools.plain_words import faults, markdown_texts, python_texts

HARD = [
    "What came of an append is not known.",
    "The doing of all jobs.",
    "A new request waits; who comes waits for it.",
    "This goes before both of them.",
    "It stands in the table.",
    "Of a file of ours nothing is kept.",
    " ".join(["word"] * 31),
]
GOOD = [
    "Return the blocks of a finished sequence to the pool.",
    "Logits equal those of transformers.",
    "Share of the stall target that one background step may use: a new request has to wait for it.",
    "Raises LogGone if the stream was deleted. `what is this of theirs` is code.",
]


@pytest.mark.parametrize("text", HARD)
def test_a_hard_sentence_is_found(text: str) -> None:
    assert list(faults(text))


@pytest.mark.parametrize("text", GOOD)
def test_a_plain_sentence_is_left_alone(text: str) -> None:
    assert not list(faults(text))


def test_code_and_tables_of_a_page_are_not_read(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A heading\n\nOne line\nand [two](url).\n\n```\ncode\n```\n\n"
        "| a | table |\n\n- an item\n- another\n"
    )
    assert [text for _, _, text in markdown_texts(page)] == [
        "One line and [two].",
        "an item",
        "another",
    ]


def test_docstrings_and_comments_of_a_file_are_read(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text('"""One.\n\nTwo."""\n# Three\n# four.\nx = 1  # five\n')
    assert [text for _, _, text in python_texts(file)] == ["One.", "Two.", "Three four.", "five"]
