"""POST /v1/completions: from a body to a Request."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from headrace.core.errors import RequestError
from headrace.core.request import Ids, Prompt, Request, Route, Text
from headrace.gateway import resolve
from headrace.gateway.common_fields import COMMON, TokenIds, read_common
from headrace.gateway.fields import (
    Array,
    Flag,
    Integer,
    Kind,
    String,
    check_count,
    wrong_type,
)
from headrace.generation.served import ServedModel

ROUTE: Route = "/v1/completions"
MAX_PROMPTS = 1024
DEFAULT_MAX_TOKENS = 16
_IDS = TokenIds(least=1)


class Asked(NamedTuple):
    """All prompts as text, or all as tuples of ids; `is_list`: several could have been sent."""

    prompts: tuple[Any, ...]
    is_list: bool


class Prompts(msgspec.Struct, frozen=True):
    """A string, strings, ids, or lists of ids."""

    def check(self, value: Any, path: str) -> Asked:
        if type(value) is str:
            return Asked((value,), False)
        if type(value) is not list:
            raise wrong_type(value, path, "a string or an array")
        if value and type(value[0]) is int:
            return Asked((_IDS.check(value, path),), False)
        check_count(len(value), path, 1, MAX_PROMPTS)
        first = type(value[0])
        prompts = tuple(_one(item, first, f"{path}[{i}]") for i, item in enumerate(value))
        return Asked(prompts, True)

    def schema(self) -> dict[str, Any]:
        of_lists = [Array(kind, MAX_PROMPTS, 1).schema() for kind in (String(), _IDS)]
        return {"anyOf": [String().schema(), _IDS.schema(), *of_lists]}


class EmptyString(msgspec.Struct, frozen=True):
    """The only value of a field whose feature is not there."""

    def check(self, value: Any, path: str) -> str:
        if value != "":
            message = f'{path} is not supported here; leave it out or send "".'
            raise RequestError("unsupported_parameter", message, path)
        return ""

    def schema(self) -> dict[str, Any]:
        return {"const": ""}


TABLE: Mapping[str, Kind] = {
    "prompt": Prompts(),
    **COMMON,
    "max_tokens": Integer(low=0, also=(-1,)),
    "logprobs": Integer(0, 20),
    "echo": Flag(),
    "add_special_tokens": Flag(),
    "suffix": EmptyString(),
}


def read(body: dict[str, Any]) -> dict[str, Any]:
    """The given fields, checked as far as they need no model."""
    limits = ("max_tokens", "max_completion_tokens")
    if all(body.get(name) is None for name in limits):
        body = body | {"max_tokens": DEFAULT_MAX_TOKENS}
    return read_common(TABLE, "prompt", body)


def to_request(fields: dict[str, Any], model: ServedModel) -> Request:
    """The request, by the model's limits and with its defaults."""
    prompts = _to_prompts(fields, model)
    request = resolve.to_request(ROUTE, prompts, fields, model)
    echo, asked = fields.get("echo", False), fields.get("logprobs")
    scores_prompt = echo and asked is not None
    sampling = msgspec.structs.replace(
        request.sampling,
        num_logprobs=asked,
        num_prompt_logprobs=asked if scores_prompt else None,
    )
    # a prompt taken from the cache has no logits to score
    cache = request.cache_prompt and not scores_prompt
    return msgspec.structs.replace(request, sampling=sampling, echo=echo, cache_prompt=cache)


def _to_prompts(fields: dict[str, Any], model: ServedModel) -> tuple[Prompt, ...]:
    asked: Asked = fields["prompt"]
    if type(asked.prompts[0]) is str:
        adds = fields.get("add_special_tokens", True)
        return tuple(Text(text, adds) for text in asked.prompts)
    for i, ids in enumerate(asked.prompts):
        path = f"prompt[{i}]" if asked.is_list else "prompt"
        resolve.check_token_ids(ids, path, model.vocab_size)
    return tuple(Ids(ids) for ids in asked.prompts)


def _one(value: Any, first: type[Any], path: str) -> Any:
    if type(value) is not first or first not in (str, list):
        raise wrong_type(value, path, "a string or an array of ids, the same for all prompts")
    return value if first is str else _IDS.check(value, path)
