"""Sends spans to a collector by OTLP over HTTP, with OpenTelemetry's own packages, an extra."""

import os
import threading
import time
from collections.abc import Mapping

from headrace.metrics.traces import NoTraces, RequestSpan, Traces
from headrace_common.errors import ConfigError

_TIMEOUT_S = 5.0  # of one batch; while it lasts, spans gather
_MAX_WAITING = 2048  # spans; later ones are lost
_EVERY_MS = 1000
_CLOSING_S = 2.0
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_PATH = "/v1/traces"


def open_traces(endpoint: str | None, environment: Mapping[str, str], version: str) -> Traces:
    """Traces to `endpoint`, or else to what OpenTelemetry's variables name; none if they do not."""
    is_off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    is_off = is_off or environment.get("OTEL_TRACES_EXPORTER") == "none"
    if endpoint is None and (is_off or not any(map(environment.get, _ENDPOINTS))):
        return NoTraces()
    try:
        import opentelemetry.exporter.otlp.proto.http
        import opentelemetry.sdk.trace  # noqa: F401
    except ModuleNotFoundError as missing:
        asked = "--otlp-endpoint" if endpoint else " or ".join(_ENDPOINTS)
        raise ConfigError(
            f"Traces are asked for by {asked}, and {missing.name} is not installed; "
            "pip install 'headrace[otel]', or leave it out."
        ) from None
    return OtlpTraces(endpoint, version)


class OtlpTraces:
    """A thread of the SDK's own sends; whoever ends a span only puts it into that thread's line."""

    is_on = True

    def __init__(self, endpoint: str | None, version: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        if endpoint is not None and not endpoint.endswith(_PATH):
            endpoint = endpoint.rstrip("/") + _PATH
        name = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "headrace"}
        resource = Resource.create({**name, "service.version": version})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                OTLPSpanExporter(endpoint=endpoint, timeout=_TIMEOUT_S),
                max_queue_size=_MAX_WAITING,
                schedule_delay_millis=_EVERY_MS,
            )
        )
        self._tracer = self._provider.get_tracer("headrace", version)

    def ended(self, span: RequestSpan) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        end = time.time_ns()
        begin = end - round(1e9 * span.seconds)
        told = self._tracer.start_span(
            span.name,
            context=TraceContextTextMapPropagator().extract(span.parent),
            kind=SpanKind.SERVER,
            attributes=span.attributes,
            start_time=begin,
        )
        for name, seconds in span.moments.items():
            told.add_event(name, timestamp=begin + round(1e9 * seconds))
        if span.error:
            told.set_status(Status(StatusCode.ERROR, span.error))
        told.end(end)

    def close(self) -> None:
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(_CLOSING_S)
