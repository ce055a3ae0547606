"""Tests tools described in text for templates that know only user and assistant turns."""

import json
from typing import Any

from headrace.text.rendering import render
from headrace.text.template import ChatTemplate
from headrace.text.tool_formats.generic import with_tools_as_text
from headrace.text.tool_formats.table import tool_format
from headrace_common.request import Chat
from tools.harness.tiny_models import TURNS_TEMPLATE

SYSTEMLESS = ChatTemplate({"default": TURNS_TEMPLATE}, {})
WITH_SYSTEM = ChatTemplate(
    {"default": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"}, {}
)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
ASKED = {"role": "user", "content": "How is it in Paris?"}
ARGUMENTS = '{"city":  "Paris"}'


def call(id: str = "call_1", arguments: Any = ARGUMENTS) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {"id": id, "type": "function", "function": function}


def result(text: str, id: str = "call_1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": text}


def rendered(*messages: dict[str, Any], template: ChatTemplate = SYSTEMLESS, **more: Any) -> str:
    chat = Chat(messages, **({"tools": (TOOL,)} | more))
    return render(template, with_tools_as_text(chat)).text


def test_a_template_without_tools_uses_the_generic_tool_format() -> None:
    assert tool_format(TURNS_TEMPLATE) == "generic"
    assert tool_format("") == ""
    assert tool_format("{{ tools }}") == "hermes"


def test_the_prompt_describes_each_tool_before_the_conversation() -> None:
    text = rendered({"role": "system", "content": "Be brief."}, ASKED, template=WITH_SYSTEM)
    head, _, question = text.partition("<user>")
    assert head.startswith("<system>Be brief.\n\n") and question == ASKED["content"]
    lines = [line for line in head.splitlines() if line.startswith('{"name": "weather"')]
    assert json.loads(lines[0]) == {"name": "weather", "parameters": PARAMETERS}


def test_tools_are_described_in_the_user_message_if_there_is_no_system_role() -> None:
    assert WITH_SYSTEM.shows_system and not SYSTEMLESS.shows_system
    text = rendered({"role": "system", "content": "Be brief."}, ASKED)
    assert text.startswith("[user]Be brief.\n\n") and text.endswith(ASKED["content"] + "[model]")


def test_calls_and_results_become_turns_of_a_template_with_two_roles() -> None:
    said = {"role": "assistant", "content": "", "tool_calls": [call(), call("call_2")]}
    thanks = {"role": "user", "content": "Thanks!"}
    text = rendered(ASKED, said, result("sunny"), result("rain", "call_2"), thanks)
    written = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'
    told = "Result of weather:\nsunny\n\nResult of weather:\nrain\n\nThanks!"
    assert text.endswith(f"[model]{written}\n{written}[user]{told}[model]")


def test_calls_stay_in_the_history_if_a_request_sends_no_tools() -> None:
    said = {"role": "assistant", "content": "Let me see.", "tool_calls": [call(arguments={})]}
    text = rendered(ASKED, said, result("sunny"), tools=())
    assert '[model]Let me see.\n{"name": "weather", "arguments": {}}[user]Result' in text
    assert "functions" not in text


def test_a_conversation_without_tools_stays_as_it_is() -> None:
    chat = Chat((ASKED, ASKED))
    assert with_tools_as_text(chat) is chat


def test_images_stay_in_their_order() -> None:
    image = {"type": "image"}
    seen = [{"type": "text", "text": "What is it?"}, image]
    chat = Chat(({"role": "user", "content": seen}, result("a"), ASKED), tools=(TOOL,))
    _, message = with_tools_as_text(chat).messages
    kinds = [part["type"] for part in message["content"]]
    assert kinds.count("image") == 1 and kinds.index("image") == 1
    assert message["content"][-1]["text"] == ASKED["content"]
