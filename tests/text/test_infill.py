import pytest

from headrace.text.infill import InfillMarks, infill_marks

QWEN = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>")
FILES = ("<|repo_name|>", "<|file_sep|>")


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ((*QWEN, *FILES), InfillMarks(0, 2, 1, 4, 5, (3, 4, 5))),
        (("<fim_suffix>", "<fim_prefix>", "<fim_middle>"), InfillMarks(1, 0, 2, None, None, ())),
        (
            ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
            InfillMarks(0, 1, 2, None, None, ()),
        ),
        ((*QWEN[:2], *FILES), None),
        ((), None),
    ],
)
def test_marks_are_found_among_the_tokens(
    tokens: tuple[str, ...], found: InfillMarks | None
) -> None:
    ids = {token: number for number, token in enumerate(tokens)}
    assert infill_marks(ids.get) == found


def test_an_infill_prompt_has_its_marks_around_the_gap() -> None:
    marks = InfillMarks(90, 91, 92, None, None, ())
    assert list(marks.files(())) == []
    assert list(marks.files([("a.py", "x")])) == [(None, "a.py\nx\n")]
    named = marks._replace(project=93, file=94)
    assert list(named.files([("a.py", "x")])) == [
        (93, "project\n"),
        (94, "a.py\nx\n"),
        (94, "current\n"),
    ]
    assert list(marks.joined([1, 2], [3])) == [90, 1, 2, 91, 3, 92]
