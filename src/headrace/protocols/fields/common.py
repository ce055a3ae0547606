"""Checks the fields that chat and text completions share. The checks need no model."""

import re
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import msgspec

from headrace.protocols.fields import samplers, structure
from headrace.protocols.fields.kinds import (
    Flag,
    Integer,
    Kind,
    Number,
    Object,
    String,
    check_count,
    items_of,
    missing,
    nullable,
    read_fields,
    shown,
    wrong_type,
    wrong_value,
)
from headrace_common.errors import RequestError

MAX_CHOICES = 128
_MAX_BIASES = 1024
_MAX_STOPS = 64
_STOP = String(most=1000)


class LogitBias(msgspec.Struct, frozen=True):
    """Reads biases as a dict from token id to bias.

    Accepts {"token id": bias} and llama.cpp's [[token id, bias], …].
    """

    def check(self, value: Any, path: str) -> dict[int, float]:
        if type(value) is list:
            pairs = items_of(value, path, 0, _MAX_BIASES)
            return dict(_bias_pair(*each) for each in pairs)
        if type(value) is not dict:
            allowed = "an object of token ids and biases, or an array of pairs [token id, bias]"
            raise wrong_type(value, path, allowed)
        if len(value) > _MAX_BIASES:
            message = f"{path} has {len(value)} entries; it may have {_MAX_BIASES}."
            raise RequestError("invalid_value", message, path)
        return {_token_id(key, path): _bias(key, value[key], path) for key in value}

    def schema(self) -> dict[str, Any]:
        bias = {"anyOf": [_BIAS.schema(), {"const": False}]}
        by_id = {
            "type": "object",
            "maxProperties": _MAX_BIASES,
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": bias,
        }
        pair: dict[str, Any] = {"type": "array", "prefixItems": [TOKEN_ID.schema(), bias]}
        pair |= {"minItems": 2, "maxItems": 2}
        pairs = {"type": "array", "items": pair, "maxItems": _MAX_BIASES}
        return {"anyOf": [by_id, pairs]}


class Stops(msgspec.Struct, frozen=True):
    """Reads one stop string or several; leaves out empty strings and nulls."""

    def check(self, value: Any, path: str) -> tuple[str, ...]:
        if type(value) is not list:
            if type(value) is not str:
                raise wrong_type(value, path, "a string or an array of strings")
            return tuple(filter(None, (_STOP.check(value, path),)))
        check_count(len(value), path, 0, _MAX_STOPS)
        stops = [(i, stop) for i, stop in enumerate(value) if stop not in ("", None)]
        return tuple(_STOP.check(stop, f"{path}[{i}]") for i, stop in stops)

    def schema(self) -> dict[str, Any]:
        several = {"type": "array", "items": nullable(_STOP), "maxItems": _MAX_STOPS}
        return {"anyOf": [_STOP.schema(), several]}


class TokenIds(msgspec.Struct, frozen=True):
    """Reads many token ids fast.

    Checks the ids one by one only if an id is wrong, so that the error can name the wrong id.
    """

    least: int = 0
    most: int = 1 << 24

    def check(self, value: Any, path: str) -> tuple[int, ...]:
        if type(value) is not list:
            raise wrong_type(value, path, "an array of token ids")
        check_count(len(value), path, self.least, self.most)
        is_plain = set(map(type, value)) <= {int}
        if is_plain and min(value, default=0) >= 0 and max(value, default=0) <= TOKEN_ID.high:
            return tuple(value)
        return tuple(TOKEN_ID.check(item, f"{path}[{i}]") for i, item in enumerate(value))

    def schema(self) -> dict[str, Any]:
        return {"type": "array", "items": TOKEN_ID.schema(), "minItems": self.least}


class ProgressOption(msgspec.Struct, frozen=True):
    """Reads whether to report the prompt's progress.

    "reasoning" asks for the progress as text in the reasoning, in addition to the reports.
    "llama.cpp" asks for reports in llama.cpp's form, whose chunks have no choices.
    """

    def check(self, value: Any, path: str) -> bool | str:
        if type(value) is str:
            if value not in ("reasoning", "llama.cpp"):
                raise wrong_value(value, path, "true, false, reasoning or llama.cpp")
            return value
        return Flag().check(value, path)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [Flag().schema(), {"enum": ["reasoning", "llama.cpp"]}]}


_BIAS = Number(-100, 100)
# The bias of a forbidden token. JSON can represent this number, which is far below any logit.
_FORBIDDEN = -1e9
_BY_CHUNK = "continuous_usage_stats"
_LIMIT = Integer(low=1, also=(-1,))
TOKEN_ID = Integer(low=0, high=(1 << 31) - 1)

COMMON: Mapping[str, Kind] = {
    "model": String(least=1),
    "max_completion_tokens": _LIMIT,
    "max_tokens": _LIMIT,
    "min_tokens": Integer(low=0),
    "temperature": Number(0, 100),
    "top_p": Number(0, 1),
    "min_p": Number(0, 1),
    "top_k": Integer(low=-1),
    "frequency_penalty": Number(-2, 2),
    "presence_penalty": Number(-2, 2),
    "repetition_penalty": Number(0, 10, above=True),
    "repeat_penalty": Number(0, 10, above=True),
    **samplers.FIELDS,
    "logit_bias": LogitBias(),
    "seed": Integer(),
    "n": Integer(1, MAX_CHOICES),
    "best_of": Integer(1, MAX_CHOICES),
    "stop": Stops(),
    "stop_token_ids": TokenIds(most=64),
    "include_stop_str_in_output": Flag(),
    "ignore_eos": Flag(),
    "stream": Flag(),
    "stream_options": Object({"include_usage": Flag(), _BY_CHUNK: Flag()}),
    "return_progress": ProgressOption(),
    "return_ingestion": Flag(),
    "attach": Flag(),
    "heartbeat": Flag(),
    "sse_ping_interval": Integer(1, 60, also=(-1,)),
    "skip_special_tokens": Flag(),
    "timings_per_token": Flag(),
    "return_token_ids": Flag(),
    "cache_prompt": Flag(),
    "cache_salt": String(1, 128),
    "guess": Flag(),
    "priority": Integer(-100, 100),
    **structure.FIELDS,
}

NO_EFFECT = (
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "service_tier",
    "prediction",
    "verbosity",
    "parallel_tool_calls",
    "store",
)

_NOT_SHOWN = ("verbosity",)
"""Fields that have no effect here but would change the answer of another server.

These fields are reported as ignored. The remaining fields of NO_EFFECT only tell a provider how
to bill, store or route a request.
"""

_MAX_IGNORED = 16
# Visible ASCII except the comma, which separates names.
_SHOWN_NAME = re.compile(r"[!-+\--~]{1,64}")

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "tools": (),
    "functions": (),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "moderation": (),
    "documents": (),
    "chat_template": (),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "bad_words": (),
    "allowed_token_ids": (),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
}
"""Maps unsupported fields to their neutral values, which are accepted.

Empty strings, arrays and objects are neutral, too.
"""


def known_fields(table: Mapping[str, Kind]) -> set[str]:
    """Return every field name that a route knows, including fields without effect or support."""
    return {*table, *NO_EFFECT, *UNSUPPORTED}


def check_required(names: Iterable[str], body: Mapping[str, Any]) -> None:
    for name in names:
        if body.get(name) is None:
            raise missing(name)


def read_known(
    table: Mapping[str, Kind], required: Iterable[str], body: dict[str, Any]
) -> dict[str, Any]:
    """Check each field of a body by its row in `table`; return the fields that are set.

    Any route can use this function: nothing depends on a combination of fields.
    """
    check_required(required, body)
    fields = read_fields(table, body)
    _refuse_unsupported(table, body)
    return fields


def read_common(
    table: Mapping[str, Kind], required: Iterable[str], body: dict[str, Any]
) -> dict[str, Any]:
    """Return the fields that a generation request sets, after every check that needs no model."""
    fields = read_known(table, required, body)
    # llama.cpp's name for repetition_penalty.
    penalty = fields.pop("repeat_penalty", None)
    if penalty is not None:
        fields.setdefault("repetition_penalty", penalty)
    if fields.get("best_of", fields.get("n", 1)) != fields.get("n", 1):
        raise _unsupported("best_of", "the value of n")
    if fields.get("stream_options", {}).get(_BY_CHUNK) and not fields.get("stream"):
        # include_usage is accepted without a stream: a whole answer always reports the usage.
        message = f"{_BY_CHUNK} needs stream: true; leave it out otherwise."
        raise RequestError("invalid_value", message, f"stream_options.{_BY_CHUNK}")
    longest = max_tokens(fields)
    if longest is not None and fields.get("min_tokens", 0) > longest:
        raise wrong_value(fields["min_tokens"], "min_tokens", f"at most max_tokens ({longest})")
    return fields


def ignored(table: Mapping[str, Kind], body: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of fields that have no effect here, although a client may rely on them.

    Return only the first few names, in the body's order. Leave out names that do not fit into a
    header. A null field counts as absent.
    """
    understood = (table.keys() | UNSUPPORTED.keys() | set(NO_EFFECT)) - set(_NOT_SHOWN)
    names = (name for name, value in body.items() if value is not None and name not in understood)
    unsupported = samplers.without_effect(table, body)
    shown_names = (name for name in (*names, *unsupported) if _SHOWN_NAME.fullmatch(name))
    return tuple(islice(shown_names, _MAX_IGNORED))


def max_tokens(fields: dict[str, Any]) -> int | None:
    """Return the smaller of max_tokens and max_completion_tokens; None if neither is set.

    A limit of -1 counts as absent.
    """
    limits = fields.get("max_tokens", -1), fields.get("max_completion_tokens", -1)
    limit: int = max(limits) if -1 in limits else min(limits)
    return None if limit == -1 else limit


def cache_salt(fields: dict[str, Any]) -> str | None:
    """Return the request's cache salt; None if the client sent `cache_prompt: false`."""
    salt: str = fields.get("cache_salt", "")
    return salt if fields.get("cache_prompt", True) else None


def _refuse_unsupported(table: Mapping[str, Kind], body: dict[str, Any]) -> None:
    """Raise RequestError if a known field asks for something that this server does not support."""
    for name, neutral in UNSUPPORTED.items():
        value = body.get(name)
        if name in table or value in (None, "", [], {}):
            continue
        # Compare as JSON does: true does not equal 1, but 1.0 does.
        if not any(_is_same(value, other) for other in neutral):
            raise _unsupported(name, " or ".join(shown(other) for other in neutral))


def _is_same(value: Any, other: Any) -> bool:
    return bool(value == other) and (type(value) is bool) == (type(other) is bool)


def _unsupported(name: str, neutral: str) -> RequestError:
    instead = f"leave it out or send {neutral}" if neutral else "leave it out"
    return RequestError("unsupported_parameter", f"{name} is not supported here; {instead}.", name)


def _token_id(key: str, path: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", key, re.ASCII):
        message = f"{path} has the key {shown(key)}; keys must be token ids in decimal digits."
        raise RequestError("invalid_value", message, path)
    return int(key)


def _bias(key: str, value: Any, path: str) -> float:
    if value is None:
        raise wrong_type(value, f"{path}.{key}", "a number")
    return _any_bias(value, f"{path}.{key}")


def _any_bias(value: Any, path: str) -> float:
    return _FORBIDDEN if value is False else _BIAS.check(value, path)


def _bias_pair(value: Any, path: str) -> tuple[int, float]:
    (token_id, id_path), (bias, bias_path) = items_of(value, path, 2, 2, "a pair [id, bias]")
    if type(token_id) is str:
        message = f"{id_path} is a text; a bias applies to a token id. /tokenize gives the ids."
        raise RequestError("invalid_type", message, id_path)
    return TOKEN_ID.check(token_id, id_path), _any_bias(bias, bias_path)
