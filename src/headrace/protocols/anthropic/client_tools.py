"""Defines the tools that Anthropic's clients send by type only, such as bash_20250124.

The clients run these tools. The schemas are part of Anthropic's documentation, and requests do
not contain them.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from headrace.protocols.fields.kinds import Integer, required

_TYPE = re.compile(r"(bash|text_editor|memory|computer)_(\d{8})")
_UNDO_ENDS = _OTHER_EDITOR = "20250429"
_INSERT_TEXT = "20250728"
_MORE_ACTIONS, _ZOOM = "20250124", "20251124"

Function = dict[str, Any]


def typed_function(kind: str, tool: Mapping[str, Any], path: str) -> Function | None:
    """Return the function for a type such as bash_20250124; None for an unknown type."""
    found = _TYPE.fullmatch(kind)
    return _MAKERS[found[1]](found[2], tool, path) if found else None


def _bash(date: str, tool: Mapping[str, Any], path: str) -> Function:
    return _function(
        "bash",
        "Runs commands in a shell on the user's machine. The shell keeps its state from call to "
        "call.",
        command=text("The command. Required unless restart is true."),
        restart={"type": "boolean", "description": "Whether to restart the shell."},
    )


def _text_editor(date: str, tool: Mapping[str, Any], path: str) -> Function:
    commands = ["view", "create", "str_replace", "insert"]
    inserted = "insert_text" if date >= _INSERT_TEXT else "new_str"
    return _function(
        "str_replace_editor" if date < _OTHER_EDITOR else "str_replace_based_edit_tool",
        "Views, creates and edits text files on the user's machine.",
        ("command", "path"),
        command=_one_of(commands + ["undo_edit"] * (date < _UNDO_ENDS), "What to do."),
        path=text("Absolute path of the file or folder."),
        **_edits(inserted),
    )


def _memory(date: str, tool: Mapping[str, Any], path: str) -> Function:
    commands = ["view", "create", "str_replace", "insert", "delete", "rename"]
    return _function(
        "memory",
        "Keeps notes from one conversation to the next, as files below /memories. Look there for "
        "earlier notes before you begin a task.",
        ("command",),
        command=_one_of(commands, "What to do."),
        path=text("Path of the file or folder, such as /memories/notes.txt."),
        **_edits("insert_text"),
        old_path=text("For rename: the current path."),
        new_path=text("For rename: the new path."),
    )


def _edits(inserted: str) -> Mapping[str, Any]:
    """Return the parameters of the editing commands.

    `inserted` is the name of the parameter that has the text for the command `insert`.
    """
    texts = {
        "file_text": "For create: the whole text of the file.",
        "old_str": "For str_replace: the text to replace. It must occur exactly once.",
        "new_str": "For str_replace: the text to put in its place.",
    }
    more = {inserted: f"{texts.get(inserted, '')} For insert: the text to insert.".strip()}
    return {
        "view_range": integers(2, "For view: the first and the last line; -1 is the file's end."),
        **{name: text(words) for name, words in (texts | more).items()},
        "insert_line": {
            "type": "integer",
            "description": "For insert: the line after which to insert; 0 is the file's beginning.",
        },
    }


def _computer(date: str, tool: Mapping[str, Any], path: str) -> Function:
    width, height = (
        required(tool, name, path, Integer(1)) for name in ("display_width_px", "display_height_px")
    )
    actions = ["key", "type", "mouse_move", "left_click", "left_click_drag", "right_click"]
    actions += ["middle_click", "double_click", "screenshot", "cursor_position"]
    parameters: dict[str, Any] = {
        "coordinate": integers(2, "Where: x from the left and y from the top, in pixels."),
        "text": text("For type: the text. For key: keys such as ctrl+s or Return."),
    }
    if date >= _MORE_ACTIONS:
        actions += ["left_mouse_down", "left_mouse_up", "scroll", "hold_key", "wait"]
        actions += ["triple_click"]
        parameters |= {
            "start_coordinate": integers(2, "For left_click_drag: where the drag begins."),
            "scroll_direction": _one_of(["up", "down", "left", "right"], "For scroll."),
            "scroll_amount": {"type": "integer", "description": "For scroll: how many clicks."},
            "duration": {
                "type": "number",
                "description": "For hold_key and wait: how many seconds.",
            },
        }
    if date >= _ZOOM and tool.get("enable_zoom"):
        actions += ["zoom"]
        parameters["region"] = integers(4, "For zoom: left, top, right and bottom in pixels.")
    return _function(
        "computer",
        "Uses the mouse and the keyboard of the user's computer and takes screenshots of it. Its "
        f"screen is {width} pixels wide and {height} pixels high.",
        ("action",),
        action=_one_of(actions, "What to do."),
        **parameters,
    )


_MAKERS: Mapping[str, Callable[[str, Mapping[str, Any], str], Function]] = {
    "bash": _bash,
    "text_editor": _text_editor,
    "memory": _memory,
    "computer": _computer,
}


def _function(
    name: str, description: str, names: tuple[str, ...] = (), /, **parameters: Any
) -> Function:
    """Return a function in the format of chat's tools; `names` are the required parameters."""
    schema = {"type": "object", "properties": parameters, "required": list(names)}
    return {"name": name, "description": description, "parameters": schema}


def text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def _one_of(values: list[str], description: str) -> dict[str, Any]:
    return {"type": "string", "enum": values, "description": description}


def integers(count: int, description: str) -> dict[str, Any]:
    bounds = {"minItems": count, "maxItems": count}
    return {"type": "array", "items": {"type": "integer"}, "description": description} | bounds
