"""Generates message histories of clients that started a conversation with another provider.

A seed decides everything about a history. Each text that the model has to see is a word that no
other history contains; `History.texts` lists these words.
"""

import base64
import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

Json = dict[str, Any]
Maker = Callable[["HistoryBuilder"], list[Json]]

CALLER: Json = {"type": "direct"}
EPHEMERAL: Json = {"type": "ephemeral"}


class History(NamedTuple):
    """A request body, and the texts that must appear in the prompt."""

    route: str
    body: Json
    texts: tuple[str, ...]


class HistoryBuilder:
    """Generates the values of one history."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self._prefix = f"w{seed:x}"
        self._count = 0
        # Maps each text to the format in which the text is sent.
        self._texts: dict[str, str] = {}

    def word(self) -> str:
        self._count += 1
        return f"{self._prefix}n{self._count}e"

    def text(self) -> str:
        """Return a text that the model has to see."""
        word = self.word()
        self._texts[word] = word
        return self.random.choice(["{}", "Look: {}.", "{}\n\n- é 你好", '{{"a": "{}"}}']).format(
            word
        )

    def file(self) -> str:
        """Return a file with a text that the model has to see, as a data URI."""
        word = self.word()
        self._texts[word] = base64.b64encode(word.encode()).decode()
        return f"data:text/plain;base64,{self._texts[word]}"

    def forget(self) -> None:
        """Stop requiring the texts made so far: the model no longer has to see these texts."""
        self._texts.clear()

    def keep(self, items: list[Json]) -> None:
        """Stop requiring those of the earlier texts that these items do not contain."""
        sent = json.dumps(items)
        self._texts = {word: form for word, form in self._texts.items() if form in sent}

    def build(self, route: str, body: Json) -> History:
        """Return the history. `History.texts` has only texts that are used in the body."""
        sent = json.dumps(body)
        return History(
            route, body, tuple(word for word, form in self._texts.items() if form in sent)
        )

    def chance(self, odds: float = 0.5) -> bool:
        return self.random.random() < odds

    def one(self, *values: Any) -> Any:
        return self.random.choice(values)

    def maybe(self, **fields: Any) -> Json:
        """Return each field as it is, as null, or not at all."""
        kept = {name: self.one(value, None) for name, value in fields.items() if self.chance()}
        if self.chance(0.1):
            kept["x_future"] = self.one("on", 7, {"a": [1]}, None)
        return kept

    def some(self, makers: Sequence[Callable[["HistoryBuilder"], Any]], most: int = 3) -> list[Any]:
        return [self.random.choice(makers)(self) for _ in range(self.random.randint(1, most))]

    def pair(self, call: Json, output: Json) -> list[Json]:
        """Return a call and its output. Sometimes only the call or only the output is returned."""
        whole = [call, output]
        if self.chance(0.85):
            return whole
        return [self.one(*whole)]


def history(seed: int) -> History:
    """Return the history of a seed."""
    builder = HistoryBuilder(seed)
    return builder.one(_responses, _chat, _messages)(builder)


# OpenAI's responses API.


def _input_part(b: HistoryBuilder) -> Json:
    kind = b.random.randrange(6)
    if kind == 0:
        return {"type": "refusal", "refusal": b.text()}
    if kind == 1:
        return {"type": "input_file", "filename": "a.txt", "file_data": b.file()}
    if kind == 2:
        return {"type": "part_of_2027", b.one("text", "content", "output", "summary"): b.text()}
    if kind == 3:
        return b.one(
            {"type": "input_file", "file_id": "file-1"},
            {"type": "input_file", "file_url": "https://example.com/a.pdf"},
            {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
            {"type": "encrypted_content", "encrypted_content": "gAAA"},
        )
    return {"type": b.one("input_text", "output_text", "text"), "text": b.text()}


def _item_message(b: HistoryBuilder) -> list[Json]:
    role = b.one("user", "user", "assistant", "assistant", "system", "developer", "critic")
    content = b.text() if b.chance() else b.some([_input_part])
    item = {"role": role, "content": content} | b.maybe(phase="commentary")
    if b.chance():
        item |= {"type": "message"}
    return [item | ({"id": b.word(), "status": "completed"} if b.chance() else {})]


def _item_function(b: HistoryBuilder) -> list[Json]:
    call_id = f"call_{b.word()}"
    call = {"type": "function_call", "call_id": call_id, "name": "get_weather"}
    call |= {"arguments": json.dumps({"city": b.text()})} | b.maybe(
        id=f"fc_{b.word()}", status="completed", namespace="mcp__w", caller=CALLER
    )
    output: Any = b.text() if b.chance() else b.some([_input_part])
    result = {"type": "function_call_output", "call_id": call_id, "output": output}
    return b.pair(call, result | b.maybe(id=f"fco_{b.word()}", name="get_weather", status=None))


def _item_custom(b: HistoryBuilder) -> list[Json]:
    call_id = f"call_{b.word()}"
    call = {"type": "custom_tool_call", "call_id": call_id, "name": "run_sql"}
    call |= {"input": f"SELECT '{b.text()}'\n"} | b.maybe(id=f"ctc_{b.word()}", namespace="db")
    output: Any = b.text() if b.chance() else b.some([_input_part])
    return b.pair(call, {"type": "custom_tool_call_output", "call_id": call_id, "output": output})


def _item_local_shell(b: HistoryBuilder) -> list[Json]:
    id, call_id = f"lsh_{b.word()}", f"call_{b.word()}"
    action = {"type": "exec", "command": ["bash", "-lc", b.text()], "env": {}}
    action |= b.maybe(timeout_ms=1000, user="me", working_directory="/tmp")
    call = {"type": "local_shell_call", "id": id, "call_id": call_id, "status": "completed"}
    output = {"type": "local_shell_call_output", "id": b.one(id, call_id), "output": b.text()}
    return b.pair(call | {"action": action}, output | b.maybe(status="completed", call_id=call_id))


def _item_shell(b: HistoryBuilder) -> list[Json]:
    call_id = f"call_{b.word()}"
    action = {"commands": [b.text(), "ls"]} | b.maybe(timeout_ms=9, max_output_length=99)
    call = {"type": "shell_call", "call_id": call_id, "action": action}
    outcome = b.one({"type": "exit", "exit_code": 1}, {"type": "timeout"})
    chunk = {"stdout": b.text(), "stderr": b.text(), "outcome": outcome}
    result = {"type": "shell_call_output", "call_id": call_id, "output": [chunk]}
    return b.pair(call | b.maybe(caller=CALLER), result | b.maybe(max_output_length=9))


def _item_patch(b: HistoryBuilder) -> list[Json]:
    call_id = f"call_{b.word()}"
    operation = {"type": b.one("create_file", "update_file"), "path": b.text(), "diff": b.text()}
    if b.chance(0.3):
        operation = {"type": "delete_file", "path": b.text()}
    call = {"type": "apply_patch_call", "call_id": call_id, "status": "completed"}
    output = {"type": "apply_patch_call_output", "call_id": call_id, "status": "failed"}
    return b.pair(call | {"operation": operation}, output | {"output": b.text()})


def _item_program(b: HistoryBuilder) -> list[Json]:
    head = {"id": b.word(), "call_id": b.word()}
    call = head | {"type": "program", "code": b.text(), "fingerprint": "x"}
    return b.pair(
        call, head | {"type": "program_output", "result": b.text(), "status": "completed"}
    )


def _item_tool_search(b: HistoryBuilder) -> list[Json]:
    call_id = b.one(None, b.word())
    call = {"type": "tool_search_call", "call_id": call_id, "arguments": {"goal": b.text()}}
    tool = {"type": "function", "name": b.word(), "parameters": {"type": "object"}}
    tool |= {"description": "Found.", "defer_loading": True}
    found = {"type": "tool_search_output", "call_id": call_id, "tools": [tool]}
    return [call | b.maybe(execution="client"), found | b.maybe(execution="server")]


def _item_computer(b: HistoryBuilder) -> list[Json]:
    call_id = f"call_{b.word()}"
    actions = b.one(
        {"action": {"type": "type", "text": b.text()}},
        {"actions": [{"type": "type", "text": b.text()}]},
    )
    call = {"type": "computer_call", "id": b.word(), "call_id": call_id, "status": "completed"}
    shot = {"type": "computer_screenshot", "file_id": "file-2"}
    output = {"type": "computer_call_output", "call_id": call_id, "output": shot}
    return b.pair(call | actions | {"pending_safety_checks": []}, output)


def _item_hosted(b: HistoryBuilder) -> list[Json]:
    id = b.word()
    kind = b.random.randrange(6)
    if kind == 0:
        item = {"type": "mcp_call", "name": "ask", "server_label": "w", "arguments": '{"a": 1}'}
        error = {"type": "mcp_protocol_error", "code": 3, "message": b.text()}
        return [item | {"id": id} | b.one({"output": b.text(), "error": None}, {"error": error})]
    if kind == 1:
        item = {"type": "file_search_call", "queries": ["q"], "status": "completed"}
        result = {"text": b.text(), "filename": "b.md", "score": 0.5, "attributes": {"k": 1}}
        return [item | {"id": id, "results": [result]}]
    if kind == 2:
        item = {"type": "code_interpreter_call", "code": "1", "container_id": "c"}
        outputs = [{"type": "logs", "logs": b.text()}, {"type": "image", "url": "https://x/y.png"}]
        return [item | {"id": id, "outputs": outputs, "status": "completed"}]
    action = b.one(
        {
            "type": "search",
            "query": "q",
            "queries": ["q"],
            "sources": [{"type": "url", "url": "u"}],
        },
        {"type": "open_page", "url": None},
        {"type": "find_in_page", "url": "https://x", "pattern": "p"},
    )
    return [
        b.one(
            {"type": "web_search_call", "id": id, "status": "completed", "action": action},
            {"type": "code_interpreter_call", "id": id, "code": None, "outputs": None},
            {"type": "file_search_call", "id": id, "queries": ["q"], "results": None},
            {"type": "image_generation_call", "id": id, "result": "AAAA", "status": "completed"},
            {"type": "mcp_list_tools", "id": id, "server_label": "w", "tools": []},
            {"type": "mcp_approval_request", "id": id, "arguments": "{}", "name": "a"},
            {"type": "mcp_approval_response", "approval_request_id": id, "approve": True},
        )
    ]


def _item_reasoning(b: HistoryBuilder) -> list[Json]:
    item: Json = {"type": "reasoning", "id": f"rs_{b.word()}", "summary": []}
    if b.chance():
        item["summary"] = [{"type": "summary_text", "text": "Thinking."}]
    return [item | b.maybe(encrypted_content="gAAA", content=[], status="completed")]


def _item_other(b: HistoryBuilder) -> list[Json]:
    kind = b.random.randrange(4)
    if kind == 0:
        content = [{"type": "input_text", "text": b.text()}]
        content += [{"type": "encrypted_content", "encrypted_content": "gAAA"}] * b.chance()
        return [{"type": "agent_message", "author": "/a", "recipient": "/b", "content": content}]
    if kind == 1:
        field = b.one("text", "content", "output", "input", "summary")
        value = b.text()
        nested = [{"type": "text_of_2027", "text": value}]
        return [{"type": "item_of_2027", "id": b.word(), field: b.one(value, nested)}]
    if kind == 2:
        tool = {"type": "function", "name": b.word(), "parameters": {"type": "object"}}
        return [{"type": "additional_tools", "role": "developer", "tools": [tool]}]
    return [
        b.one(
            {"type": "compaction", "id": b.word(), "encrypted_content": "gAAA"},
            {"type": "context_compaction", "encrypted_content": "gAAA"},
            {"type": "compaction_trigger"},
            {"type": "item_reference", "id": f"msg_{b.word()}"},
            {"id": f"rs_{b.word()}"},
            {"type": "configuration_update", "reasoning": {"effort": "low"}},
            {"type": "ghost_snapshot", "ghost_commit": {"id": "abc", "parent": None}},
            {"type": "item_of_2028", "blob": {"a": 1}, "count": 4},
        )
    ]


_SUMMARY = "Summary of the conversation so far:\n"


def _item_summary(b: HistoryBuilder) -> list[Json]:
    """Return a summary that replaces no items: it is another client's, or unreadable."""
    text = f"Another language model began this task. Its summary: {b.text()}"
    return [
        b.one(
            {"type": "message", "role": "user", "content": text},
            {"type": "message", "role": "assistant", "content": text},
            {"type": "compaction_summary", "id": b.word(), "encrypted_content": "gAAA"},
            {"type": "compaction_summary", "summary": [{"type": "summary_text", "text": text}]},
        )
    ]


def _compacted(b: HistoryBuilder, items: list[Json]) -> list[Json]:
    """Return the items, followed by a summary that replaces most of them.

    The model still sees instructions and the user's messages.
    """
    b.keep([it for it in items if it.get("role") in ("user", "system", "developer")])
    text = _SUMMARY * b.chance() + f"The story: {b.text()}"
    carried = b.one(
        {"encrypted_content": text}, {"summary": [{"type": "summary_text", "text": text}]}
    )
    item = {"type": "compaction", "id": f"cmp_{b.word()}"} | carried
    said = {"type": "message", "role": "assistant", "content": text}
    return [*items, *([said] if b.chance() else []), item]


_ITEMS: list[Maker] = [
    *(_item_message, _item_message, _item_summary, _item_function, _item_custom, _item_local_shell),
    *(_item_shell, _item_patch, _item_program, _item_tool_search, _item_computer),
    *(_item_hosted, _item_reasoning, _item_other),
]


def _responses(b: HistoryBuilder) -> History:
    items = [item for made in b.some(_ITEMS, 12) for item in made]
    # Parallel calls come first, and the outputs follow after the last call.
    if b.chance(0.2):
        items.sort(key=lambda item: "output" in str(item.get("type")))
    if b.chance(0.2):
        items = _compacted(b, items)
        items += [item for made in b.some(_ITEMS) for item in made]
    items.append({"role": "user", "content": b.text()})
    tools = b.some([_tool_of_responses]) if b.chance() else []
    body = {"input": items, "tools": tools, "instructions": b.text(), "max_output_tokens": 1}
    body |= b.maybe(store=False)
    if b.chance(0.2):
        limit = {"type": "compaction"} | b.maybe(compact_threshold=b.one(200, 100_000))
        body |= {"context_management": b.one([limit], [], None)}
    return b.build("/v1/responses", body)


def _tool_of_responses(b: HistoryBuilder) -> Json:
    name = f"tool_{b.word()}"
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
    tools: list[Json] = [
        {"type": "function", "name": name, "parameters": {"type": "object"}, "strict": False},
        {"type": "custom", "name": name, "format": grammar},
        {"type": "namespace", "name": name, "description": "", "tools": []},
        {"type": "mcp", "server_label": "w", "server_url": "https://x"},
        {"type": "code_interpreter", "container": {"type": "auto"}},
    ]
    hosted = ("web_search", "file_search", "image_generation", "tool_search", "tool_of_2027")
    return b.one(*tools, *({"type": kind} for kind in hosted))


# OpenAI's chat API.


def _chat_part(b: HistoryBuilder) -> Json:
    kind = b.random.randrange(6)
    if kind == 0:
        return {"type": "refusal", "refusal": b.text()}
    if kind == 1:
        return {"type": "file", "file": {"filename": "a.md", "file_data": b.file()}}
    if kind == 2:
        return {"type": "part_of_2027", b.one("text", "content", "output", "summary"): b.text()}
    if kind == 3:
        return b.one(
            {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
            {"type": "file", "file": {"file_id": "file-1"}},
            {"type": "redacted_thinking", "data": "AAAA"},
        )
    return {"type": "text", "text": b.text()} | b.maybe(cache_control=EPHEMERAL)


def _chat_content(b: HistoryBuilder) -> Any:
    return b.text() if b.chance() else b.some([_chat_part])


def _chat_message(b: HistoryBuilder) -> list[Json]:
    role = b.one("user", "user", "assistant", "assistant", "system", "developer", "critic")
    message: Json = {"role": role, "content": _chat_content(b)} | b.maybe(name="ann")
    if role == "assistant":
        message |= b.maybe(refusal=None, audio={"id": "audio_1"}, reasoning_content="Thinking.")
    return [message]


def _chat_refusal(b: HistoryBuilder) -> list[Json]:
    return [{"role": "assistant", "content": None, "refusal": b.text()}]


def _chat_calls(b: HistoryBuilder) -> list[Json]:
    calls: list[Json] = []
    results: list[Json] = []
    for _ in range(b.random.randint(1, 3)):
        id = f"call_{b.word()}"
        call: Json = {"id": id, "type": "function"}
        call["function"] = {"name": "get_weather", "arguments": json.dumps({"city": b.text()})}
        if b.chance(0.4):
            call = {"id": id, "type": "custom", "custom": {"name": "sql", "input": b.text()}}
        result = {"role": "tool", "tool_call_id": id, "content": _chat_content(b)}
        kept = b.pair(call, result)
        calls += [it for it in kept if it is call]
        results += [it for it in kept if it is result]
    if b.chance(0.1):
        calls.append({"id": "call_9", "type": "call_of_2027", "call_of_2027": {"blob": 1}})
    if not calls:
        return results
    content = b.one(None, "", b.text())
    return [{"role": "assistant", "content": content, "tool_calls": calls}, *results]


def _chat_old_call(b: HistoryBuilder) -> list[Json]:
    call = {"name": "get_weather", "arguments": json.dumps({"city": b.text()})}
    asked = {"role": "assistant", "content": None, "function_call": call}
    return b.pair(asked, {"role": "function", "name": "get_weather", "content": b.text()})


def _chat(b: HistoryBuilder) -> History:
    makers: list[Maker] = [_chat_message, _chat_message, _chat_refusal, _chat_calls, _chat_old_call]
    messages = [message for made in b.some(makers, 10) for message in made]
    messages.append({"role": "user", "content": b.text()})
    tools: list[Json] = []
    if b.chance():
        tools = b.one(
            [{"type": "custom", "custom": {"name": "sql", "format": {"type": "text"}}}],
            [{"type": "function", "function": {"name": "get_weather"}}, {"type": "web_search"}],
            [{"type": "tool_of_2027", "name": "x"}],
        )
    body = {"messages": messages, "tools": tools, "max_tokens": 1}
    return b.build("/v1/chat/completions", body)


# Anthropic's messages API.


def _block(b: HistoryBuilder) -> Json:
    kind = b.random.randrange(9)
    cached = b.maybe(cache_control=EPHEMERAL)
    source: Json = {"type": "text", "media_type": "text/plain", "data": "x"}
    if kind == 0:
        source["data"] = b.text()
    elif kind == 1:
        source = {"type": "content", "content": [{"type": "text", "text": b.text()}]}
    if kind < 2:
        return {"type": "document", "source": source, "title": b.text()} | cached
    if kind == 2:
        found = {"type": "search_result", "source": "https://x", "title": b.text()}
        return found | {"content": [{"type": "text", "text": b.text()}], **cached}
    if kind == 3:
        field = b.one("text", "content", "output", "summary", "input")
        return {"type": "block_of_2027", field: b.text()}
    if kind == 4:
        return b.one(
            {"type": "document", "source": {"type": "url", "url": "https://x/a.pdf"}},
            {"type": "document", "source": {"type": "file", "file_id": "f"}},
            {"type": "image", "source": {"type": "file", "file_id": "f"}},
            {"type": "container_upload", "file_id": "f"},
            {"type": "redacted_thinking", "data": "AAAA"},
            {"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}},
            {"type": "mcp_tool_listing", "mcp_server_name": "w", "tools": []},
            {"type": "block_of_2028", "blob": {"a": 1}},
        )
    return {"type": "text", "text": b.text()} | cached


def _turn(b: HistoryBuilder) -> list[Json]:
    role = b.one("user", "user", "assistant", "system", "critic")
    return [{"role": role, "content": b.text() if b.chance() else b.some([_block])}]


def _turn_tools(b: HistoryBuilder) -> list[Json]:
    calls, results = list[Json](), list[Json]()
    for _ in range(b.random.randint(1, 3)):
        id = f"toolu_{b.word()}"
        name = b.one("bash", "str_replace_based_edit_tool", "memory", "computer", "get_weather")
        call = {"type": "tool_use", "id": id, "name": name, "input": {"command": b.text()}}
        call |= b.maybe(caller=CALLER)
        content = b.text() if b.chance() else [*b.some([_block])]
        result = {"type": "tool_result", "tool_use_id": id, "content": content}
        result |= {"is_error": True} if b.chance(0.2) else {}
        kept = b.pair(call, result)
        calls += [it for it in kept if it is call]
        results += [it for it in kept if it is result]
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "AAAA"}
    asked: list[Json] = [thought] * b.chance(0.3) + calls
    answers = [*results, *b.some([_block])] if b.chance() else results
    turns = [{"role": "assistant", "content": asked}, {"role": "user", "content": answers}]
    return [turn for turn in turns if turn["content"]]


def _turn_hosted(b: HistoryBuilder) -> list[Json]:
    """Return a turn in which the provider itself executed a tool."""
    id, kind = f"srvtoolu_{b.word()}", b.random.randrange(6)
    document = {"type": "document", "source": {"type": "text", "data": "x"}}
    if kind == 0:
        name, page = "web_search", {"type": "web_search_result", "encrypted_content": "A"}
        content: Any = [page | {"title": b.text(), "url": "https://x", "page_age": None}]
    elif kind == 1:
        name, document["source"]["data"] = "web_fetch", b.text()  # type: ignore[index]
        content = {"type": "web_fetch_result", "url": "https://x", "content": document}
    elif kind == 2:
        name, content = "bash_code_execution", {"type": "bash_code_execution_result"}
        content |= {"stdout": b.text(), "stderr": b.text(), "return_code": 0, "content": []}
    elif kind == 3:
        name, content = "code_execution", {"type": "code_execution_tool_result_error"}
        content |= {"error_code": "unavailable"}
    elif kind == 4:
        name, content = "text_editor_code_execution", {"file_type": "text", "content": b.text()}
        content |= {"type": "text_editor_code_execution_view_result", "num_lines": 1}
    else:
        name, content = "advisor", {"type": "advisor_result", "text": b.text()}
    call = {"type": "server_tool_use", "id": id, "name": name, "input": {"q": "x"}}
    result = {"type": f"{name}_tool_result", "tool_use_id": id, "content": content}
    if b.chance(0.2):
        call = {"type": "mcp_tool_use", "id": id, "name": "ask", "server_name": "w", "input": {}}
        result["type"] = "mcp_tool_result"
    return [{"role": "assistant", "content": [*b.pair(call, result), _block(b)]}]


def _turn_compacted(b: HistoryBuilder) -> list[Json]:
    # A summary replaces all earlier turns.
    b.forget()
    block = {"type": "compaction", "content": b.text()} | b.maybe(signature="A")
    return [{"role": "assistant", "content": [block, _block(b)]}]


def _messages(b: HistoryBuilder) -> History:
    makers: list[Maker] = [
        _turn,
        _turn,
        _turn,
        _turn_tools,
        _turn_tools,
        _turn_hosted,
        _turn_hosted,
    ]
    turns = [turn for made in b.some([*makers, _turn_compacted], 8) for turn in made]
    turns.append({"role": "user", "content": b.text()})
    system = b.text() if b.chance() else [{"type": "text", "text": b.text()}]
    tools: list[Json] = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
        {"type": "memory_20250818", "name": "memory"},
        {"type": "web_search_20260209", "name": "web_search", "max_uses": 3},
        {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
        {"type": "tool_of_2027", "name": "x"},
        {"name": "get_weather", "input_schema": {"type": "object"}, "defer_loading": True},
    ]
    tools = b.random.sample(tools, b.random.randint(0, 4))
    body = {"model": "headrace-mini", "messages": turns, "system": system, "tools": tools}
    return b.build("/v1/messages", body | {"max_tokens": 1})
