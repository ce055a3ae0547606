from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from headrace.text.stops import StopMatcher

LETTERS = st.text(alphabet="abc", max_size=30)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4).map(tuple)


def naive(text: str, stops: tuple[str, ...], include: bool = False) -> tuple[str, str | None]:
    """Search naively: the stop string with the earliest end wins, then the longest."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(parts: list[str], stops: tuple[str, ...], include: bool = False) -> list[str]:
    """Return the text released after each part."""
    matcher, released = StopMatcher(stops, include), []
    for part in parts:
        text, stop = matcher.feed(part)
        released.append(text)
        if stop is not None:
            return released
    return [*released, matcher.flush()]


def cut(text: str, places: list[int]) -> list[str]:
    borders = [0, *sorted(place for place in places if place < len(text)), len(text)]
    return [text[start:end] for start, end in pairwise(borders)]


@given(LETTERS, STOPS, st.lists(st.integers(0, 30)), st.booleans())
@example("aabaab", ("aabb", "ab"), [1, 2, 3, 4, 5], False)
def test_any_split_gives_the_text_before_the_first_stop(text, stops, places, include):
    assert "".join(run(cut(text, places), stops, include)) == naive(text, stops, include)[0]


@given(LETTERS, STOPS)
def test_only_text_that_may_start_a_stop_string_is_held_back(text, stops):
    matcher = StopMatcher(stops)
    released, stop = matcher.feed(text)
    if stop is None:
        held = matcher.flush()
        assert released + held == text
        assert held == "" or any(end.startswith(held) for end in stops)


def test_the_longer_of_two_stop_strings_with_the_same_end_wins():
    assert StopMatcher(("end", "the end")).feed("this is the end") == ("this is ", "the end")


def test_the_stop_string_that_is_completed_first_wins():
    assert StopMatcher(("abcd", "bc")).feed("xabcd") == ("xa", "bc")


def test_a_stop_string_is_kept_if_asked():
    assert StopMatcher(("\n\n",), include=True).feed("a\n\nb") == ("a\n\n", "\n\n")


def test_a_possible_stop_string_is_held_and_released_if_it_is_not_one():
    matcher = StopMatcher(("</end>",))
    assert matcher.feed("a </e") == ("a ", None)
    assert matcher.feed("m>") == ("</em>", None)


def test_text_held_at_the_end_is_delivered():
    matcher = StopMatcher(("###",))
    assert matcher.feed("a##") == ("a", None)
    assert matcher.flush() == "##"


def test_without_stop_strings_all_text_passes():
    assert StopMatcher(()).feed("anything") == ("anything", None)
