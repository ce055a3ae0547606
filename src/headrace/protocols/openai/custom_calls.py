"""Turns function calls back into calls of the tools that the functions represent."""

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from headrace.protocols.blocks import Block
from headrace.protocols.fields.tools import arguments_of
from headrace.protocols.openai.response_items import item_id
from headrace_common.answer import ChannelText, call_deltas, call_id, runs

_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_UNIT = "[0-9a-f]{2}"
_WHOLE = re.compile(
    rf"""(?:[^"\\]|\\(?:["\\/bfnrt]|u(?!d[89a-f]){_UNIT}{_UNIT}|ud[89ab]{_UNIT}\\ud[c-f]{_UNIT}"""
    # This alternative matches half of a surrogate pair if the other half is missing for certain.
    rf"""|ud[89a-f]{_UNIT}(?=[^\\]|\\[^u]|\\u[^d]|\\ud[^c-f])))*+""",
    re.IGNORECASE,
)
"""Matches characters of a JSON string, but no incomplete escape or surrogate pair."""

_ACTIONS = {"local_shell": "action", "shell": "action", "apply_patch": "operation"}
Delta = dict[str, Any]


class InputText:
    """Extracts the text of `input` from arguments that arrive in pieces."""

    def __init__(self) -> None:
        self.text = ""
        self._all: list[str] = []
        self._left = ""
        self._is_open = self._is_closed = False

    def feed(self, piece: str) -> str:
        """Return the text that a piece of the arguments adds."""
        # The arguments are JSON such as {"input": "…"}, and a piece may end within an escape. Skip
        # the head, then decode only whole characters; the remainder waits for the next piece.
        self._all.append(piece)
        if self._is_closed:
            return ""
        self._left += piece
        if not self._is_open:
            head = _HEAD.match(self._left)
            if head is None:
                return ""
            self._is_open, self._left = True, self._left[head.end() :]
        found = _WHOLE.match(self._left)
        assert found is not None, "the pattern also matches an empty text"
        self._left = self._left[found.end() :]
        self._is_closed = self._left[:1] == '"'
        text: str = json.loads(f'"{found[0]}"', strict=False)
        return self._say(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))

    def end(self) -> str:
        """Return the remaining text at the end of the arguments.

        If the arguments are not an object with one string `input`, return the arguments unchanged.
        """
        if self._is_open:
            return ""
        whole = "".join(self._all)
        arguments = arguments_of(whole)
        text = arguments.get("input")
        if type(text) is not str:
            text = "" if whole.strip() in ("", "{}") else whole
        return self._say(text)

    def _say(self, text: str) -> str:
        self.text += text
        return text


class CallDeltas:
    """Formats the tool calls of one choice of a chat as their pieces arrive, in OpenAI's format."""

    def __init__(self, place: tuple[str, int], custom: Sequence[str]) -> None:
        self._place = place
        self._custom = custom
        # The texts of custom calls, by call number.
        self._inputs: dict[int, InputText] = {}

    def add(self, pieces: Sequence[ChannelText]) -> list[Delta]:
        if not self._custom:
            return call_deltas(self._place, pieces)
        deltas: list[Delta] = []
        for run in runs(pieces):
            if run.name in self._custom:
                self._inputs[run.call] = InputText()
                head = {"index": run.call, "id": call_id(*self._place, run.call), "type": "custom"}
                deltas.append(head | {"custom": {"name": run.name, "input": ""}})
            if run.call not in self._inputs:
                deltas += call_deltas(self._place, [run])
            elif text := self._inputs[run.call].feed(run.text):
                deltas.append({"index": run.call, "custom": {"input": text}})
        return deltas

    def end(self) -> list[Delta]:
        """Return the rest of the custom calls at the end of the choice."""
        left = {call: text.end() for call, text in self._inputs.items()}
        self._inputs.clear()
        return [{"index": call, "custom": {"input": text}} for call, text in left.items() if text]

    def whole(self, pieces: Iterable[ChannelText]) -> list[Delta]:
        """Return the calls of a whole answer."""
        calls: dict[int, Delta] = {}
        for delta in [*self.add(list(pieces)), *self.end()]:
            index = delta.pop("index")
            if index not in calls:
                calls[index] = delta
                continue
            kind, field = ("custom", "input") if "custom" in delta else ("function", "arguments")
            calls[index][kind][field] += delta[kind][field]
        return list(calls.values())


class OpenCall:
    """Formats an unfinished call of a custom tool, of `apply_patch` or of a shell.

    Only the text of a custom call is sent piece by piece. All other calls have typed fields, which
    are sent once the call is complete.
    """

    def __init__(self, stream_id: str, block: Block, namespace: str, kind: str) -> None:
        self._kind, self._index = kind, block.number
        self._type = "custom_tool_call" if kind == "custom" else f"{kind}_call"
        self._named = {"name": block.name.removeprefix(f"{namespace}__")}
        self._named |= {"namespace": namespace} if namespace else {}
        self._id = item_id(stream_id, self._type, f"o{block.number}")
        self._call_id = call_id(stream_id, 0, block.call)
        self._texts: list[str] = []
        self._input = InputText()

    def added(self) -> list[Delta]:
        item = self.shown("in_progress")
        return [self._event("response.output_item.added", item=item)] if item else []

    def add(self, text: str, _: Any) -> Delta | None:
        if self._kind != "custom":
            self._texts.append(text)
        elif added := self._input.feed(text):
            return self._text_event("delta", added)
        return None

    def done(self, status: str) -> list[Delta]:
        events = []
        if self._kind == "custom":
            if rest := self._input.end():
                events.append(self._text_event("delta", rest))
            events.append(self._text_event("done", self._input.text))
        else:
            added = self.shown(status) or {}
            item = added | {"status": "in_progress"}
            events.append(self._event("response.output_item.added", item=item))
        return [*events, self._event("response.output_item.done", item=self.shown(status))]

    def shown(self, status: str) -> Delta | None:
        """Return the item so far; None until the item has the fields that clients need."""
        head = {"id": self._id, "type": self._type, "status": status, "call_id": self._call_id}
        if self._kind == "custom":
            return head | self._named | {"input": self._input.text}
        if status == "in_progress":
            return None
        arguments = arguments_of("".join(self._texts))
        return head | {_ACTIONS[self._kind]: _action(self._kind, arguments)}

    def _text_event(self, name: str, text: str) -> Delta:
        key = "delta" if name == "delta" else "input"
        place = {"item_id": self._id, "output_index": self._index}
        return {"type": f"response.custom_tool_call_input.{name}", **place, key: text}

    def _event(self, kind: str, **more: Any) -> Delta:
        return {"type": kind, "output_index": self._index} | more


def _action(kind: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that clients of a fixed tool read, even if the model left some out."""
    if kind == "apply_patch":
        operation = arguments.get("type")
        known = ("create_file", "update_file", "delete_file")
        shown = {"type": operation if operation in known else "update_file"}
        shown["path"] = str(arguments.get("path", ""))
        if operation != "delete_file":
            shown["diff"] = str(arguments.get("diff", ""))
        return shown
    if kind == "shell":
        limits = {name: arguments.get(name) for name in ("timeout_ms", "max_output_length")}
        return {"commands": _texts(arguments.get("commands"))} | limits
    rest = {name: arguments.get(name) for name in ("timeout_ms", "user", "working_directory")}
    env = arguments.get("env") if isinstance(arguments.get("env"), dict) else {}
    command = arguments.get("command")
    command = ["bash", "-lc", command] if isinstance(command, str) else _texts(command)
    return {"type": "exec", "command": command, "env": env} | rest


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [str(item) for item in value] if isinstance(value, list) else []
