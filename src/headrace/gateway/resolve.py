"""From checked fields to a Request: the model's limits are kept, its defaults filled in."""

import secrets
from typing import Any

from headrace.core.errors import RequestError
from headrace.core.request import Prompt, Request, Route, Wire
from headrace.core.sampling import Sampling
from headrace.gateway.common_fields import MAX_CHOICES, max_tokens
from headrace.gateway.fields import wrong_value
from headrace.generation.served import ServedModel


def to_request(
    route: Route, prompts: tuple[Prompt, ...], fields: dict[str, Any], model: ServedModel
) -> Request:
    """What was asked, filled up with the model's defaults; RequestError where it has less.

    The caller adds what only its route has.
    """
    return Request(
        route=route,
        model=fields.get("model", model.names[0]),
        prompts=prompts,
        sampling=_to_sampling(fields, model),
        n=_to_n(fields, model),
        stop=fields.get("stop", ()),
        include_stop=fields.get("include_stop_str_in_output", False),
        skip_special_tokens=fields.get("skip_special_tokens", True),
        priority=fields.get("priority", 0),
        cache_prompt=fields.get("cache_prompt", True),
        cache_salt=fields.get("cache_salt", ""),
        wire=_to_wire(fields),
    )


def check_token_ids(token_ids: tuple[int, ...], path: str, size: int) -> None:
    if max(token_ids, default=0) < size:
        return
    place, token_id = next((i, x) for i, x in enumerate(token_ids) if x >= size)
    raise _not_in_vocabulary(token_id, f"{path}[{place}]", size)


def _to_sampling(fields: dict[str, Any], model: ServedModel) -> Sampling:
    size = model.vocab_size
    stop_ids, biases = fields.get("stop_token_ids", ()), fields.get("logit_bias", {})
    check_token_ids(stop_ids, "stop_token_ids", size)
    for token_id in biases:
        if token_id >= size:
            raise _not_in_vocabulary(token_id, f"logit_bias.{token_id}", size)
    top_k = int(_resolve("top_k", fields, model, 0))
    seed = fields.get("seed", -1)
    return Sampling(
        temperature=_resolve("temperature", fields, model, 1.0),
        top_k=top_k if 0 < top_k < size else 0,
        top_p=_resolve("top_p", fields, model, 1.0),
        min_p=_resolve("min_p", fields, model, 0.0),
        repetition_penalty=_resolve("repetition_penalty", fields, model, 1.0),
        frequency_penalty=fields.get("frequency_penalty", 0.0),
        presence_penalty=fields.get("presence_penalty", 0.0),
        logit_bias=biases,
        seed=secrets.randbits(63) if seed == -1 else seed,
        max_tokens=max_tokens(fields),
        min_tokens=fields.get("min_tokens", 0),
        stop_token_ids=stop_ids,
        ignore_eos=fields.get("ignore_eos", False),
    )


def _to_wire(fields: dict[str, Any]) -> Wire:
    options = fields.get("stream_options", {})
    stream = fields.get("stream", False)
    return Wire(
        stream=stream,
        include_usage=options.get("include_usage", False),
        continuous_usage=options.get("continuous_usage_stats", False),
        return_token_ids=fields.get("return_token_ids", False),
        timings_per_token=fields.get("timings_per_token", False),
        return_progress=stream and fields.get("return_progress", False),
        heartbeat=fields.get("heartbeat", stream),
        ping_interval_s=fields.get("sse_ping_interval"),
    )


def _to_n(fields: dict[str, Any], model: ServedModel) -> int:
    n: int = fields.get("n", 1)
    if model.ready and n > model.ready.max_num_seqs:
        most = min(MAX_CHOICES, model.ready.max_num_seqs)
        raise wrong_value(n, "n", f"from 1 to {most}, the sequences that run at once here")
    return n


def _not_in_vocabulary(token_id: int, path: str, size: int) -> RequestError:
    return wrong_value(token_id, path, f"a token id from 0 to {size - 1}")


def _resolve(name: str, fields: dict[str, Any], model: ServedModel, otherwise: float) -> Any:
    if name in fields:
        return fields[name]
    own = getattr(model.defaults, name) if model.defaults else None
    return otherwise if own is None else own
