"""Lists all metrics in the order of the page: counters, times, gauges."""

from prometheus_client import CollectorRegistry, Gauge, Histogram, disable_created_metrics
from prometheus_client import Counter as Total

# Otherwise each counter also gets a gauge with its time of creation, which nobody reads.
disable_created_metrics()  # type: ignore[no-untyped-call]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
# Each entry has the help text, followed by the names of the labels.
_TOTALS = {
    "requests": ("Requests that ended", "route", "outcome"),
    "prompt_tokens": ("Prompt tokens of ended requests",),
    "cached_tokens": ("Prompt tokens of ended requests that were in the prefix cache",),
    "generated_tokens": ("Tokens generated for ended requests",),
    "guessed_tokens": ("Tokens guessed by speculative decoding for ended requests",),
    "accepted_tokens": ("Guessed tokens that were accepted",),
    "adapter_requests": ("Requests that ended, by adapter", "adapter", "outcome"),
    "adapter_tokens": ("Tokens generated for ended requests, by adapter", "adapter"),
    "engine_starts": ("Starts of the engine",),
    "engine_restarts": ("Times that the engine crashed or was killed", "cause"),
    "recovered_streams": ("Streams resumed after a restart of the server",),
    "rejections": ("Requests refused", "reason"),
    "template_overruns": ("Chat templates stopped for taking too long",),
    "attaches": ("POSTs that attached to the stream of an earlier POST",),
    "resumes": ("Requests to resume reading a stream", "face"),
    "stops": ("Streams stopped by their clients", "state"),
    "ends": ("Requests that finished, by finish reason", "reason"),
}
_TIMES = {
    "ttft": ("Time from admission to the first token",),
    "inter_token": ("Time between two tokens of one choice",),
    "resume": ("Time until a request that resumes a stream gets the first byte",),
    "stop": ("Time from a stop to the release of blocks and slots",),
    "log_commit": ("Time to write an event to disk",),
    "queue": ("Time from admission to the start of the prompt",),
    "prompt": ("Time to process the prompt",),
    "decode": ("Time from the first token to the last",),
    "max_gap": ("Longest time between two tokens of a request",),
    "request": ("Time from admission to the end",),
    "step": ("Duration of the engine's steps", "kind"),
    "step_predicted": ("Predicted duration of the engine's steps",),
}
_GAUGES = {
    "running": ("Running sequences",),
    "waiting": ("Waiting sequences",),
    "waiting_tokens": ("Prompt tokens of waiting sequences",),
    "blocks": ("Blocks of cache memory", "state"),
    "slots": ("Slots for recurrent state or dense caches", "state"),
    "stall_target_seconds": ("The stall target; 0 if there is no target",),
    "engine_up": ("1 while the engine answers",),
    "state": ("1 for the current state of the server", "state"),
    "streams": ("Streams that have not ended", "state"),
    "readers": ("Readers of streams that have not ended",),
    "log_bytes": ("Bytes of the stored logs, updated once a minute", "store"),
    "heartbeat_age_seconds": ("Longest time since the last frame of an open event stream",),
    "silent_stream_age_seconds": ("Longest time since the last event of a live stream",),
}


class Families:
    """Holds the samples of every metric, by the metric's short name."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.totals = {
            name: Total(f"headrace_{name}", help, labels, registry=self.registry)
            for name, (help, *labels) in _TOTALS.items()
        }
        self.times = {
            name: Histogram(
                f"headrace_{name}_seconds", help, labels, registry=self.registry, buckets=_SECONDS
            )
            for name, (help, *labels) in _TIMES.items()
        }
        self.gauges = {
            name: Gauge(f"headrace_{name}", help, labels, registry=self.registry)
            for name, (help, *labels) in _GAUGES.items()
        }
