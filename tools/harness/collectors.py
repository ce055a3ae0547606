"""A small OpenTelemetry collector on loopback. Decodes the traces that servers send by HTTP."""

import contextlib
import gzip
import http.server
import threading
from collections.abc import Iterator
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector(http.server.ThreadingHTTPServer):
    """Collects spans as they arrive. While `answers` is not set, the collector sends no answers."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Taker)
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []
        self.answers = threading.Event()
        self.answers.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Taker(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.answers.wait()
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        is_known = self.path == "/v1/traces"
        if is_known:
            for part in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.server.resources.append(values(part.resource.attributes))
                self.server.spans += [span for scope in part.scope_spans for span in scope.spans]
        self.send_response(200 if is_known else 404)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def values(attributes: Any) -> dict[str, Any]:
    """Return the attributes of a span as Python values."""
    found = {}
    for pair in attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        found[pair.key] = (
            [it.string_value for it in value.values] if kind == "array_value" else value
        )
    return found


@contextlib.contextmanager
def collector() -> Iterator[Collector]:
    with Collector() as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        try:
            yield running
        finally:
            running.answers.set()
            running.shutdown()
