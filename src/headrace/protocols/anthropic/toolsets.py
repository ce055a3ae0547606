"""Defines the toolsets of Anthropic's clients: one entry of `tools` stands for many tools.

The schemas of the tools are fixed. A call that is sent to a client has the member's name and
the toolset's name in separate fields. The model sees both names joined, because different
toolsets have members with equal names.
"""

import re
from collections.abc import Mapping
from typing import Any

from headrace.protocols.anthropic.client_tools import Function, integers, text
from headrace.protocols.fields.kinds import Flag, Object
from headrace.protocols.fields.tools import flat_name

_TYPE = re.compile(r"(computer|browser)_toolset_\d{8}")

Schema = dict[str, Any]


def _whole(description: str) -> Schema:
    return {"type": "integer", "description": description}


def _variant(kind: str, **properties: Schema) -> Schema:
    properties = {"type": {"const": kind}} | properties
    return {"type": "object", "properties": properties, "required": list(properties)}


_DIRECTION = {"type": "string", "enum": ["up", "down", "left", "right"]}
_POINT = _variant(
    "coordinate",
    x=_whole("Pixels from the left edge of the viewport."),
    y=_whole("Pixels from the top edge of the viewport."),
)
_ELEMENT = _variant("ref", ref=text("A reference from read_page or find, such as ref_7."))
_ANYWHERE = {"anyOf": [_POINT, _ELEMENT]}

_COMPUTER_FIELDS: Mapping[str, Schema] = {
    "coordinate": integers(2, "x from the left and y from the top, in pixels."),
    "start_coordinate": integers(2, "Where the drag begins."),
    "held": text("Keys to hold down meanwhile, such as ctrl+shift."),
    "text": text("The text, or the keys such as ctrl+s."),
    "repeat": _whole("Number of times; 1 by default."),
    "duration": _whole("Seconds."),
    "scroll_direction": _DIRECTION,
    "scroll_amount": _whole("Clicks of the wheel."),
    "region": integers(4, "Left, top, right and bottom, in pixels of a screenshot."),
}
_BROWSER_FIELDS: Mapping[str, Schema] = {
    "target": _ANYWHERE,
    "point": _POINT,
    "element": _ELEMENT,
    "from": _POINT,
    "tab_id": text("The tab; the active one by default."),
    "modifiers": text("Keys to hold down meanwhile, such as ctrl+shift."),
    "url": text("An address, or back, forward or reload."),
    "text": text("The text, or the keys such as ctrl+a."),
    "code": text("An expression in JavaScript."),
    "repeat": _whole("Number of times; 1 by default."),
    "duration": {"type": "number", "description": "Seconds, at most 30."},
    "scroll_direction": _DIRECTION,
    "scroll_amount": _whole("Clicks of the wheel, 1 to 10; 3 by default."),
    "region": integers(4, "Left, top, right and bottom, in pixels of the viewport."),
    "query": text("A description of the elements to find."),
    "value": {"type": ["string", "number", "boolean"]},
    "paths": {"type": "array", "items": {"type": "string"}},
    "document_ids": {"type": "array", "items": {"type": "string"}},
    "depth": _whole("Levels of the tree; 15 by default."),
    "filter": {"type": "string", "enum": ["all", "interactive"]},
    "ref": text("The element whose subtree to read; the page by default."),
}
_RENAMED = {"held": "text", "point": "target", "element": "target", "code": "text"}
"""Maps keys of the two tables above to the field names that calls have.

Some members have fields with the same name and different schemas. The tables need different
keys for these fields.
"""

_CLICK = "coordinate? held?"
_COMPUTER = {
    "screenshot": ("Take a screenshot.", ""),
    "zoom": ("Take a screenshot of a part of the screen, enlarged.", "region"),
    "left_click": ("Click, at the cursor if there is no coordinate.", _CLICK),
    "right_click": ("Click the right button.", _CLICK),
    "middle_click": ("Click the middle button.", _CLICK),
    "double_click": ("Click twice.", _CLICK),
    "triple_click": ("Click three times.", _CLICK),
    "left_click_drag": ("Drag with the left button.", "start_coordinate coordinate held?"),
    "left_mouse_down": ("Press the left button and hold it.", ""),
    "left_mouse_up": ("Release the left button.", ""),
    "mouse_move": ("Move the cursor without a click.", "coordinate"),
    "cursor_position": ("Return the cursor's coordinate.", ""),
    "scroll": ("Turn the wheel.", "scroll_direction scroll_amount coordinate? held?"),
    "type": ("Type a text.", "text"),
    "key": ("Press keys.", "text repeat?"),
    "hold_key": ("Hold keys down for a time.", "text duration"),
    "wait": ("Wait.", "duration"),
}
_TARGET = "target modifiers? tab_id?"
_BROWSER = {
    "navigate": ("Open an address, or go back, forward or reload.", "url tab_id?"),
    "list_tabs": ("List the open tabs with their ids.", ""),
    "new_tab": ("Open an empty tab.", ""),
    "switch_tab": ("Make a tab the active one.", "tab_id"),
    "close_tab": ("Close a tab.", "tab_id"),
    "read_page": ("Read the page as a tree with references.", "depth? filter? ref? tab_id?"),
    "get_page_text": ("Read the text of the page.", "tab_id?"),
    "find": ("Find elements by a description; returns their references.", "query tab_id?"),
    "screenshot": ("Take a screenshot of the viewport.", "tab_id?"),
    "zoom": ("Take a screenshot of a part of the viewport, enlarged.", "region tab_id?"),
    "left_click": ("Click.", _TARGET),
    "right_click": ("Click the right button.", _TARGET),
    "middle_click": ("Click the middle button.", _TARGET),
    "double_click": ("Click twice.", _TARGET),
    "triple_click": ("Click three times.", _TARGET),
    "hover": ("Move the cursor there without a click.", "target tab_id?"),
    "left_click_drag": ("Drag with the left button.", "from point tab_id?"),
    "left_mouse_down": ("Press the left button and hold it.", "point tab_id?"),
    "left_mouse_up": ("Release the left button.", "point tab_id?"),
    "mouse_move": ("Move the cursor without a click.", "point tab_id?"),
    "scroll": ("Turn the wheel.", "point scroll_direction scroll_amount? tab_id?"),
    "scroll_to": ("Scroll an element into view.", "element tab_id?"),
    "form_input": ("Set the value of a form's element.", "element value tab_id?"),
    "type": ("Type a text.", "text tab_id?"),
    "key": ("Press keys.", "text repeat? tab_id?"),
    "hold_key": ("Hold keys down for a time.", "text duration tab_id?"),
    "wait": ("Wait.", "duration tab_id?"),
    "file_upload": ("Choose files for a file input.", "element paths? document_ids? tab_id?"),
    "read_console": ("Read new lines of the console.", "tab_id?"),
    "read_network": ("Read new requests of the network.", "tab_id?"),
    "javascript_exec": ("Run JavaScript in the page and return its value.", "code tab_id?"),
}
_OFF = ("file_upload", "read_console", "read_network", "javascript_exec")
"""Members that are off unless the client enables them."""

_TOOLSETS: Mapping[str, tuple[Mapping[str, tuple[str, str]], Mapping[str, Schema]]] = {
    "computer": (_COMPUTER, _COMPUTER_FIELDS),
    "browser": (_BROWSER, _BROWSER_FIELDS),
}
"""Maps each toolset to its members, and to the schemas of the members' fields.

A member has a description and a list of field names.
"""


def toolset_of(kind: str) -> str | None:
    """Return the name of the toolset that a type stands for; None if the type is not a toolset."""
    found = _TYPE.fullmatch(kind)
    return found[1] if found else None


def members_of(toolset: str, tool: Mapping[str, Any], path: str) -> list[Function]:
    """Return the members that are enabled, as functions."""
    configs = tool.get("configs")
    configs = {} if configs is None else Object().check(configs, f"{path}.configs")
    members, fields = _TOOLSETS[toolset]
    return [
        _function(flat_name(toolset, name), description, names.split(), fields)
        for name, (description, names) in members.items()
        if _is_on(name, configs.get(name), f"{path}.configs.{name}")
    ]


def _is_on(name: str, config: Any, path: str) -> bool:
    enabled = None if config is None else Object().check(config, path).get("enabled")
    return name not in _OFF if enabled is None else bool(Flag().check(enabled, f"{path}.enabled"))


def _function(
    name: str, description: str, names: list[str], fields: Mapping[str, Schema]
) -> Function:
    """Return a function in chat's format; a field whose name ends with `?` is optional."""
    properties = {}
    needed = []
    for each in names:
        field = each.rstrip("?")
        key = _RENAMED.get(field, field)
        properties[key] = fields[field]
        if field == each:
            needed.append(key)
    schema = {
        "type": "object",
        "properties": properties,
        "required": needed,
        "additionalProperties": False,
    }
    return {"name": name, "description": description, "parameters": schema}
