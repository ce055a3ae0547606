"""POST /v1/chat/completions: from a body to a Request."""

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.core.errors import RequestError
from headrace.core.request import Chat, Request, Route
from headrace.gateway import resolve
from headrace.gateway.common_fields import COMMON, read_common
from headrace.gateway.fields import Flag, Integer, Kind, Object, String
from headrace.gateway.messages import Messages
from headrace.generation.served import ServedModel

ROUTE: Route = "/v1/chat/completions"
TEMPLATE: Mapping[str, Kind] = {
    "messages": Messages(),
    "add_generation_prompt": Flag(),
    "continue_final_message": Flag(),
    "chat_template_kwargs": Object(),
    "reasoning_effort": String(),
}
TABLE: Mapping[str, Kind] = {
    **TEMPLATE,
    **COMMON,
    "logprobs": Flag(),
    "top_logprobs": Integer(0, 20),
}
_NOT_REPLACEABLE = ("messages", "tools", "add_generation_prompt")


def read(body: dict[str, Any]) -> dict[str, Any]:
    """The given fields, checked as far as they need no model."""
    fields = read_common(TABLE, "messages", body)
    check_template_fields(fields)
    if fields.get("top_logprobs") and not fields.get("logprobs"):
        message = "top_logprobs needs logprobs: true; send both, or neither."
        raise RequestError("invalid_value", message, "top_logprobs")
    return fields


def to_request(fields: dict[str, Any], model: ServedModel) -> Request:
    """The request, by the model's limits and with its defaults."""
    request = resolve.to_request(ROUTE, (to_chat(fields),), fields, model)
    num_logprobs = fields.get("top_logprobs", 0) if fields.get("logprobs") else None
    sampling = msgspec.structs.replace(request.sampling, num_logprobs=num_logprobs)
    return msgspec.structs.replace(request, sampling=sampling)


def to_chat(fields: dict[str, Any]) -> Chat:
    effort = {k: fields[k] for k in ("reasoning_effort",) if k in fields}
    continues = fields.get("continue_final_message", False)
    return Chat(
        messages=fields["messages"],
        template_kwargs=effort | fields.get("chat_template_kwargs", {}),
        add_generation_prompt=fields.get("add_generation_prompt", not continues),
        continue_final_message=continues,
    )


def check_template_fields(fields: dict[str, Any]) -> None:
    for name in _NOT_REPLACEABLE:
        if name in fields.get("chat_template_kwargs", {}):
            path = f"chat_template_kwargs.{name}"
            raise RequestError("invalid_value", f"{path} cannot be replaced; leave it out.", path)
    if not fields.get("continue_final_message"):
        return
    if fields.get("add_generation_prompt"):
        message = "continue_final_message and add_generation_prompt exclude each other; send one."
        raise RequestError("invalid_value", message, "continue_final_message")
    role = fields["messages"][-1]["role"]
    if role != "assistant":
        raise RequestError(
            "invalid_value",
            f"continue_final_message needs a last message by the assistant; it is by the {role}.",
            "continue_final_message",
        )
