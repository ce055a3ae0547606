"""Tests sending spans over sockets to a collector that answers, hangs or is missing."""

import sys
import time

import pytest

from headrace.metrics.otlp import open_traces
from headrace.metrics.traces import NoTraces, RequestSpan
from headrace_common.errors import ConfigError
from tools.harness.collectors import Collector, collector, values
from tools.harness.eventually import eventually

PARENT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
SPAN = RequestSpan("chat mini", PARENT, 2.0, "", {"gen_ai.usage.input_tokens": 7}, {"read": 0.5})


def test_no_spans_are_sent_unless_a_collector_is_configured() -> None:
    for environment in (
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_TRACES_EXPORTER": "none"},
    ):
        assert isinstance(open_traces(None, environment, "1"), NoTraces)


def test_a_missing_package_is_reported_with_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"--otlp-endpoint.*'\.\[otel\]'"):
        open_traces("http://127.0.0.1:9", {}, "1")
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    with pytest.raises(ConfigError, match=r"OTEL_EXPORTER_OTLP_ENDPOINT.*'\.\[otel\]'"):
        open_traces(None, environment, "1")


def test_a_span_has_its_parent_times_and_status() -> None:
    with collector() as there:
        traces = open_traces(there.url, {}, "1.2")
        before = time.time_ns()
        traces.ended(SPAN)
        traces.ended(RequestSpan("GET /x", {}, 0.0, "model_not_found", {}))
        traces.close()
        span, failed = there.spans
    assert span.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"
    assert span.parent_span_id.hex() == "b7ad6b7169203331"
    assert (span.name, span.kind, values(span.attributes)) == ("chat mini", 2, SPAN.attributes)
    assert span.end_time_unix_nano - span.start_time_unix_nano == 2 * 10**9
    assert span.end_time_unix_nano >= before
    (moment,) = span.events
    assert moment.time_unix_nano - span.start_time_unix_nano == 5 * 10**8
    assert not failed.parent_span_id and failed.status.message == "model_not_found"
    assert there.resources[0]["service.name"] == "headrace"
    assert there.resources[0]["service.version"] == "1.2"


def test_a_request_whose_parent_was_not_sampled_has_no_span() -> None:
    with collector() as there:
        traces = open_traces(there.url, {}, "1")
        unsampled = {"traceparent": PARENT["traceparent"][:-1] + "0"}
        traces.ended(RequestSpan("chat mini", unsampled, 1.0, "", {}))
        traces.close()
        assert not there.spans


@pytest.mark.parametrize("hangs", [True, False])
def test_a_hanging_or_missing_collector_blocks_no_request(hangs: bool) -> None:
    with collector() as there:
        there.answers.clear()
        traces = open_traces(there.url if hangs else "http://127.0.0.1:9", {}, "1")
        began = time.monotonic()
        for _ in range(3000):  # more than may wait
            traces.ended(SPAN)
        assert time.monotonic() - began < 60
        began = time.monotonic()
        traces.close()
        assert time.monotonic() - began < 10
        if hangs:
            there.answers.set()
            eventually(lambda: has_some(there), within_s=30)


def has_some(there: Collector) -> bool:
    return len(there.spans) > 0
