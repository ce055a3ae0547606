"""The token ids of texts, read in windows where they are long."""

from array import array

from headrace.core.request import Infill
from headrace.fleet.served_model import ServedModel


def text_ids(
    model: ServedModel, text: str, adds_special_tokens: bool, longest: int | None
) -> tuple["array[int]", str]:
    """All ids, or the first ones, more than `longest`; one-shot or streamed."""
    encoding = model.encoder.begin(text, adds_special_tokens, longest)
    num_windows = 1
    while encoding.advance():
        num_windows += 1
    return encoding.token_ids, "streamed" if num_windows > 1 else "one-shot"


def gap_ids(model: ServedModel, gap: Infill, longest: int | None) -> tuple["array[int]", str]:
    """The same for the two sides of a gap, with the model's marks between them."""
    tokenizer, ways = model.tokenizer, []

    def ids_of(text: str) -> "array[int]":
        token_ids, way = text_ids(model, text, False, longest)
        ways.append(way)
        return token_ids

    marks = tokenizer.infill_marks
    assert marks, "such a prompt is taken only where there are marks"
    before, behind = ids_of(gap.before), ids_of(gap.behind)
    ids = tokenizer.outer_ids[0][:] if gap.add_special_tokens else array("i")
    for mark, text in marks.files(gap.files):
        ids.extend([] if mark is None else [mark])
        ids += ids_of(text)
    return ids + marks.joined(before, behind), max(ways)
