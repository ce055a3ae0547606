"""Tests that a tiny random model writes valid Harmony messages after its reasoning."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, RequestFailed
from tools.harness.tiny_models import HARMONY_TEMPLATE, make_tiny_model, speak_harmony

POINT: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"enum": [1, 2, 3]}, "is_far": {"type": "boolean"}},
    "required": ["x", "is_far"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT}}
TOOLS = [
    {"type": "function", "function": {"name": name, "strict": True, "parameters": POINT}}
    for name in ("go", "look-at")
]


class Speaker:
    """A model biased to reason often, for about ten tokens."""

    def __init__(self, llm: LLM, ids: dict[str, int]) -> None:
        self._llm = llm
        self._fields = {
            "temperature": 1.0,
            "max_tokens": 600,
            "return_token_ids": True,
        }
        self.ids = ids

    def answers(self, analysis: float = 2.0, **fields: Any) -> list[Any]:
        """Ask six times; return the answers that ended before the length limit.

        `analysis` is the logit bias of the first letter of the word "analysis".
        """
        bias = {str(self.ids["<|end|>"]): 5.0, str(self.ids["a"]): analysis}
        fields = self._fields | {"logit_bias": bias} | fields
        asked = [fields | {"seed": seed} for seed in range(6)]
        found = [self._llm.chat("Where?", **each) for each in asked]
        ended = [answer for answer in found if answer.finish_reason != "length"]
        assert len(ended) >= 3
        return ended


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Speaker]:
    folder = make_tiny_model(tmp_path_factory.mktemp("harmony") / "tiny", "GptOssForCausalLM")
    ids = speak_harmony(folder)
    ids["a"] = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]["a"]
    with LLM.load(str(folder), threads=1) as loaded:
        yield Speaker(loaded, ids)


def is_point(text: str) -> bool:
    found = json.loads(text)
    return found.keys() == {"x", "is_far"} and found["x"] in (1, 2, 3)


def test_an_answer_has_its_form_in_the_final_channel_after_free_reasoning(
    speaker: Speaker,
) -> None:
    reasoned = 0
    for answer in speaker.answers(response_format=FORMAT):
        assert answer.finish_reason == "stop" and is_point(answer.text), answer
        reasoned += bool(answer.reasoning)
    assert reasoned, "none of these answers reasoned"


def test_without_reasoning_the_final_message_comes_first(speaker: Speaker) -> None:
    for answer in speaker.answers(response_format=FORMAT, reasoning_effort="none"):
        assert is_point(answer.text) and not answer.reasoning
        assert answer.token_ids[0] == speaker.ids["<|channel|>"]


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "look-at"}}]
)
def test_a_forced_tool_is_called_after_reasoning(speaker: Speaker, choice: Any) -> None:
    reasoned, names = 0, ("go", "look-at") if choice == "required" else ("look-at",)
    for answer in speaker.answers(3.0, tools=TOOLS, tool_choice=choice):
        (call,) = answer.tool_calls
        assert answer.finish_reason == "tool_calls" and not answer.text
        assert call["function"]["name"] in names
        assert is_point(call["function"]["arguments"])
        reasoned += bool(answer.reasoning)
    assert reasoned


def test_a_strict_tool_may_be_called_or_not(speaker: Speaker) -> None:
    for answer in speaker.answers(tools=TOOLS, response_format=FORMAT):
        (said,) = [call["function"]["arguments"] for call in answer.tool_calls] or [
            answer.text.removeprefix(answer.text.partition("{")[0])
        ]
        assert is_point(said)


def test_a_text_completion_has_the_structure_without_messages(speaker: Speaker) -> None:
    assert speaker._llm.generate("It is", guided_choice=[" near", " far"]).text in (" near", " far")


def test_a_continued_message_follows_its_structure(speaker: Speaker) -> None:
    begun = [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "It is"},
    ]
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    answer = speaker._llm.chat(begun, guided_choice=[" near", " far"], **fields)
    assert answer.text in (" near", " far")


def test_a_tokenizer_without_the_harmony_markers_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny", "LlamaForCausalLM")
    described = json.loads((folder / "tokenizer_config.json").read_text())
    described["chat_template"] = HARMONY_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    with (
        LLM.load(str(folder), threads=1) as llm,
        pytest.raises(RequestFailed, match="lacks markers of harmony"),
    ):
        llm.chat("Where?", response_format=FORMAT)
