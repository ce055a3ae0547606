"""Turns the bytes of a body into a Request: strict JSON, then the model's limits and defaults."""

import math
import re
import secrets
import sys
from decimal import Decimal
from typing import Any

import msgspec

from headrace.protocols.dialect import Dialect, PromptReader
from headrace.protocols.fields import samplers
from headrace.protocols.fields.common import max_tokens
from headrace.protocols.fields.kinds import wrong_value
from headrace.text.json_schema import exact_number
from headrace.text.model_names import called
from headrace.text.text_model import TextModel
from headrace_common.errors import RequestError
from headrace_common.request import Chat, Ids, Infill, Prompt, Request, ResponseOptions, Route, Text
from headrace_common.sampling import Breaker, Sampling
from headrace_common.worker_jobs import CheckedBody

MAX_CHOICES_IN_ALL = 1024
"""Limit on the choices of all prompts together. Each choice is a sequence in the queue."""


MAX_DEPTH = 64
MAX_VALUES = 2 << 20
MAX_CONTAINERS = 256 << 10
_LARGEST = sys.float_info.max
_MODELS_OWN = (
    *(("temperature", 1.0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)),
    ("repetition_penalty", 1.0),
)
"""Parameters for which a model may set its own defaults, and the values that apply otherwise."""

# Integers must fit into 64 bits to be stored with a stream.
_INT64, _UINT64 = -(1 << 63), 1 << 64
_CONTAINERS = (dict, list)
_WITH_SCHEMAS = (
    *("tools", "response_format", "structured_outputs", "json_schema", "guided_json"),
    *("format", "text", "output_config", "output_format"),
)
"""Fields that contain JSON Schemas; the numbers in schemas may be of any size."""

_LONG_NUMBER = re.compile(rb"[0-9][0-9.]{15}|[0-9][eE][+-]?[0-9]{2}")
"""Matches numbers that a float may not represent exactly."""
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)


def decode(body: bytes) -> dict[str, Any]:
    """Return the JSON object in the body.

    Integers beyond 64 bits become floats; `exact_schemas` returns the exact integers in schemas.
    Raise RequestError `invalid_json` for a byte order mark, invalid UTF-8, a lone surrogate, a
    number that no float can hold, deep nesting or too many values.
    """
    _check_counts(body)
    try:
        value = _decode(body)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise RequestError("invalid_json", _reason(body, error)) from None
    if not isinstance(value, dict):
        raise RequestError("invalid_json", "The body must be a JSON object, such as {}.")
    _check_tree(value)
    return value


def exact_schemas(body: bytes, given: dict[str, Any]) -> dict[int, Any]:
    """Return the objects in schema fields with exact numbers: every digit stays as it was sent.

    Keys are the `id()`s of the same objects in `given`. The result is empty if floats represent
    every number of the body exactly.
    """
    if not _LONG_NUMBER.search(body):
        return {}
    whole = _decode_exactly(body)
    level = [(given[name], whole[name]) for name in _WITH_SCHEMAS if name in given]
    found: dict[int, Any] = {}
    while level:
        below: list[tuple[Any, Any]] = []
        for value, exact in level:
            if isinstance(value, dict):
                found[id(value)] = exact
                below += [(item, exact[name]) for name, item in value.items()]
            elif isinstance(value, list):
                below += zip(value, exact, strict=True)
        level = below
    return found


def make_request(
    route: Route,
    prompts: tuple[Prompt, ...],
    fields: dict[str, Any],
    model: TextModel,
    num_logprobs: int | None = None,
) -> Request:
    """Make the request with the model's defaults. Raise RequestError if a limit is exceeded.

    `num_logprobs` is the number of likeliest tokens to report with each token, or None. The caller
    adds the fields that exist only on its route.
    """
    return Request(
        route=route,
        model=called(model, fields.get("model")),
        alias=fields.get("alias", ""),
        prompts=prompts,
        sampling=_to_sampling(fields, model, num_logprobs),
        n=_to_n(fields, len(prompts)),
        stop=tuple(fields.get("stop", ())),
        include_stop=fields.get("include_stop_str_in_output", False),
        skip_special_tokens=fields.get("skip_special_tokens", True),
        priority=fields.get("priority", 0),
        cache_prompt=fields.get("cache_prompt", True),
        cache_salt=fields.get("cache_salt", ""),
        response_options=_to_response_options(fields),
    )


def check_token_ids(token_ids: tuple[int, ...], path: str, size: int) -> None:
    if max(token_ids, default=0) < size:
        return
    place, token_id = next((i, x) for i, x in enumerate(token_ids) if x >= size)
    raise not_in_vocabulary(token_id, f"{path}[{place}]", size)


def _to_sampling(fields: dict[str, Any], model: TextModel, num_logprobs: int | None) -> Sampling:
    size = model.vocab_size
    stop_ids, biases = tuple(fields.get("stop_token_ids", ())), fields.get("logit_bias", {})
    if stop_ids:
        check_token_ids(stop_ids, "stop_token_ids", size)
    for token_id in biases:
        if token_id >= size:
            raise not_in_vocabulary(token_id, f"logit_bias.{token_id}", size)
    drawn: dict[str, Any] = {}
    for name, otherwise in _MODELS_OWN:
        value = fields.get(name)
        if value is None and model.defaults is not None:
            value = getattr(model.defaults, name)
        drawn[name] = otherwise if value is None else value
    top_k = int(drawn["top_k"])
    seed = fields.get("seed", -1)
    grammar, tags = fields.get("constraint", ("", None))
    sampling = Sampling(
        temperature=drawn["temperature"],
        top_k=top_k if 0 < top_k < size else 0,
        top_p=drawn["top_p"],
        min_p=drawn["min_p"],
        repetition_penalty=drawn["repetition_penalty"],
        frequency_penalty=fields.get("frequency_penalty", 0.0),
        presence_penalty=fields.get("presence_penalty", 0.0),
        logit_bias=biases,
        seed=secrets.randbits(63) if seed == -1 else seed,
        max_tokens=_limit(fields, model),
        min_tokens=fields.get("min_tokens", 0),
        stop_token_ids=stop_ids,
        ignore_eos=fields.get("ignore_eos", False),
        num_logprobs=num_logprobs,
        grammar=grammar,
        grammar_tags=tuple(tags) if tags else None,
        guess=fields.get("guess", True),
    )
    if samplers.ASKED.isdisjoint(fields):
        return sampling
    settings = {name: fields[name] for name in samplers.SETTINGS if name in fields}
    settings["dry_breakers"] = msgspec.convert(fields.get("dry_breakers", ()), tuple[Breaker, ...])
    return msgspec.structs.replace(sampling, **settings).in_order(fields.get("samplers"))


def _limit(fields: dict[str, Any], model: TextModel) -> int | None:
    default = model.defaults.max_tokens if model.defaults else None
    if default is None or not fields.keys().isdisjoint(("max_tokens", "max_completion_tokens")):
        return max_tokens(fields)
    least: int = fields.get("min_tokens", 0)
    return max(default, least)


def _to_response_options(fields: dict[str, Any]) -> ResponseOptions:
    options = fields.get("stream_options", {})
    stream, progress = fields.get("stream", False), fields.get("return_progress", False)
    return ResponseOptions(
        stream=stream,
        include_usage=options.get("include_usage", False),
        continuous_usage=options.get("continuous_usage_stats", False),
        return_token_ids=fields.get("return_token_ids", False),
        timings_per_token=fields.get("timings_per_token", False),
        return_progress=stream and bool(progress),
        progress_in_words=stream and progress == "reasoning",
        progress_as_llama_cpp=stream and progress == "llama.cpp",
        return_ingestion=fields.get("return_ingestion", False),
        heartbeat=fields.get("heartbeat", stream),
        ping_interval_s=fields.get("sse_ping_interval"),
    )


def _to_n(fields: dict[str, Any], num_prompts: int) -> int:
    n: int = fields.get("n", 1)
    if num_prompts * n > MAX_CHOICES_IN_ALL:
        message = f"{num_prompts} prompts with n = {n} make {num_prompts * n} choices; the "
        message += f"limit per request is {MAX_CHOICES_IN_ALL}. Send fewer prompts or a smaller n."
        raise RequestError("invalid_value", message, "n")
    return n


def not_in_vocabulary(token_id: int, path: str, size: int) -> RequestError:
    return wrong_value(token_id, path, f"a token id from 0 to {size - 1}")


def pack(dialect: PromptReader, fields: dict[str, Any]) -> CheckedBody:
    kept, skipped = fields.pop("kept", b""), fields.pop("skipped", ())
    prompts = dialect.to_prompts(fields)
    largest_id, largest_path = _largest(prompts, dialect.REQUIRED[0], fields)
    return CheckedBody(
        {name: value for name, value in fields.items() if name not in dialect.IN_PROMPTS},
        tuple(stub_of(prompt) for prompt in prompts),
        msgspec.msgpack.encode(prompts),
        largest_id,
        largest_path,
        ignored=skipped,
        kept=kept,
    )


def to_request(dialect: Dialect, checked: CheckedBody, model: TextModel) -> Request:
    """Make the request, with the model's defaults. The prompts in it are stubs without content.

    Raise RequestError if the request exceeds a limit.
    """
    if checked.largest_id >= model.vocab_size:
        check_ids(checked, model)
    request = dialect.to_request(checked.fields, checked.stubs, model)
    # Some dialects make the request with another dialect's code, which sets the other route.
    return msgspec.structs.replace(request, route=dialect.ROUTE, kept=checked.kept)


def check_ids(checked: CheckedBody, model: TextModel) -> None:
    """Raise RequestError if a token id of the prompts is not in the model's vocabulary."""
    if checked.largest_id >= model.vocab_size:
        raise not_in_vocabulary(checked.largest_id, checked.largest_path, model.vocab_size)


def _largest(prompts: tuple[Prompt, ...], name: str, fields: dict[str, Any]) -> tuple[int, str]:
    """Return the largest token id in the prompts, and its path; the prompts are in field `name`."""
    is_list = getattr(fields[name], "is_list", len(prompts) > 1)
    largest_id, path = -1, ""
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, Ids) and max(prompt.token_ids) > largest_id:
            largest_id = max(prompt.token_ids)
            list_path = f"{name}[{i}]" if is_list else name
            path = f"{list_path}[{prompt.token_ids.index(largest_id)}]"
    return largest_id, path


def stub_of(prompt: Prompt) -> Prompt:
    """Return the prompt without its content."""
    match prompt:
        case Chat():
            return Chat(
                (),
                continue_final_message=prompt.continue_final_message,
                num_images=len(prompt.images),
                image_params=prompt.image_params if prompt.addresses else (),
                addresses=prompt.addresses,
            )
        case Text():
            return Text("")
        case Infill():
            return Infill("", "")
        case Ids():
            return Ids(())


def _check_counts(body: bytes) -> None:
    """Raise RequestError if the body has too many values, before anything is decoded.

    A decoded value may take 50 times the memory of its text.
    """
    num_quotes = body.count(b'"')
    counts = {mark: body.count(mark) for mark in (b",", b"[", b"{")}
    if sum(counts.values()) <= MAX_CONTAINERS:
        return
    if num_quotes > 4 * MAX_VALUES:
        raise _too_many(f"{num_quotes} quotation marks", 4 * MAX_VALUES)
    # Commas and brackets within strings do not separate values.
    for found in _STRING.finditer(body):
        for mark in counts:
            counts[mark] -= body.count(mark, *found.span())
    num_containers = counts[b"["] + counts[b"{"]
    if num_containers > MAX_CONTAINERS:
        raise _too_many(f"{num_containers} arrays and objects", MAX_CONTAINERS)
    if counts[b","] + num_containers > MAX_VALUES:
        raise _too_many(f"about {counts[b','] + num_containers} values", MAX_VALUES)


def _decode(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    # This error means that a number does not fit into a float.
    except msgspec.ValidationError:
        return _decode_wide(body)


def _wide_number(text: str) -> float | Decimal:
    number = float(text)
    return Decimal(number) if math.isinf(number) else number


_decode_wide = msgspec.json.Decoder(float_hook=_wide_number).decode
_decode_exactly = msgspec.json.Decoder(float_hook=exact_number).decode


def _check_tree(root: dict[str, Any]) -> None:
    """Convert large integers to floats. Raise RequestError if the tree is too deep.

    The walk goes level by level, so that a deep tree needs no recursion.
    """
    level: list[tuple[Any, bool]] = [(root, False)]
    for _ in range(MAX_DEPTH):
        below: list[tuple[Any, bool]] = []
        for container, is_schema in level:
            is_object = type(container) is dict
            entries = container.items() if is_object else enumerate(container)
            for key, value in list(entries):
                is_wide = is_schema or (container is root and key in _WITH_SCHEMAS)
                if type(value) in _CONTAINERS:
                    below.append((value, is_wide))
                elif type(value) in _NUMBERS and not _INT64 <= value < _UINT64:
                    container[key] = _as_float(value, is_wide)
        if not below:
            return
        level = below
    raise _too_deep()


def _as_float(value: int | Decimal, may_be_larger: bool) -> float:
    if -_LARGEST <= value <= _LARGEST:
        return float(value)
    if not may_be_larger:
        raise RequestError("invalid_json", "A number in the body is too large.")
    return _LARGEST if value > 0 else -_LARGEST


_NUMBERS = (int, Decimal)


def _reason(body: bytes, error: ValueError) -> str:
    if body.startswith(b"\xef\xbb\xbf"):
        return "The body begins with a byte order mark; send plain UTF-8."
    if isinstance(error, UnicodeDecodeError):
        return "The body is not valid UTF-8."
    if isinstance(error, msgspec.ValidationError):
        return "A number in the body is too large."
    # The decoder's message contains only the kind of fault and an offset, never the client's text.
    return f"The body is not valid JSON: {error}."


def _too_deep() -> RequestError:
    return RequestError("invalid_json", f"The body is nested deeper than {MAX_DEPTH} levels.")


def _too_many(what: str, limit: int) -> RequestError:
    message = f"The body has {what}; the limit is {limit}. Send a smaller body."
    return RequestError("invalid_json", message)
