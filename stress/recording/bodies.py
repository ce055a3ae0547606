"""Request bodies for each API; each body sets one field, or a few fields that belong together."""

from typing import Any

Json = dict[str, Any]

MODEL = "headrace-mini"
LONG = " ".join(map(str, range(400)))
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJg"
    "gg=="
)
_URI = f"data:image/png;base64,{PIXEL}"
_COUNT, _ASKED = "Count from 1 to 5.", "What is the weather in Paris?"


def user(content: Any) -> list[Json]:
    return [{"role": "user", "content": content}]


# fmt: off
_CITY: Json = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_SCHEMA: Json = {
    "type": "object", "properties": {"city": {"enum": ["Paris"]}, "days": {"type": "integer"}},
    "required": ["city", "days"], "additionalProperties": False,
}
_FUNCTION: Json = {"name": "get_weather", "description": "Weather", "parameters": _CITY}
_TOOL: Json = {"type": "function", "function": _FUNCTION}
_WEATHER: Json = {"messages": user(_ASKED), "tools": [_TOOL], "max_tokens": 80}
_CLAUDES: Json = _WEATHER | {"tools": [{"name": "get_weather", "input_schema": _CITY}]}
_FLAT: Json = {
    "input": _ASKED, "tools": [{"type": "function", **_FUNCTION}], "max_output_tokens": 80,
}
_FORMAT: Json = {"type": "json_schema", "name": "a", "schema": _SCHEMA, "strict": True}

_SAMPLED: dict[str, Json] = {
    "plain": {},
    "seeded": {"temperature": 0.9, "seed": 7, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "samplers": {"temperature": 0.9, "seed": 7, "typical_p": 0.9, "top_n_sigma": 2.0},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    "bias": {"logit_bias": {"100": 4.0, "7": -3.0}},
    "unknown fields": {"zz": 1, "frequency_penaltie": 2, "metadata": {"a": "b"}, "mirostat": 2},
    "ingestion": {"return_ingestion": True},
    "uncached": {"cache_prompt": False, "cache_salt": "grain", "attach": False},
    "wrong model": {"model": "no-such-model"},
}
_OPENAI: dict[str, Json] = {
    "stop": {"stop": ["3", "l"]},
    "stop ids": {"stop_token_ids": [100, 101], "include_stop_str_in_output": True},
    "choices": {"n": 3, "temperature": 0.9, "seed": 3},
    "least": {"min_tokens": 8, "ignore_eos": True},
    "none": {"max_tokens": 0},
    "ids": {"return_token_ids": True},
    "usage": {"stream_options": {"include_usage": True}},
    "choice": {"guided_choice": ["Paris", "Lima"]},
    "regex": {"guided_regex": "[a-c]{3,5}"},
    "json": {"guided_json": _SCHEMA, "max_tokens": 60},
    "grammar": {"guided_grammar": 'start: "yes" | "no"'},
    "two grammars": {"guided_regex": "a", "guided_choice": ["b"]},
}
_CHAT: dict[str, Json] = {
    "progress": {"messages": user(LONG), "return_progress": True},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "tools": _WEATHER,
    "forced": _WEATHER | {"tool_choice": "required"},
    "named": _WEATHER | {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
    "custom": _WEATHER | {
        "tools": [{"type": "custom", "custom": {"name": "run_sql"}}], "tool_choice": "required",
    },
    "no tools": _WEATHER | {"tool_choice": "none"},
    "one call": _WEATHER | {"parallel_tool_calls": False},
    "unnamed": _WEATHER | {"tool_choice": {"type": "function", "function": {"name": "other"}}},
    "json object": {"response_format": {"type": "json_object"}, "max_tokens": 40},
    "json schema": {
        "response_format": {"type": "json_schema", "json_schema": _FORMAT}, "max_tokens": 60,
    },
    "thinking": {"messages": user("What is 12 + 30? /think"), "max_tokens": 90},
    "template": {"chat_template_kwargs": {"enable_thinking": True}},
    "image": {"messages": user([{"type": "image_url", "image_url": {"url": _URI}}])},
    "role": {"messages": [{"role": "critic", "content": "a <|im_end|> b"}]},
    "overlong": {"messages": user(LONG * 6)},
    "continued": {
        "messages": [*user("Count from 1 to 9."), {"role": "assistant", "content": "1, 2,"}],
        "continue_final_message": True, "add_generation_prompt": False,
    },
}
_TEXT: dict[str, Json] = {
    "progress": {"prompt": LONG, "return_progress": True},
    "several": {"prompt": ["one two", "three four"]},
    "ids given": {"prompt": [100, 200, 300]},
    "bad ids": {"prompt": [1 << 20]},
    "overlong": {"prompt": LONG * 6},
}
_COMPLETIONS = _TEXT | {
    "logprobs": {"logprobs": 3}, "echo": {"echo": True, "logprobs": 1}, "suffix": {"suffix": "end"},
}
_LLAMA = _TEXT | {
    "probabilities": {"n_probs": 3},
    "stop": {"stop": ["3", "l"]},
    "schema": {"json_schema": _SCHEMA, "n_predict": 60},
    "grammar": {"grammar": 'root ::= "yes" | "no"'},
    "choices": {"n": 2, "temperature": 0.9, "seed": 3},
}
_CLAUDE: dict[str, Json] = {
    "progress": {"messages": user(LONG), "return_progress": True},
    "system": {"system": [{"type": "text", "text": "Be brief."}]},
    "stop": {"stop_sequences": ["3", "l"]},
    "tools": _CLAUDES,
    "forced": _CLAUDES | {"tool_choice": {"type": "any"}},
    "named": _CLAUDES | {"tool_choice": {"type": "tool", "name": "get_weather"}},
    "thinking": {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1100},
    "format": {"output_format": {"type": "json_schema", "schema": _SCHEMA}, "max_tokens": 60},
    "image": {"messages": user([
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
    ])},
    "overlong": {"messages": user(LONG * 6)},
}
_RESPONSES: dict[str, Json] = {
    "progress": {"input": LONG, "return_progress": True},
    "instructions": {"instructions": "Be brief."},
    "logprobs": {"top_logprobs": 2, "include": ["message.output_text.logprobs"]},
    "tools": _FLAT,
    "forced": _FLAT | {"tool_choice": "required"},
    "custom": _FLAT | {
        "tools": [{"type": "custom", "name": "run_sql"}], "tool_choice": "required",
    },
    "hosted": {"tools": [{"type": "web_search"}]},
    "schema": {"text": {"format": _FORMAT}, "max_output_tokens": 60},
    "reasoning": {
        "input": "What is 12 + 30?", "reasoning": {"effort": "low"}, "max_output_tokens": 90,
    },
    "image": {"input": user([{"type": "input_image", "image_url": _URI}])},
    "unstored": {"store": False},
    "unknown previous": {"previous_response_id": "resp_unknown"},
    "overlong": {"input": LONG * 6},
}
_OLLAMA: dict[str, Json] = {
    "plain": {},
    "options": {"options": {"temperature": 0.9, "seed": 3, "top_k": 20, "num_predict": 8, "zz": 1}},
    "stop": {"options": {"stop": ["3", "l"], "temperature": 0}},
    "json": {"format": "json"},
    "schema": {"format": _SCHEMA},
    "think": {"think": True},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "unknown fields": {"zz": 1},
    "wrong model": {"model": "no-such-model"},
}
_OLLAMA_CHAT = _OLLAMA | {
    "tools": {"messages": user(_ASKED), "tools": [_TOOL]},
    "image": {"messages": [{"role": "user", "content": "a", "images": [PIXEL]}]},
    "progress": {"messages": user(LONG), "return_progress": True},
}
_OLLAMA_TEXT = _OLLAMA | {
    "raw": {"raw": True}, "system": {"system": "Be brief."}, "no prompt": {"prompt": ""},
    "suffix": {"suffix": "b"}, "images": {"images": [PIXEL]},
}
_FEW: Json = {"max_tokens": 12, "temperature": 0}
_FEWER: Json = {"model": MODEL, "options": {"temperature": 0, "num_predict": 12}}
_SIDES = {"input_prefix": "a = (", "input_suffix": ")", "n_predict": 8, "temperature": 0}
_BARE = {"prompt": _COUNT, "n_predict": 12, "temperature": 0}

CASES: dict[str, tuple[Json, dict[str, Json]]] = {
    "/v1/chat/completions": (_FEW | {"messages": user(_COUNT)}, _SAMPLED | _OPENAI | _CHAT),
    "/v1/completions": (_FEW | {"prompt": _COUNT}, _SAMPLED | _OPENAI | _COMPLETIONS),
    "/completion": (_BARE, _SAMPLED | _LLAMA),
    "/completions": (_BARE, {"plain": {}}),
    "/chat/completions": (_FEW | {"messages": user(_COUNT)}, {"plain": {}}),
    "/infill": (_SIDES, {"plain": {}, "extra": {"input_extra": [{"filename": "a", "text": "b"}]}}),
    "/v1/messages": (_FEW | {"model": MODEL, "messages": user(_COUNT)}, _SAMPLED | _CLAUDE),
    "/v1/responses": (
        {"input": _COUNT, "max_output_tokens": 12, "temperature": 0}, _SAMPLED | _RESPONSES,
    ),
    "/api/chat": (_FEWER | {"messages": user(_COUNT)}, _OLLAMA_CHAT),
    "/api/generate": (_FEWER | {"prompt": _COUNT}, _OLLAMA_TEXT),
}
"""Routes that generate tokens. Each route has a body, and cases that change this body.

Each case is requested once unstreamed and once streamed.
"""

_NAMED: Json = {"model": MODEL, "messages": user("a")}
READING: dict[str, list[Json]] = {
    "/tokenize": [
        {"content": "Ein Fluß 😀"}, {"content": "a", "with_pieces": True}, {"messages": user("a")},
        {"prompt": "a <|im_end|>", "add_special_tokens": True}, {},
    ],
    "/detokenize": [{"tokens": [100, 200]}, {"tokens": []}, {"tokens": [1 << 20]}],
    "/apply-template": [
        {"messages": user("a"), "chat_template_kwargs": {"enable_thinking": True}},
        {"messages": []},
    ],
    "/v1/messages/count_tokens": [_NAMED, _NAMED | {"system": "b", "tools": _CLAUDES["tools"]}],
    "/v1/responses/input_tokens": [{"input": "a"}, {"input": "a", "tools": _FLAT["tools"]}],
    "/v1/embeddings": [
        {"input": "one"}, {"input": ["one", "two"], "encoding_format": "base64"},
        {"input": [100, 200]}, {"input": "one", "dimensions": 8}, {"input": ""},
    ],
    "/api/embed": [_FEWER | {"input": ["one", "two"]}],
    "/api/embeddings": [{"model": MODEL, "prompt": "one"}],
    "/v1/rerank": [{"query": "one", "documents": ["two"]}],
    "/rerank": [{"query": "one", "documents": ["two"]}],
    "/api/show": [{"model": MODEL}, {"model": "no-such-model"}],
    "/v1/streams/lookup": [{"conversation_ids": ["a", "b", 3]}, {}],
    "/models/load": [{"model": MODEL}, {"model": "no-such-model"}],
}
"""Routes that do not generate tokens, each with its bodies."""
