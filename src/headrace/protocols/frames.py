"""Bytes on the wire that no dialect owns: compact JSON, SSE frames, error objects."""

from typing import Any

import msgspec

from headrace.streams.events import Error, Timings, Usage

DONE = b"data: [DONE]\n\n"
PING = b": ping\n"
"""A comment has one newline: with a blank line after it, clients parse an empty event."""

encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder().decode


def data(payload: bytes) -> bytes:
    return b"data: " + payload + b"\n\n"


def error_body(
    code: str,
    type: str,
    message: str,
    param: str | None = None,
    extra: dict[str, int] | None = None,
) -> bytes:
    shown = {"message": message, "type": type, "param": param, "code": code}
    return encode({"error": shown | (extra or {})})


def cut_body(event: Error) -> bytes:
    """The error object of a stream that was cut."""
    return error_body(event.code, event.type, event.message)


def usage_of(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def timings_of(timings: Timings) -> dict[str, Any]:
    """With the rates that follow from the counts; predicted ones count the steps between tokens."""
    num_steps = max(timings.predicted_n - 1, 0)
    return {
        "cache_n": timings.cache_n,
        "prompt_n": timings.prompt_n,
        "prompt_ms": timings.prompt_ms,
        "prompt_per_token_ms": _ratio(timings.prompt_ms, timings.prompt_n),
        "prompt_per_second": _ratio(1000 * timings.prompt_n, timings.prompt_ms),
        "predicted_n": timings.predicted_n,
        "predicted_ms": timings.predicted_ms,
        "predicted_per_token_ms": _ratio(timings.predicted_ms, num_steps),
        "predicted_per_second": _ratio(1000 * num_steps, timings.predicted_ms),
        "queue_ms": timings.queue_ms,
        "max_gap_ms": timings.max_gap_ms,
    }


def _ratio(part: float, whole: float) -> float:
    return round(part / whole, 3) if whole else 0.0
