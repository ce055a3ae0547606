"""POST /api/generate, as Ollama's API: one question, or with `raw` or `suffix` a text to go on."""

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.protocols.dialect import ErrorFormat
from headrace.protocols.fields.common import read_known
from headrace.protocols.fields.kinds import Flag, Kind, String
from headrace.protocols.framing import LINES
from headrace.protocols.ollama import answers, fields
from headrace.protocols.ollama.answers import OllamaBody, OllamaFrames, as_response
from headrace.protocols.openai import chat as openai_chat
from headrace.protocols.openai import completions as openai_completions
from headrace.streams.record import Record
from headrace.text.text_model import TextModel
from headrace_common.errors import RequestError
from headrace_common.request import Chat, Prompt, Request, Route

ROUTE: Route = "/api/generate"
SUMMARY = "Answer a question or go on with a text, as Ollama's API"
ID_PREFIX = "ollamagen-"
REQUIRED: tuple[str, ...] = ("model",)
TABLE: Mapping[str, Kind] = {
    **fields.FIELDS,
    "prompt": String(),
    "suffix": String(),
    "system": String(),
    "images": fields.IMAGES,
    "raw": Flag(),
}
KEYS = ("model", "created_at", "response", "done", "done_reason")
ERRORS: ErrorFormat = answers.ERRORS
FRAMING = LINES
IN_PROMPTS = openai_chat.IN_PROMPTS | openai_completions.IN_PROMPTS
_CHAT_ONLY = ("system", "images", "think")


def read(body: dict[str, Any]) -> dict[str, Any]:
    """The given fields as those of chat or of completions, checked as far as they need no model."""
    own = read_known(TABLE, REQUIRED, body)
    prompt = own.get("prompt", "")
    if prompt and (own.get("raw") or own.get("suffix")):
        return fields.finished(openai_completions.read(_to_text(own)), own, True)
    asked: dict[str, Any] = {"role": "user", "content": fields.with_images(prompt, own)}
    system = {"role": "system", "content": own.get("system")}
    messages = [*[system] * bool(own.get("system")), asked] if prompt else []
    return fields.finished(openai_chat.read(fields.to_chat(own, messages)), own, bool(prompt))


def _to_text(own: Mapping[str, Any]) -> dict[str, Any]:
    for name in _CHAT_ONLY:
        if own.get(name):
            message = f"{name} belongs to a chat, and raw or suffix goes on with a text; send one."
            raise RequestError("invalid_value", message, name)
    logprobs = own.get("top_logprobs", 0) if own.get("logprobs") else None
    texts = {"prompt": own["prompt"], "suffix": own.get("suffix"), "logprobs": logprobs}
    return {"max_tokens": -1} | fields.to_common(own) | texts


def to_prompts(given: dict[str, Any]) -> tuple[Prompt, ...]:
    texts = "prompt" in given
    return openai_completions.to_prompts(given) if texts else openai_chat.to_prompts(given)


def to_request(given: dict[str, Any], prompts: tuple[Prompt, ...], model: TextModel) -> Request:
    """The request that the other route would make of the same fields."""
    is_chat = isinstance(prompts[0], Chat)
    make = openai_chat.to_request if is_chat else openai_completions.to_request
    return msgspec.structs.replace(make(given, prompts, model), route=ROUTE)


def frames(record: Record) -> OllamaFrames:
    return OllamaFrames(record, as_response)


def response_body(record: Record) -> OllamaBody:
    return OllamaBody(record, as_response)
