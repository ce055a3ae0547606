"""POST /api/chat, as Ollama's API: read as a chat, shown as lines of JSON."""

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.protocols.dialect import ErrorFormat
from headrace.protocols.fields.common import read_known
from headrace.protocols.fields.kinds import Kind
from headrace.protocols.framing import LINES
from headrace.protocols.ollama import answers, fields
from headrace.protocols.ollama.answers import OllamaBody, OllamaFrames, as_message
from headrace.protocols.openai import chat as openai_chat
from headrace.streams.record import Record
from headrace.text.text_model import TextModel
from headrace_common.request import Prompt, Request, Route

ROUTE: Route = "/api/chat"
SUMMARY = "Answer a conversation, as Ollama's API"
ID_PREFIX = "ollamachat-"
REQUIRED: tuple[str, ...] = ("model",)
TABLE: Mapping[str, Kind] = {
    **fields.FIELDS,
    "messages": fields.ChatTurns(),
    "tools": openai_chat.TABLE["tools"],
}
KEYS = ("model", "created_at", "message", "done", "done_reason")
ERRORS: ErrorFormat = answers.ERRORS
FRAMING = LINES
IN_PROMPTS = openai_chat.IN_PROMPTS
to_prompts = openai_chat.to_prompts


def read(body: dict[str, Any]) -> dict[str, Any]:
    """The given fields as chat's, checked as far as they need no model."""
    own = read_known(TABLE, REQUIRED, body)
    if "tools" in own:
        own["tools"] = body["tools"]  # chat reads them again
    messages = own.get("messages", [])
    read_ = openai_chat.read(fields.to_chat(own, messages))
    return fields.finished(read_, own, bool(messages))


def to_request(given: dict[str, Any], prompts: tuple[Prompt, ...], model: TextModel) -> Request:
    """The request that chat would make of the same fields."""
    request = openai_chat.to_request(given, prompts, model)
    return msgspec.structs.replace(request, route=ROUTE)


def frames(record: Record) -> OllamaFrames:
    return OllamaFrames(record, as_message)


def response_body(record: Record) -> OllamaBody:
    return OllamaBody(record, as_message)
