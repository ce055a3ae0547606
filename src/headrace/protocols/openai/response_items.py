"""Checks the items of /v1/responses, writes the items as chat messages, and lists items."""

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from headrace.protocols.dialect import encode
from headrace.protocols.fields.kinds import (
    String,
    check_object,
    items_of,
    missing,
    required,
    wrong_type,
)
from headrace.protocols.fields.messages import arguments_of_text, image_part
from headrace.protocols.fields.parts import carried_text, part_text, read_parts
from headrace.protocols.fields.tools import flat_name
from headrace.protocols.openai.response_history import COMPACTION, Item, summary_of, visible
from headrace.protocols.progress_text import without_progress

MAX_ITEMS = 10_000
RESPONSE = "resp_"
"""The prefix of a response's id. The ids of the response's items contain the part after it."""

REFERENCE = "item_reference"
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})[io][0-9]{1,6}")
_CLIENT_ID = re.compile(r"[!-~]{1,128}")
# The maximum number of items per response that can be found by the client's ids.
_MAX_INDEXED = 1000
_ROLES = ("user", "assistant", "system", "developer")
_IMAGE = "input_image"
PAST = "previous_response_id"
"""The field that stands for all items of an earlier response."""

Message = dict[str, Any]

NO_MESSAGES: tuple[Message, ...] = ({"role": "user", "content": ""},)
"""The messages of a conversation without items (`input: []`). Many templates need a message."""

_CALLS: Mapping[str, tuple[str, str]] = {
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
    "tool_search_call": ("tool_search", "arguments"),
    "computer_call": ("computer", "action"),
    "program": ("program", "code"),
}
"""Maps each type of call to the tool's name and to the field that has the arguments."""

_OUTPUTS = (
    *("function_call_output", "custom_tool_call_output", "local_shell_call_output"),
    *("shell_call_output", "apply_patch_call_output", "computer_call_output"),
    *("tool_search_output", "tool_search_call_output", "program_output"),
)
_RUN_ELSEWHERE: Mapping[str, tuple[str, str]] = {
    "mcp_call": ("arguments", "output"),
    "code_interpreter_call": ("code", "outputs"),
    "file_search_call": ("queries", "results"),
    "web_search_call": ("action", "results"),
}
"""For each type of call that a provider runs: the fields with the arguments and the result."""


class ReadItems(tuple[Item, ...]):
    """Items as they are stored, with the items' messages and the paths of unreadable values."""

    messages: tuple[Message, ...] = ()
    skipped: tuple[str, ...] = ()


class Items(msgspec.Struct, frozen=True):
    """Reads the field `input` as ReadItems; a string counts as a message of the user.

    Items that other providers made are accepted: refusing such an item would end the conversation.
    """

    def check(self, value: Any, path: str) -> ReadItems:
        if type(value) is str:
            value = [{"role": "user", "content": value}]
        found = items_of(value, path, 0, MAX_ITEMS, "a string or an array of items")
        items = ReadItems(_stored(*each) for each in found)
        transcript = Transcript()
        for number in visible(items):
            transcript.add(items[number], found[number][1])
        items.messages, items.skipped = tuple(transcript.messages), tuple(transcript.skipped)
        return items

    def schema(self) -> dict[str, Any]:
        item = {"type": "object", "properties": {"type": {"type": ["string", "null"]}}}
        items = {"type": "array", "items": item, "maxItems": MAX_ITEMS}
        return {"anyOf": [{"type": "string"}, items]}


def messages_of(
    items: Sequence[Item], num_past: int = 0, places: Sequence[int] | None = None
) -> tuple[Message, ...]:
    """Return the items as messages for a chat template. Each image has its path in the request.

    The first `num_past` items belong to earlier responses; their path is `previous_response_id`.
    `places` gives each item's original index if items were dropped.
    """
    transcript = Transcript()
    for index in visible(items):
        number = places[index] if places else index
        place = f"input[{number - num_past}]" if number >= num_past else PAST
        transcript.add(items[index], place)
    return tuple(transcript.messages)


def listed(items: Iterable[Item], stream_id: str) -> list[Item]:
    """Return the items with ids: their own ids, or ids made from their positions.

    Each listing of the same items has the same ids.
    """
    found = []
    for number, item in enumerate(items):
        id = item.get("id") or item_id(stream_id, item["type"], f"i{number}")
        more = {"status": "completed"} if item["type"] == "message" else {}
        found.append({"id": id} | more | item | {"id": id})
    return found


_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "local_shell_call": "lsh",
    "shell_call": "sh",
    "apply_patch_call": "apc",
    COMPACTION: "cmp",
}


def item_id(stream_id: str, kind: str, place: str) -> str:
    """Return the id of an item, the same for every reader of the log.

    The id contains the response's id, so that an item_reference can be resolved. `place` is the
    letter `i` for input or `o` for output, followed by the item's number.
    """
    return f"{_PREFIXES.get(kind, 'item')}_{stream_id.removeprefix(RESPONSE)}{place}"


def response_of(item_id: str) -> str | None:
    """Return the id of the response that made an item; None if the item's id is from a client."""
    found = _ITEM_ID.fullmatch(item_id)
    return RESPONSE + found[1] if found else None


def referenced(items: Iterable[Item]) -> tuple[str, ...]:
    """Return the ids of the items to which item_references refer."""
    return _ids(item for item in items if item["type"] == REFERENCE)


def client_ids(items: Iterable[Item]) -> tuple[str, ...]:
    """Return the ids that the client gave to its last items; a later request may name these ids."""
    return _ids(item for item in items if item["type"] != REFERENCE)[-_MAX_INDEXED:]


def _ids(items: Iterable[Item]) -> tuple[str, ...]:
    ids = (item.get("id") or "" for item in items)
    return tuple(dict.fromkeys(id for id in ids if _CLIENT_ID.fullmatch(id)))


def _stored(value: Any, path: str) -> Item:
    """Return the item as sent, but always with a type. A message's text becomes a part."""
    check_object(value, path)
    kind = value.get("type")
    if kind is None:
        is_reference = value.get("id") is not None and "role" not in value
        kind = REFERENCE if is_reference else "message"
    item: Item = value | {"type": String().check(kind, f"{path}.type")}
    if item.get("id") is not None:
        _string(item, "id", path)
    if kind == "message" and type(item.get("content")) is str:
        text = item["content"]
        part: Item = {"type": "input_text", "text": text}
        if item.get("role") == "assistant":
            part = {"type": "output_text", "text": text, "annotations": []}
        item["content"] = [part]
    return item


class Transcript:
    """Writes items as messages for a chat template, and records the paths of skipped values.

    Consecutive reasoning, text and calls of the assistant become one message, in this order.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.skipped: list[str] = []
        # Maps the ids of calls to the names of the called tools.
        self._names: dict[str, str] = {}
        # The ids of tool searches that a provider runs, which have no call_id, and no output yet.
        self._searches = deque[str]()

    def add(self, item: Item, path: str) -> None:
        """Add an item. Raise RequestError if a field that the messages need has the wrong type."""
        kind: str = item["type"]
        if kind == "message":
            self._message(item, path)
        elif kind == "reasoning":
            self._reasoning(item, path)
        elif kind == "function_call":
            name = flat_name(_optional(item, "namespace", path), _string(item, "name", path))
            arguments = _string(item, "arguments", path)
            self._call(_string(item, "call_id", path), name, arguments)
        elif kind == "custom_tool_call":
            name = flat_name(_optional(item, "namespace", path), _string(item, "name", path))
            arguments = arguments_of_text(_string(item, "input", path))
            self._call(_string(item, "call_id", path), name, arguments)
        elif kind in _CALLS:
            self._typed_call(item, path)
        elif kind in _OUTPUTS:
            self._output(item, path)
        elif kind in _RUN_ELSEWHERE:
            self._run_elsewhere(item, path)
        else:
            self._other(item, path)

    def _message(self, item: Item, path: str) -> None:
        role = _string(item, "role", path)
        if role not in _ROLES:
            self.skipped.append(f"{path}.role")
            role = "user"
        if role != "assistant" and "content" not in item:
            raise missing(f"{path}.content")
        image_of = _image_of if role != "assistant" else _no_image
        content = self._content(item.get("content"), path, "content", image_of)
        if role != "assistant":
            self.messages.append({"role": role, "content": content})
            return
        message = self._open_assistant()
        if message["content"] or "tool_calls" in message:
            message = self._new_assistant()
        message["content"] = content

    def _content(self, value: Any, path: str, name: str, image_of: Any) -> str | list[Item]:
        place = path if path == PAST else f"{path}.{name}"
        if value is None:
            return ""
        if type(value) is str:
            return value
        if type(value) is not list:
            raise wrong_type(value, place, "a string or an array of parts")
        return read_parts(value, place, image_of, self.skipped)

    def _call(self, call_id: str, name: str, arguments: str) -> None:
        self._names[call_id] = name
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self._open_assistant().setdefault("tool_calls", []).append(call)

    def _typed_call(self, item: Item, path: str) -> None:
        name, field = _CALLS[item["type"]]
        value = item.get(field)
        if value is None and type(item.get("actions")) is list:
            # Newer computer calls have several actions.
            value = {"actions": item["actions"]}
        if type(value) not in (dict, str, type(None)):
            if item["type"] != "tool_search_call":
                raise wrong_type(value, f"{path}.{field}", "an object")
            # A tool search may come from any provider, so any JSON is accepted.
            value = {field: value}
        call_id, id = _optional(item, "call_id", path), item.get("id") or ""
        if name == "tool_search" and not call_id:
            id = id or f"tool_search_{len(self._names)}"
            self._searches.append(id)
        if type(value) is str:
            arguments = value if value.lstrip()[:1] == "{" else arguments_of_text(value)
        else:
            arguments = encode(arguments_within(item["type"], value or {})).decode()
        self._call(call_id or id, name, arguments)
        # The output of a local_shell call may name the id of the call's item instead of call_id.
        if id:
            self._names[id] = name

    def _output(self, item: Item, path: str) -> None:
        call_id = self._called(item, path)
        content = self._result(item, path)
        last = self.messages[-1] if self.messages else {}
        if call_id in self._names and (last["role"] == "tool" or "tool_calls" in last):
            self.messages.append({"role": "tool", "content": content, "tool_call_id": call_id})
            return
        # Many templates refuse a result that does not follow its call.
        name = self._names.get(call_id) or item.get("name") or "a tool call"
        head = f"Result of {name}:\n"
        shown = head + content if type(content) is str else [_text(head), *content]
        self.messages.append({"role": "user", "content": shown})

    def _called(self, item: Item, path: str) -> str:
        """Return the id of the call to which an output belongs."""
        if call_id := _optional(item, "call_id", path):
            return call_id
        id: str = item.get("id") or ""
        if item["type"] == "tool_search_output" and id not in self._names and self._searches:
            return self._searches.popleft()
        return id

    def _result(self, item: Item, path: str) -> str | list[Item]:
        kind, value = item["type"], item.get("output", item.get("result"))
        if kind in ("function_call_output", "custom_tool_call_output"):
            if value is None:
                raise missing(f"{path}.output")
            return self._content(value, path, "output", _image_of)
        if kind == "shell_call_output" and type(value) is list:
            return "\n".join(_shell_text(chunk) for chunk in value if type(chunk) is dict)
        text = carried_text(value)
        if text is None and item.get("tools"):
            text = encode(item["tools"]).decode()
        if text is None and type(value) is dict:
            self.skipped.append(f"{path}.output")
        if text is None and type(item.get("status")) is str:
            text = item["status"]
        return text or ""

    def _run_elsewhere(self, item: Item, path: str) -> None:
        """Add the call and the result of a provider's tool; skip an item without a result."""
        kind = item["type"]
        field, result = _RUN_ELSEWHERE[kind]
        text = carried_text(item.get(result)) or carried_text(item.get("error"))
        if text is None and kind == "code_interpreter_call" and item.get("code"):
            text = "The output was not kept."
        if text is None:
            self.skipped.append(path)
            return
        name, value = item.get("name"), item.get(field)
        arguments = value if type(value) is str and field == "arguments" else None
        id = item.get("id") or kind
        tool = name if type(name) is str else kind.removesuffix("_call")
        self._call(id, tool, arguments or encode({field: value}).decode())
        self.messages.append({"role": "tool", "content": text, "tool_call_id": id})

    def _reasoning(self, item: Item, path: str) -> None:
        texts: list[str] = []
        for name in ("content", "summary"):
            parts = item.get(name) or []
            if type(parts) is not list:
                raise wrong_type(parts, f"{path}.{name}", "an array")
            found = [part_text(part, f"{path}.{name}[{i}]") for i, part in enumerate(parts)]
            texts.append("".join(without_progress(text) for text in found if text))
        if text := texts[0] or texts[1]:
            message = self._new_assistant()
            message["reasoning_content"] = message["reasoning"] = text
        elif item.get("encrypted_content"):
            self.skipped.append(path)

    def _other(self, item: Item, path: str) -> None:
        """Add the text of an item of any other type as a user message."""
        if item["type"] == "additional_tools" and item.get("tools"):
            # The tools in this item are offered to the model, so no message shows them.
            return
        text = summary_of(item) if item["type"] == COMPACTION else carried_text(item)
        if text is None:
            self.skipped.append(path)
            return
        self.messages.append({"role": "user", "content": text})

    def _open_assistant(self) -> Message:
        """Return the last message if the assistant wrote it, otherwise a new message."""
        if self.messages and self.messages[-1]["role"] == "assistant":
            return self.messages[-1]
        return self._new_assistant()

    def _new_assistant(self) -> Message:
        self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]


def arguments_within(kind: str, given: Item) -> Item:
    """Return a call's arguments as the model writes them: without nulls or a shell's `type`."""
    is_needless = kind in ("local_shell_call", "shell_call")
    return {
        name: value
        for name, value in given.items()
        if value is not None and not (is_needless and name == "type")
    }


def _shell_text(chunk: Item) -> str:
    """Return a command's output. If the command failed or timed out, the last line says so."""
    texts = [text for name in ("stdout", "stderr") if type(text := chunk.get(name)) is str and text]
    outcome = chunk.get("outcome")
    if type(outcome) is dict and outcome.get("type") == "timeout":
        texts.append("The command timed out.")
    elif type(outcome) is dict and outcome.get("exit_code"):
        texts.append(f"Exit code {outcome['exit_code']}.")
    return "\n".join(texts)


def _image_of(part: Any, path: str) -> Item | None:
    """Return the image in a part, with its address; None if the part has no image.

    Also return None for an image that has only a `file_id`: another provider stores the file.
    """
    if type(part) is not dict or part.get("type") != _IMAGE:
        return None
    if part.get("image_url") is None and part.get("file_id") is not None:
        return None
    place = path.partition("[")[0] if path.startswith(PAST) else path
    return image_part(_string(part, "image_url", place), place)


def _no_image(part: Any, path: str) -> None:
    return None


def _text(text: str) -> Item:
    return {"type": "text", "text": text}


def _string(value: Item, name: str, path: str) -> str:
    return str(required(value, name, path, String()))


def _optional(value: Item, name: str, path: str) -> str | None:
    return None if value.get(name) is None else _string(value, name, path)
