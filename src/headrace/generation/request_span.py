"""Builds the trace span of an answered request, with OpenTelemetry's attribute names for generative
models.
"""

from headrace.metrics.traces import Attribute, RequestSpan
from headrace.streams.record import Record
from headrace.streams.usage import UsageCounter
from headrace_common.errors import RequestError
from headrace_common.ingestion import Ingestion
from headrace_common.log_context import KEY_NAME, PARENT, REQUEST_ID

_TEXTS = ("/v1/completions", "/completion", "/infill", "/api/generate")


def span_of(
    record: Record,
    tally: UsageCounter,
    ingestion: Ingestion,
    seconds: float,
    cut: RequestError | None,
) -> RequestSpan:
    """Build the span. `seconds` count from admission; `cut` is the error that cut the stream."""
    request, usage, timings = record.request, tally.usage, tally.timings
    operation = "text_completion" if request.route in _TEXTS else "chat"
    first_ms = tally.first_token_ms
    times = {
        "headrace.prompt_began": timings.queue_ms if timings.prompt_n else None,
        "headrace.prompt_read": timings.queue_ms + timings.prompt_ms if timings.prompt_n else None,
        "headrace.first_token": first_ms,
    }
    attributes: dict[str, Attribute | None] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "headrace",
        "gen_ai.request.model": request.shown_model,
        "gen_ai.response.model": request.model,
        **_requested(record),
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.usage.reasoning.output_tokens": usage.reasoning_tokens,
        "gen_ai.response.finish_reasons": [tally.last_end] if tally.last_end else None,
        "gen_ai.response.time_to_first_chunk": None if first_ms is None else first_ms / 1000,
        "error.type": cut.code if cut else None,
        "headrace.queue_s": timings.queue_ms / 1000,
        "headrace.prompt_s": timings.prompt_ms / 1000,
        "headrace.decode_s": timings.predicted_ms / 1000,
        "headrace.max_gap_s": timings.max_gap_ms / 1000,
        "headrace.prompt_steps": ingestion.chunks,
        "headrace.decode_steps": tally.num_steps,
        "headrace.is_durable": record.is_durable,
        **_ingested(ingestion),
    }
    return RequestSpan(
        f"{operation} {request.shown_model}",
        PARENT.get(),
        seconds,
        cut.code if cut else "",
        named(request.route) | {k: v for k, v in attributes.items() if v is not None},
        {name: ms / 1000 for name, ms in times.items() if ms is not None},
    )


def named(route: str) -> dict[str, Attribute]:
    """Return the route, the request id and the API key's name, leaving out empty values."""
    known = {"headrace.request_id": REQUEST_ID.get(), "headrace.key": KEY_NAME.get()}
    fields: dict[str, Attribute] = {"http.route": route}
    return fields | {name: value for name, value in known.items() if value}


def _requested(record: Record) -> dict[str, Attribute | None]:
    request, sampling = record.request, record.request.sampling
    return {
        "gen_ai.request.stream": request.response_options.stream,
        "gen_ai.request.choice.count": request.n if request.n > 1 else None,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.output.type": "json" if sampling.grammar else "text",
    }


def _ingested(ingestion: Ingestion) -> dict[str, Attribute | None]:
    """Return the ingestion report with one attribute per field."""
    fields = {name: getattr(ingestion, name) for name in Ingestion.__struct_fields__}
    smallest, largest = fields.pop("chunk_tokens") or (None, None)
    fields |= {"smallest_chunk": smallest, "largest_chunk": largest}
    return {f"headrace.ingestion.{name}": value for name, value in fields.items()}
