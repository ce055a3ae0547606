"""Sends spans to a collector by OTLP over HTTP. Needs the packages of the extra `otel`."""

import os
import threading
import time
from collections.abc import Mapping

from headrace.metrics.traces import NoTraces, RequestSpan, Traces
from headrace_common.errors import ConfigError

# The time limit for sending one batch. Meanwhile, new spans wait in the queue.
_TIMEOUT_S = 5.0
# The maximum number of waiting spans. Later spans are dropped.
_MAX_WAITING = 2048
_EVERY_MS = 1000
_CLOSING_S = 2.0
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_PATH = "/v1/traces"


def open_traces(endpoint: str | None, environment: Mapping[str, str], version: str) -> Traces:
    """Return an exporter of spans to `endpoint`, or else to that of OpenTelemetry's variables.

    Without any endpoint, no spans are sent. Raise ConfigError if the packages are missing.
    """
    is_off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    is_off = is_off or environment.get("OTEL_TRACES_EXPORTER") == "none"
    if endpoint is None and (is_off or not any(map(environment.get, _ENDPOINTS))):
        return NoTraces()
    try:
        import opentelemetry.exporter.otlp.proto.http
        import opentelemetry.sdk.trace  # noqa: F401
    except ModuleNotFoundError as missing:
        source = "--otlp-endpoint" if endpoint else " or ".join(_ENDPOINTS)
        raise ConfigError(
            f"{source} turns traces on, but the package {missing.name} is not installed; "
            f"run pip install '.[otel]' in the checkout, or start without {source}."
        ) from None
    return OtlpTraces(endpoint, version)


class OtlpTraces:
    """Puts ended spans into a queue. A thread of OpenTelemetry's SDK sends the spans."""

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
        otel_span = self._tracer.start_span(
            span.name,
            context=TraceContextTextMapPropagator().extract(span.parent),
            kind=SpanKind.SERVER,
            attributes=span.attributes,
            start_time=begin,
        )
        for name, seconds in span.moments.items():
            otel_span.add_event(name, timestamp=begin + round(1e9 * seconds))
        if span.error:
            otel_span.set_status(Status(StatusCode.ERROR, span.error))
        otel_span.end(end)

    def close(self) -> None:
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(_CLOSING_S)
