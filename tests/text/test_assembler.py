from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.text.assembler import TextAssembler
from headrace.text.detokenizer import Detokenizer
from headrace.text.stops import StopMatcher
from headrace_common.pieces import ChannelPiece
from headrace_common.sampling import Sampling
from tools.harness.small_tokenizers import library, ours

END = library("gpt2").token_to_id("</s>")


class Fed(NamedTuple):
    """Return the engine's output for one token."""

    text: str
    entries: tuple[int, ...]
    ended: bool
    stop: str | int | None


def answer(*stops: str, include: bool = False, **sampling) -> TextAssembler[int]:
    detokenizer = Detokenizer(ours("gpt2"))
    settings_ = Sampling(end_token_ids=(END,), **sampling)
    return TextAssembler(detokenizer, StopMatcher(stops, include), settings_)


def ids_of(text: str) -> list[int]:
    return list(ours("gpt2").encode(text, add_special_tokens=False))


def run(machine: TextAssembler[int], ids: list[int]) -> list[Fed]:
    """Feed tokens, each with its position as its entry; return the outputs until the end."""
    given_out = []
    for number, token_id in enumerate(ids):
        given_out.append(fed(machine, machine.feed(token_id, number)))
        if given_out[-1].ended:
            return given_out
    return [*given_out, fed(machine, machine.flush())]


def fed(machine: TextAssembler[int], pieces: tuple[ChannelPiece, ...]) -> Fed:
    text = "".join(piece.text for piece in pieces)
    return Fed(text, machine.take_entries(), machine.has_ended, machine.stop)


def text_of(parts: list[Fed]) -> str:
    return "".join(part.text for part in parts)


def entries_of(parts: list[Fed]) -> list[int]:
    return [entry for part in parts for entry in part.entries]


def test_an_end_token_adds_no_text_and_no_entry():
    parts = run(answer(), [*ids_of("Hi"), END])
    assert (text_of(parts), parts[-1].ended, parts[-1].stop) == ("Hi", True, None)
    assert entries_of(parts) == list(range(len(ids_of("Hi"))))


def test_a_stop_token_names_itself_and_releases_what_was_held():
    (stop,) = ids_of("!")
    parts = run(answer("quick brown", stop_token_ids=(stop,)), [*ids_of("The quick"), stop])
    assert (text_of(parts), parts[-1].stop) == ("The quick", stop)


def test_a_stop_string_cuts_the_text_and_the_entries_inside_it():
    ids = ids_of("The quick brown fox")
    parts = run(answer("quick"), ids)
    assert (text_of(parts), parts[-1].stop) == ("The ", "quick")
    kept = entries_of(parts)
    assert kept == list(range(len(kept)))
    assert len("".join(ours("gpt2").token_text(ids[entry]) for entry in kept)) >= len("The ")


def test_an_included_stop_string_ends_the_text():
    parts = run(answer("quick", include=True), ids_of("The quick brown"))
    assert text_of(parts) == "The quick"


def test_an_entry_comes_in_the_delta_with_its_last_byte():
    ids = ids_of("🦊")
    parts = run(answer(), ids)
    assert [part.entries for part in parts[: len(ids)]] == [()] * (len(ids) - 1) + [
        tuple(range(len(ids)))
    ]


def test_stop_strings_and_end_tokens_have_no_effect_before_min_tokens():
    ids = ids_of("stop stop stop")
    num_first = len(ids_of("stop"))
    parts = run(answer("stop", min_tokens=num_first), ids)
    assert (text_of(parts), parts[-1].stop) == ("stop ", "stop")


def test_a_stop_string_that_starts_before_min_tokens_is_ignored():
    ids = ids_of("xy")
    assert len(ids) == 2
    assert text_of(run(answer("xy", min_tokens=1), ids)) == "xy"


def test_a_skipped_special_token_has_no_entry():
    special = library("gpt2").token_to_id("<|im_start|>")
    parts = run(answer(), [special, *ids_of("Hi")])
    assert 0 not in entries_of(parts)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from("abé🦊 "), max_size=12), st.sampled_from(["ab", " ", "🦊é", "é"]))
def test_entries_are_those_of_the_tokens_in_the_delivered_text(letters, stop):
    text = "".join(letters)
    ids = ids_of(text)
    held, free = run(answer(stop), ids), run(answer(), ids)
    delivered = text.partition(stop)[0]
    assert text_of(held) == delivered
    sizes = [len(ours("gpt2").token_bytes(token_id)) for token_id in ids]
    starts = [sum(sizes[:number]) for number in range(len(ids))]
    whole = [number for number, start in enumerate(starts) if start < len(delivered.encode())]
    assert entries_of(held) == whole
    assert entries_of(free) == list(range(len(ids)))


def test_feeding_the_same_tokens_again_gives_the_same_deltas():
    ids = ids_of("The quick 🦊 jumps")
    assert run(answer("jump"), ids) == run(answer("jump"), ids)
