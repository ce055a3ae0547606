"""Writes conversations of Anthropic's clients as chat messages, and accepts unknown blocks.

If another server made a block, the model sees the block's text. The path of a block without
text is reported in the header X-Headrace-Ignored.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from headrace.protocols.anthropic.blocks import (
    CONTENT,
    Content,
    Part,
    PlacedBlock,
    content_of,
    parts_of,
    placed,
    skip,
)
from headrace.protocols.fields.kinds import (
    Flag,
    Object,
    String,
    check_count,
    check_object,
    items_of,
    missing,
    required,
)
from headrace.protocols.fields.messages import MAX_MESSAGES
from headrace.protocols.fields.tools import flat_name
from headrace.protocols.progress_text import without_progress
from headrace.text.merging import merge_turns
from headrace_common.errors import RequestError

# The maximum number of calls in one message.
_MAX_CALLS = 128
_NAME = String(1)
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_SUMMARY = "Summary of the conversation so far:\n"


class SystemPrompt(msgspec.Struct, frozen=True):
    """Reads a string or blocks as one system message; returns no message for an empty text."""

    def check(self, value: Any, path: str) -> "ReadTurns":
        skipped: list[str] = []
        parts = [part for block in placed(value, path) for part in parts_of(block, skipped)]
        text = "".join(part for part in parts if isinstance(part, str))
        skipped += [part.path for part in parts if not isinstance(part, str)]
        return ReadTurns([{"role": "system", "content": text}] if text else [], tuple(skipped))

    def schema(self) -> dict[str, Any]:
        return CONTENT


class ReadTurns(msgspec.Struct, frozen=True):
    """Messages as the chat template sees them, and the paths of the blocks that were skipped."""

    messages: list[dict[str, Any]] = []
    skipped: tuple[str, ...] = ()


class Turns(msgspec.Struct, frozen=True):
    """Reads the field `messages`."""

    def check(self, value: Any, path: str) -> ReadTurns:
        written = _Written(items_of(value, path, 1, MAX_MESSAGES))
        messages = written.messages
        if not messages and not written.skipped:
            message = f"{path} has no message with content; send at least one."
            raise RequestError("invalid_value", message, path)
        # A history whose blocks are all unknown to this server is accepted as an empty message.
        messages = messages or [{"role": "user", "content": ""}]
        return ReadTurns(merge_turns(messages, "\n"), tuple(written.skipped))

    def schema(self) -> dict[str, Any]:
        turn = {
            "type": "object",
            "properties": {"role": {"type": "string"}, "content": CONTENT},
            "required": ["role", "content"],
        }
        return {"type": "array", "items": turn, "minItems": 1, "maxItems": MAX_MESSAGES}


class _Written:
    """Writes the messages of a conversation one by one."""

    def __init__(self, turns: list[tuple[Any, str]]) -> None:
        self.messages: list[dict[str, Any]] = []
        self.skipped: list[str] = []
        # Maps the ids of calls to the names of the called tools.
        self._names: dict[str, str] = {}
        self._answered = set(_answered(turns))
        last_user = max((i for i, (it, _) in enumerate(turns) if _role_of(it) == "user"), default=0)
        for i, (turn, path) in enumerate(turns):
            self._add(turn, path, is_cleared=i < last_user)

    def _add(self, turn: Any, path: str, is_cleared: bool) -> None:
        """Write one message; `is_cleared` means that a user message follows later.

        If `is_cleared`, a system message with clear_at next_user_message is left out.
        """
        check_object(turn, path)
        sent_role = required(turn, "role", path, String())
        role = _ROLES.get(sent_role, "user")
        if sent_role not in _ROLES:
            skip(f"{path}.role", self.skipped)
        content = turn.get("content")
        if content is None and role == "user":
            raise missing(f"{path}.content")
        if role == "system" and is_cleared and turn.get("clear_at") == "next_user_message":
            return
        blocks = placed([] if content is None else content, f"{path}.content")
        if role == "assistant":
            self._check_calls(blocks, path)
        self._write(role, blocks)

    def _write(self, role: str, blocks: list[PlacedBlock]) -> None:
        """Write the blocks of one message; each tool result becomes a separate message."""
        has_written = False
        open_turn = _OpenTurn(role)
        for block in blocks:
            kind = block.kind
            if kind == "compaction":
                if self._compact(block):
                    open_turn, has_written = _OpenTurn(role), True
            elif kind == "tool_result" or (
                kind.endswith("_tool_result") and _is_id(block.value.get("tool_use_id"))
            ):
                self.messages += [*open_turn.messages(), self._result(block)]
                open_turn, has_written = _OpenTurn(role), True
            elif kind in ("tool_use", "server_tool_use", "mcp_tool_use") and role == "assistant":
                call_id = block.value.get("id")
                if kind == "tool_use" or (_is_id(call_id) and call_id in self._answered):
                    open_turn.calls.append(self._call(block))
                else:
                    # The provider that ran this call was interrupted, so the call has no result.
                    skip(block.path, self.skipped)
            elif kind == "thinking" and role == "assistant":
                open_turn.thoughts += self._thoughts(block)
            else:
                open_turn.parts += parts_of(block, self.skipped)
        may_be_empty = not has_written and role != "system"
        self.messages += open_turn.messages(may_be_empty)

    def _check_calls(self, blocks: list[PlacedBlock], path: str) -> None:
        num_calls = sum(block.kind == "tool_use" for block in blocks)
        if num_calls > _MAX_CALLS:
            check_count(num_calls, f"{path}.content", 0, _MAX_CALLS)

    def _thoughts(self, block: PlacedBlock) -> str:
        thoughts = block.value.get("thinking")
        if not thoughts:
            skip(block.path, self.skipped)
            return ""
        return without_progress(String().check(thoughts, f"{block.path}.thinking"))

    def _compact(self, block: PlacedBlock) -> bool:
        """Replace all earlier messages with the summary; return False if the summary is empty."""
        summary = parts_of(block, self.skipped)
        if not summary:
            return False
        self.messages[:] = [{"role": "user", "content": content_of([_SUMMARY, *summary])}]
        self._names.clear()
        return True

    def _call(self, block: PlacedBlock) -> dict[str, Any]:
        call, path = block.value, block.path
        call_id, name = required(call, "id", path, _NAME), required(call, "name", path, _NAME)
        if call.get("toolset_name") is not None:
            name = flat_name(required(call, "toolset_name", path, String()), name)
        self._names[call_id] = name
        arguments = call.get("input")
        arguments = {} if arguments is None else Object().check(arguments, f"{path}.input")
        function = {"name": name, "arguments": arguments}
        return {"id": call_id, "type": "function", "function": function}

    def _result(self, block: PlacedBlock) -> dict[str, Any]:
        call_id = required(block.value, "tool_use_id", block.path, _NAME)
        content = block.value.get("content")
        inner = placed([] if content is None else content, f"{block.path}.content")
        result = content_of([part for each in inner for part in parts_of(each, self.skipped)])
        is_error = block.value.get("is_error")
        if is_error is not None and Flag().check(is_error, f"{block.path}.is_error"):
            # Templates have no field for errors, so the text says that this is an error.
            text = result if isinstance(result, str) else ""
            has_said = text.lower().startswith("error")
            result = result if has_said else _prefixed("Error: ", result)
        name = self._names.get(call_id)
        if name is None:
            # Many templates refuse a result without its call.
            return {"role": "user", "content": _prefixed(f"Result of {call_id}:\n", result)}
        return {"role": "tool", "tool_call_id": call_id, "content": result, "name": name}


class _OpenTurn:
    """Collects the blocks of a message until the message is written."""

    def __init__(self, role: str) -> None:
        self._role = role
        self.parts: list[Part] = []
        self.thoughts = ""
        self.calls: list[dict[str, Any]] = []

    def messages(self, may_be_empty: bool = False) -> Iterator[dict[str, Any]]:
        """Yield the message. An empty message is only yielded if `may_be_empty` is true."""
        message: dict[str, Any] = {"role": self._role, "content": content_of(self.parts)}
        if self.thoughts:
            # The template decides which reasoning the model sees.
            message["reasoning_content"] = self.thoughts
        if self.calls:
            message["tool_calls"] = self.calls
        if may_be_empty or message["content"] or len(message) > 2:
            yield message


def _prefixed(prefix: str, content: Content) -> Content:
    if isinstance(content, str):
        return prefix + content
    return [{"type": "text", "text": prefix}, *content]


def _is_id(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _role_of(turn: Any) -> Any:
    return turn.get("role") if isinstance(turn, dict) else None


def _answered(turns: list[tuple[Any, str]]) -> Iterator[str]:
    """Yield the ids of the calls that have a result in the conversation."""
    for turn, _ in turns:
        content = turn.get("content") if isinstance(turn, dict) else None
        for block in content if isinstance(content, list) else ():
            call_id = block.get("tool_use_id") if isinstance(block, dict) else None
            if isinstance(call_id, str):
                yield call_id
