"""Provides a model's description and example prompts for the web page's start screen."""

from typing import Any

from headrace.fleet.served_model import ServedModel
from headrace_common.checkpoints.find import MINI

# Below this number of parameters, open questions often lead to loops or made-up facts.
_SMALL = 1_000_000_000
# Below this number, even simple questions often get wrong answers.
_TINY = 200_000_000
_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tell the weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
_OF_MINI = [
    {"title": "Count", "prompt": "Count from 1 to 20."},
    {"title": "Spell", "prompt": "Spell the word banana."},
    {"title": "Add", "prompt": "What is 23 + 45?"},
    {"title": "Call a tool", "prompt": "What is the weather in Lima?", "tools": [_WEATHER]},
]
_OF_SMALL = [
    {"title": "Greet", "prompt": "Hello! How are you?"},
    {"title": "Write", "prompt": "Write two sentences about the sea."},
    {"title": "Imagine", "prompt": "Describe a forest in two sentences."},
]


def introduction(model: ServedModel) -> dict[str, Any]:
    """Return a model's `description` and `suggestions`.

    The result is empty if the page's general suggestions suit the model. The list of suggestions is
    empty if the model cannot chat.
    """
    if model.root == MINI:
        about = "A tiny built-in test model: it can count, spell, add and call tools"
        return {"description": about, "suggestions": _OF_MINI}
    if "generate" not in model.tasks:
        about = "This model computes vectors or scores for search; it cannot write answers"
        return {"description": about, "suggestions": []}
    num = model.num_parameters
    if not num or num >= _SMALL:
        return {}
    about = "A tiny model: its answers are often wrong, and sometimes nonsense"
    return {"suggestions": _OF_SMALL} | ({"description": about} if num < _TINY else {})
