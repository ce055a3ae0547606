"""Tests rewriting a conversation for templates that refuse or skip some messages."""

from itertools import product
from typing import Any

import pytest

from headrace.text.rendering import Rendered, render
from headrace.text.template import ChatTemplate
from headrace_common.errors import RequestError
from headrace_common.request import Chat
from tests.text.strict_templates import (
    FIRST_SYSTEM,
    GEMMA,
    LLAMA,
    MISTRAL,
    STRICT,
    TWO_ROLES,
    USER_LAST,
)

CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def rendered(source: str, *messages: dict[str, Any], **more: Any) -> Rendered:
    return render(ChatTemplate({"default": source}, {}), Chat(messages, **more))


@pytest.mark.parametrize("source", STRICT.values(), ids=STRICT)
def test_messages_that_the_template_accepts_stay_unchanged(source: str) -> None:
    messages = (user("one"), assistant("two"), user("three"))
    as_it_is = ChatTemplate({"default": source}, {}).render(Chat(messages))
    assert rendered(source, *messages) == Rendered(as_it_is)


def test_system_text_starts_the_first_user_message_if_there_is_no_system_role() -> None:
    text, changes = rendered(GEMMA, system("Be brief."), user("Hello"))
    assert text == "<start_of_turn>user\nBe brief.\n\nHello<end_of_turn>\n<start_of_turn>model\n"
    assert changes == ("system into user",)
    text, changes = rendered(MISTRAL, system("Be brief."), user("Hello"), assistant("Hi"))
    assert text == "[INST] Be brief.\n\nHello [/INST]Hi"


def test_a_template_with_a_system_role_keeps_it_when_turns_are_joined() -> None:
    text, changes = rendered(LLAMA, system("Be brief."), user("a"), user("b"))
    assert text == "[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\na\n\nb [/INST]"
    assert changes == ("same role",)


@pytest.mark.parametrize(("source", "role"), [(TWO_ROLES, "user"), (FIRST_SYSTEM, "system")])
def test_a_system_message_that_the_template_would_skip_becomes_the_users(
    source: str, role: str
) -> None:
    text, changes = rendered(source, system("Be brief."), user("Hello"))
    assert text.startswith(f"<{role}>Be brief.")
    assert changes == (("system into user",) if role == "user" else ())
    history = (user("Hello"), assistant("Hi"), system("Be brief."), user("Bye"))
    text, changes = rendered(source, *history)
    assert text == "<user>Hello<model>Hi<user>Be brief.\n\nBye<model>"
    assert changes == ("system into user",)


@pytest.mark.parametrize("source", [FIRST_SYSTEM, LLAMA])
def test_two_system_messages_at_the_start_are_joined(source: str) -> None:
    text, changes = rendered(source, system("Be brief."), system("Be kind."), user("Hello"))
    assert "Be brief.\n\nBe kind." in text and changes == ("same role",)


def test_tool_results_become_user_messages_if_there_is_no_tool_role() -> None:
    result = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
    asked = assistant("", tool_calls=[CALL])
    text, changes = rendered(MISTRAL, user("How is it?"), asked, result, user("Thanks"))
    call = '{"name": "weather", "arguments": {}}'
    told = "Result of weather:\nsunny\n\nThanks"
    assert text == f"[INST] How is it? [/INST]{call}[INST] {told} [/INST]"
    assert "tools into text" in changes


@pytest.mark.parametrize("source", STRICT.values(), ids=STRICT)
def test_a_conversation_that_starts_with_the_assistant_gets_an_empty_user(source: str) -> None:
    text, changes = rendered(source, assistant("Welcome!"), user("Hello"))
    assert "Welcome!" in text and text.index("Welcome!") < text.index("Hello")
    assert changes == ("empty user first",)


def test_a_conversation_may_end_with_the_assistant_in_a_strict_template() -> None:
    text, changes = rendered(USER_LAST, user("Hello"), assistant("Hi"))
    assert (text, changes) == ("<user>Hello<model>Hi<user><model>", ("empty user last",))
    with pytest.raises(RequestError, match="The user comes last"):
        rendered(
            USER_LAST,
            user("Hello"),
            assistant("Hi"),
            add_generation_prompt=False,
            continue_final_message=True,
        )


def test_an_assistant_message_that_was_joined_can_be_continued() -> None:
    messages = (system("Be brief."), user("Hello"), assistant("One"), assistant("two, "))
    options = {"add_generation_prompt": False, "continue_final_message": True}
    text, _ = rendered(GEMMA, *messages, **options)
    assert text.endswith("<start_of_turn>model\nOne\n\ntwo, ")


def test_a_template_that_refuses_everything_gives_its_first_error() -> None:
    source = "{{ raise_exception('I take nothing that ' + messages[0].role + ' says.') }}"
    with pytest.raises(RequestError, match="nothing that system says") as raised:
        rendered(source, system("Be brief."), user("a"), user("b"))
    assert raised.value.code == "template_failed"


def test_joined_messages_keep_their_calls_thoughts_and_images() -> None:
    source = (
        "{% for m in messages %}{% if loop.previtem and loop.previtem.role == m.role %}"
        "{{ raise_exception('turns') }}{% endif %}{{ m | tojson }}{% endfor %}"
    )
    image = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Look."}]}
    first = assistant("a", reasoning_content="why", tool_calls=[CALL])
    text, _ = rendered(
        source, user("x"), image, first, assistant("", tool_calls=[CALL | {"id": 2}])
    )
    for kept in ('"image"', "Look.", "why", '"c1"', '"id": 2'):
        assert kept in text


@pytest.mark.parametrize("name", STRICT)
def test_every_short_conversation_is_complete_and_a_prefix_of_the_next(name: str) -> None:
    """Checks that no text is lost and that a new turn leaves earlier text unchanged."""
    makers = (system, user, assistant)
    for roles in product(makers, repeat=4):
        messages = [make(f"text {i}") for i, make in enumerate(roles)]
        messages.append(user("text 4"))
        text = rendered(STRICT[name], *messages, add_generation_prompt=False).text
        places = [text.index(f"text {i}") for i in range(5)]
        assert places == sorted(places)
        further = (*messages, assistant("answer"), user("next"))
        assert rendered(STRICT[name], *further, add_generation_prompt=False).text.startswith(text)
