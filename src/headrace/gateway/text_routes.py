"""The routes that turn text into ids and back without generating; all work is in threads."""

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from headrace.core.errors import RequestError
from headrace.core.request import Prompt, Text
from headrace.gateway.answers import answer
from headrace.gateway.bodies import read_json
from headrace.gateway.chat_schema import TEMPLATE, check_template_fields, to_chat
from headrace.gateway.common_fields import TokenIds
from headrace.gateway.fields import Flag, Kind, String, missing, read_fields
from headrace.gateway.resolve import check_token_ids
from headrace.generation.generation import Generation
from headrace.generation.served import ServedModel

_MODEL: Mapping[str, Kind] = {"model": String(least=1)}
_SOURCES = ("content", "prompt", "messages")

APPLY_TEMPLATE: Mapping[str, Kind] = {**TEMPLATE, **_MODEL}
DETOKENIZE: Mapping[str, Kind] = {"tokens": TokenIds(), **_MODEL}
TOKENIZE: Mapping[str, Kind] = {
    "content": String(),
    "add_special": Flag(),
    "parse_special": Flag(),
    "with_pieces": Flag(),
    "prompt": String(),
    "add_special_tokens": Flag(),
    "return_token_strs": Flag(),
    **TEMPLATE,
    **_MODEL,
}


class TextRoutes:
    def __init__(self, generation: Generation, max_body_bytes: int) -> None:
        self._generation = generation
        self._max_body_bytes = max_body_bytes

    async def tokenize(self, request: Request) -> ASGIApp:
        fields, model = await self._read(request, TOKENIZE)
        given = [name for name in _SOURCES if name in fields]
        if len(given) != 1:
            message = f"Send exactly one of {', '.join(_SOURCES)}; {len(given)} were sent."
            code = "invalid_value" if given else "missing_required_parameter"
            raise RequestError(code, message, given[1] if given else "content")
        if not fields.get("parse_special", True):
            message = "parse_special: false is not supported here; leave it out."
            raise RequestError("unsupported_parameter", message, "parse_special")
        token_ids = await self._generation.admission.encode(model, _to_prompt(fields))
        return answer(await asyncio.to_thread(_listed, list(token_ids), fields, model))

    async def detokenize(self, request: Request) -> ASGIApp:
        fields, model = await self._read(request, DETOKENIZE, "tokens")
        check_token_ids(fields["tokens"], "tokens", model.vocab_size)
        text = await asyncio.to_thread(model.tokenizer.decode, fields["tokens"], False)
        return answer({"content": text, "prompt": text})

    async def apply_template(self, request: Request) -> ASGIApp:
        fields, model = await self._read(request, APPLY_TEMPLATE, "messages")
        check_template_fields(fields)
        text = await self._generation.admission.render(model, to_chat(fields))
        return answer({"prompt": text})

    async def _read(
        self, request: Request, table: Mapping[str, Kind], required: str | None = None
    ) -> tuple[dict[str, Any], ServedModel]:
        body = await read_json(request.headers, request.receive, self._max_body_bytes)
        if required and body.get(required) is None:
            raise missing(required)
        fields = read_fields(table, body)
        return fields, self._generation.models.get(fields.get("model"))


def _to_prompt(fields: dict[str, Any]) -> Prompt:
    if "content" in fields:
        return Text(fields["content"], fields.get("add_special", False))
    if "prompt" in fields:
        return Text(fields["prompt"], fields.get("add_special_tokens", True))
    check_template_fields(fields)
    return to_chat(fields)


def _listed(token_ids: list[int], fields: dict[str, Any], model: ServedModel) -> dict[str, Any]:
    tokens: list[Any] = token_ids
    if fields.get("with_pieces"):
        pieces = [_piece(model.tokenizer.token_bytes(token_id)) for token_id in token_ids]
        tokens = [{"id": i, "piece": p} for i, p in zip(token_ids, pieces, strict=True)]
    body = {"tokens": tokens, "count": len(token_ids), "max_model_len": model.max_model_len}
    if fields.get("return_token_strs"):
        body["token_strs"] = [model.tokenizer.token_text(token_id) for token_id in token_ids]
    return body


def _piece(raw: bytes) -> str | list[int]:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)
