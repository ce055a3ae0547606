import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.protocols.anthropic import messages as anthropic_messages
from headrace.protocols.openai import chat as openai_chat
from headrace.protocols.openai import responses as openai_responses
from headrace.protocols.progress_text import ProgressWords, without_progress
from headrace_common.request import Chat
from tests.gateway.builders import make_record, make_request, parsed, progress

LINE = "\u2063Processing the prompt: 43 %, 80 s left\n"
ASKED = {"return_progress": True, "progress_in_words": True}


def words_of(*seconds: int, **changes: Any) -> list[str]:
    """Return the progress lines of a prompt that is prefilled at ten tokens per second."""
    options = changes.pop("response_options", ASKED)
    words = ProgressWords(make_record(make_request(response_options=options, **changes)))
    events = (progress(10 * s, total=1200, cache=0, time_ms=1000 * s) for s in seconds)
    return [line for event in events if (line := words.take(event))]


def test_progress_lines_come_after_three_seconds_and_then_every_ten() -> None:
    lines = words_of(*range(1, 30), 119, 120)
    assert lines == [
        "\u2063Processing the prompt: 2 %, 117 s left\n",
        "\u2063Processing the prompt: 10 %, 107 s left\n",
        "\u2063Processing the prompt: 19 %, 97 s left\n",
        "\u2063Processing the prompt: 99 %, 1 s left\n",
    ]


def test_a_long_time_left_is_in_minutes_and_an_unknown_one_is_omitted() -> None:
    words = ProgressWords(make_record(make_request(response_options=ASKED)))
    assert words.take(progress(512, time_ms=5000)) == "\u2063Processing the prompt: 25 %\n"
    later = progress(612, time_ms=60_000)
    assert words.take(later) == "\u2063Processing the prompt: 29 %, 14 min left\n"


def test_no_progress_text_unasked_with_a_grammar_or_a_continued_message() -> None:
    begun = Chat(({"role": "assistant", "content": "The"},), continue_final_message=True)
    grammar = msgspec.structs.replace(make_request().sampling, grammar="start: /a/")
    assert not words_of(5, response_options={"return_progress": True})
    assert not words_of(5, sampling=grammar)
    assert not words_of(5, prompts=(begun,))
    assert words_of(5)


def test_several_choices_share_one_progress_line() -> None:
    words = ProgressWords(make_record(make_request(response_options=ASKED, n=3)))
    events = [msgspec.structs.replace(progress(600, time_ms=5000), choice=i) for i in range(3)]
    assert [bool(words.take(event)) for event in events] == [True, False, False]


TEXTS = st.lists(st.text(st.characters(exclude_characters="\u2063")), min_size=1, max_size=4)


@given(TEXTS)
def test_exactly_the_inserted_progress_lines_are_removed(parts: list[str]) -> None:
    told = "".join(itertools.chain(*((LINE, part) for part in parts)))
    assert without_progress(told) == "".join(parts)


def test_lines_of_an_earlier_version_are_removed_too() -> None:
    assert without_progress(LINE.replace("Processing", "Reading") + "Hm.") == "Hm."


def test_the_models_own_text_is_never_removed() -> None:
    own = "Processing the prompt: 43 %, 80 s left\n\u2063"
    assert without_progress(own) == own


def chat_of(dialect: Any, body: dict[str, Any]) -> Any:
    (chat,) = parsed(dialect, body).prompts
    return chat


@pytest.mark.parametrize("own", ["", "Hm."])
def test_progress_text_in_a_history_is_removed_from_the_prompt(own: str) -> None:
    user = {"role": "user", "content": "hi"}
    thought, plain = LINE + LINE + own, {"role": "assistant", "content": "Yes."}
    with_own = plain | {"reasoning_content": own, "reasoning": own} if own else plain
    sent = plain | {"reasoning_content": thought, "reasoning": thought}
    chat = chat_of(openai_chat, {"messages": [user, sent, user]})
    assert chat.messages[1] == with_own

    blocks = [{"type": "thinking", "thinking": thought}, {"type": "text", "text": "Yes."}]
    asked = {"model": "headrace-mini", "max_tokens": 5}
    turns = [user, {"role": "assistant", "content": blocks}, user]
    chat = chat_of(anthropic_messages, asked | {"messages": turns})
    assert chat.messages[1].get("reasoning_content", "") == own

    said = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": thought}]}
    chat = chat_of(openai_responses, {"input": [user, said, plain, user]})
    assert chat.messages[1] == with_own
