"""Figures for Prometheus: what requests took, and how the server stands. No ids, no text.

A request is counted once, when its stream ends; sums of tokens are those of the usage told.
"""

from collections import Counter

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client import Counter as Total
from prometheus_client.core import CounterMetricFamily

from headrace.core.messages import Ready, Status, StepTrace
from headrace.streams.tally import Tally

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_STATES = ("loading", "ok", "recovering", "draining", "dead")


class Metrics:
    """Owned by Generation, which tells it what happens."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = self._total("requests", "Requests that ended", "route", "outcome")
        self._prompt = self._total("prompt_tokens", "Prompt tokens of ended requests")
        self._cached = self._total("cached_tokens", "Of these, taken from the prefix cache")
        self._generated = self._total("generated_tokens", "Tokens generated for ended requests")
        self._starts = self._total("engine_starts", "Times that the engine came up")
        self._recovered = self._total("recovered_streams", "Streams resumed from an earlier run")
        self._ttft = self._histogram("ttft", "From admission to the first token")
        self._queue = self._histogram("queue", "From admission to the start of the prompt")
        self._prompt_s = self._histogram("prompt", "Computing the prompt")
        self._decode = self._histogram("decode", "From the first token to the last")
        self._max_gap = self._histogram("max_gap", "Longest wait between two tokens of a request")
        self._request = self._histogram("request", "From admission to the end")
        self._step = self._histogram("step", "Steps of the engine", "kind")
        self._predicted = self._histogram("step_predicted", "What they were predicted to take")
        self._running = self._gauge("running", "Sequences that run")
        self._waiting = self._gauge("waiting", "Sequences that wait")
        self._waiting_tokens = self._gauge("waiting_tokens", "Tokens of those that wait")
        self._blocks = self._gauge("blocks", "Blocks of cache memory", "state")
        self._slots = self._gauge("slots", "Slots for recurrent state or dense caches", "state")
        self._target = self._gauge("stall_target_seconds", "The stall target; 0: none")
        self._up = self._gauge("engine_up", "1 while the engine answers")
        self._state = self._gauge("state", "1 for the state that the server is in", "state")
        self._streams = self._gauge("streams", "Streams that have not ended")
        self._missed: Counter[str] = Counter()  # stall targets missed, by cause
        self._missed_before: Counter[str] = Counter()  # by engines that have ended
        self._registry.register(self)

    def collect(self) -> list[CounterMetricFamily]:
        """The one figure that the engine counts itself."""
        family = CounterMetricFamily(
            "headrace_stall_target_missed", "Steps that missed the stall target", labels=["cause"]
        )
        for cause, number in (self._missed + self._missed_before).items():
            family.add_metric([cause], number)
        return [family]

    def recovered(self) -> None:
        self._recovered.inc()

    def ended(self, route: str, outcome: str, tally: Tally, seconds: float) -> None:
        """A request: `outcome` is how it finished, or the code of its error."""
        usage, timings = tally.usage, tally.timings
        self._requests.labels(route, outcome).inc()
        self._prompt.inc(usage.prompt_tokens)
        self._cached.inc(usage.cached_tokens)
        self._generated.inc(usage.completion_tokens)
        self._request.observe(seconds)
        self._queue.observe(timings.queue_ms / 1000)
        if timings.prompt_n:
            self._prompt_s.observe(timings.prompt_ms / 1000)
        if tally.first_token_ms is not None:
            self._ttft.observe(tally.first_token_ms / 1000)
            self._decode.observe(timings.predicted_ms / 1000)
            self._max_gap.observe(timings.max_gap_ms / 1000)

    def engine_is_up(self, ready: Ready) -> None:
        self._starts.inc()
        self._up.set(1)
        self._target.set(ready.max_stall_s or 0)
        self._show_memory(ready, ready.layout.num_blocks, ready.layout.num_slots)

    def engine_is_down(self) -> None:
        self._up.set(0)
        self._missed_before += self._missed
        self._missed = Counter()

    def look(self, status: Status, ready: Ready | None) -> None:
        self._running.set(status.num_running)
        self._waiting.set(status.num_waiting)
        self._waiting_tokens.set(status.num_waiting_tokens)
        self._missed = Counter(status.missed)
        if ready is not None:
            self._show_memory(ready, status.blocks_free, status.slots_free)
        for step in status.steps:
            self._step.labels(kind_of(step)).observe(step.elapsed)
            if step.predicted:
                self._predicted.observe(step.predicted)

    def text(self, state: str, num_streams: int) -> bytes:
        """All of it in Prometheus' text format."""
        for name in _STATES:
            self._state.labels(name).set(name == state)
        self._streams.set(num_streams)
        return generate_latest(self._registry)

    def _show_memory(self, ready: Ready, blocks_free: int, slots_free: int) -> None:
        layout = ready.layout
        for gauge, total, free in (
            (self._blocks, layout.num_blocks, blocks_free),
            (self._slots, layout.num_slots, slots_free),
        ):
            gauge.labels("free").set(free)
            gauge.labels("used").set(total - free)

    def _total(self, name: str, help: str, *labels: str) -> Total:
        return Total(f"headrace_{name}", help, labels, registry=self._registry)

    def _gauge(self, name: str, help: str, *labels: str) -> Gauge:
        return Gauge(f"headrace_{name}", help, labels, registry=self._registry)

    def _histogram(self, name: str, help: str, *labels: str) -> Histogram:
        name = f"headrace_{name}_seconds"
        return Histogram(name, help, labels, registry=self._registry, buckets=_SECONDS)


def kind_of(step: StepTrace) -> str:
    if not step.num_prompt_tokens:
        return "decode"
    return "mixed" if step.num_decoding else "prompt"
