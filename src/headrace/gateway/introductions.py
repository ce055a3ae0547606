"""A sentence about a model and prompts to try, for the page's start screen."""

from typing import Any

from headrace.fleet.served_model import ServedModel
from headrace_common.checkpoints.find import MINI

_SMALL = 1_000_000_000  # parameters; below it, open questions often end in loops or inventions
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
    """Return `description` and `suggestions` of a model, if general prompts do not suit it."""
    if model.root == MINI:
        about = "A tiny built-in test model: it can count, spell, add and call tools"
        return {"description": about, "suggestions": _OF_MINI}
    num = model.num_parameters
    return {"suggestions": _OF_SMALL} if num and num < _SMALL else {}
