"""All families of figures, in the order of the page: counters, times, gauges."""

from prometheus_client import CollectorRegistry, Gauge, Histogram, disable_created_metrics
from prometheus_client import Counter as Total

disable_created_metrics()  # type: ignore[no-untyped-call]  # a gauge beside each counter, which nobody reads

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOTALS = {  # of each the help, and its labels
    "requests": ("Requests that ended", "route", "outcome"),
    "prompt_tokens": ("Prompt tokens of ended requests",),
    "cached_tokens": ("Of these, taken from the prefix cache",),
    "generated_tokens": ("Tokens generated for ended requests",),
    "guessed_tokens": ("Tokens guessed ahead for ended requests",),
    "accepted_tokens": ("Of these, right: steps saved",),
    "adapter_requests": ("Requests that ended, by adapter", "adapter", "outcome"),
    "adapter_tokens": ("Tokens generated for them", "adapter"),
    "engine_starts": ("Times that the engine came up",),
    "engine_restarts": ("Engines that died", "cause"),
    "recovered_streams": ("Streams resumed from an earlier run",),
    "rejections": ("Requests refused", "reason"),
    "template_overruns": ("Chat templates that were abandoned",),
    "attaches": ("POSTs answered with an earlier one's stream",),
    "resumes": ("Requests to read a stream again", "face"),
    "stops": ("Streams stopped by their clients", "state"),
    "ends": ("Requests that ended whole, by what ended them", "reason"),
}
_TIMES = {
    "ttft": ("From admission to the first token",),
    "inter_token": ("Between two tokens of one choice",),
    "resume": ("From asking to read on to the first byte",),
    "stop": ("From a stop to free blocks and slots",),
    "log_commit": ("Until an event was safe on disk",),
    "queue": ("From admission to the start of the prompt",),
    "prompt": ("Computing the prompt",),
    "decode": ("From the first token to the last",),
    "max_gap": ("Longest wait between two tokens of a request",),
    "request": ("From admission to the end",),
    "step": ("Steps of the engine", "kind"),
    "step_predicted": ("What they were predicted to take",),
}
_GAUGES = {
    "running": ("Sequences that run",),
    "waiting": ("Sequences that wait",),
    "waiting_tokens": ("Tokens of those that wait",),
    "blocks": ("Blocks of cache memory", "state"),
    "slots": ("Slots for recurrent state or dense caches", "state"),
    "stall_target_seconds": ("The stall target; 0: none",),
    "engine_up": ("1 while the engine answers",),
    "state": ("1 for the state that the server is in", "state"),
    "streams": ("Streams that have not ended", "state"),
    "readers": ("Readers of streams that have not ended",),
    "log_bytes": ("Logs that are kept, once a minute", "store"),
    "heartbeat_age_seconds": ("Since the last frame of the open stream with the oldest one",),
    "silent_stream_age_seconds": ("Since the last news of the stream with the oldest ones",),
}


class Families:
    """The samples of every family, by its short name."""

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
