"""Figures for Prometheus: what requests took, and how the server stands. No ids, no text.

A request is counted once, when its stream ends; sums of tokens are those of the usage told. Gaps
and times to the first token are told as they happen.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Protocol

from prometheus_client import (
    CollectorRegistry,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client import Counter as Total
from prometheus_client.core import CounterMetricFamily

from headrace.core.errors import OVERRAN, RequestError
from headrace.core.messages import Ready, Status, StepTrace
from headrace.engine.client import EngineDown
from headrace.metrics.exposition import as_vllm, merged
from headrace.streams.tally import Tally

disable_created_metrics()  # type: ignore[no-untyped-call]  # a gauge beside each counter, which nobody reads

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_STATES = ("loading", "ok", "recovering", "draining", "dead")
_STREAM_STATES = ("queued", "prompt", "decode", "recovering")


class Shown(Protocol):
    """The figures of a stream that has not ended."""

    @property
    def state(self) -> str: ...

    @property
    def num_readers(self) -> int: ...


class Metrics:
    """Owned by Generation, which tells it what happens. It never waits, so a scrape never does."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = self._total("requests", "Requests that ended", "route", "outcome")
        self._prompt = self._total("prompt_tokens", "Prompt tokens of ended requests")
        self._cached = self._total("cached_tokens", "Of these, taken from the prefix cache")
        self._generated = self._total("generated_tokens", "Tokens generated for ended requests")
        self._starts = self._total("engine_starts", "Times that the engine came up")
        self._restarts = self._total("engine_restarts", "Engines that died", "cause")
        self._recovered = self._total("recovered_streams", "Streams resumed from an earlier run")
        self._rejections = self._total("rejections", "Requests refused", "reason")
        self._overruns = self._total("template_overruns", "Chat templates that were abandoned")
        self._attaches = self._total("attaches", "POSTs answered with an earlier one's stream")
        self._resumes = self._total("resumes", "Requests to read a stream again", "face")
        self._stops = self._total("stops", "Streams stopped by their clients", "state")
        self._ends = self._total("ends", "Requests that ended whole, by what ended them", "reason")
        self._ttft = self._histogram("ttft", "From admission to the first token")
        self._inter_token = self._histogram("inter_token", "Between two tokens of one choice")
        self._resume = self._histogram("resume", "From asking to read on to the first byte")
        self._stop = self._histogram("stop", "From a stop to free blocks and slots")
        self._log_commit = self._histogram("log_commit", "Until an event was safe on disk")
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
        self._streams = self._gauge("streams", "Streams that have not ended", "state")
        self._readers = self._gauge("readers", "Readers of streams that have not ended")
        self._log_bytes = self._gauge("log_bytes", "Logs that are kept, once a minute", "store")
        self._frame_age = self._gauge(
            "heartbeat_age_seconds", "Since the last frame of the open stream with the oldest one"
        )
        self._num_preempted = self._num_preempted_before = 0
        self._frames_at: dict[object, float] = {}  # of each open event stream, the last
        self._missed: Counter[str] = Counter()  # stall targets missed, by cause
        self._missed_before: Counter[str] = Counter()  # by engines that have ended
        self._registry.register(self)

    def collect(self) -> list[CounterMetricFamily]:
        """The figures that the engine counts itself."""
        preempted = CounterMetricFamily(
            "headrace_preemptions",
            "Times that a sequence lost its memory to others",
            self._num_preempted + self._num_preempted_before,
        )
        family = CounterMetricFamily(
            "headrace_stall_target_missed", "Steps that missed the stall target", labels=["cause"]
        )
        for cause, number in (self._missed + self._missed_before).items():
            family.add_metric([cause], number)
        return [family, preempted]

    def recovered(self) -> None:
        self._recovered.inc()

    def follow(self, tally: Tally) -> None:
        """Hears of each token of a stream that runs."""
        tally.on_first = self._ttft.observe
        tally.on_gap = self._inter_token.observe

    def refused(self, error: RequestError) -> None:
        """A request was answered with an error instead of a stream."""
        self._rejections.labels(error.code).inc()
        if error.code == "template_failed" and error.message.startswith(OVERRAN):
            self._overruns.inc()

    def attached(self) -> None:
        self._attaches.inc()

    def resumed(self, face: str, seconds: float) -> None:
        """A reader's first byte has left, `seconds` after it had asked."""
        self._resumes.labels(face).inc()
        self._resume.observe(seconds)

    def stopped(self, state: str, seconds: float) -> None:
        """A client's stop has had its effect on a stream that was in this state."""
        self._stops.labels(state).inc()
        self._stop.observe(seconds)

    def committed(self, seconds: float) -> None:
        self._log_commit.observe(seconds)

    def swept(self, store: str, num_bytes: int) -> None:
        """Takes the number of bytes that a store keeps."""
        self._log_bytes.labels(store).set(num_bytes)

    def frame_left(self, connection: object) -> None:
        """An open event stream has been sent a frame."""
        self._frames_at[connection] = time.monotonic()

    def frames_ended(self, connection: object) -> None:
        self._frames_at.pop(connection, None)

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
        if outcome == "finished":
            self._ends.labels(tally.last_end).inc()
        if tally.first_token_ms is not None:
            self._decode.observe(timings.predicted_ms / 1000)
            self._max_gap.observe(timings.max_gap_ms / 1000)

    def embedded(self, route: str, outcome: str, num_tokens: int, seconds: float) -> None:
        """A request for vectors: the tokens of those that it got."""
        self._requests.labels(route, outcome).inc()
        self._prompt.inc(num_tokens)
        self._request.observe(seconds)

    def engine_is_up(self, ready: Ready) -> None:
        self._starts.inc()
        self._up.set(1)
        self._target.set(ready.max_stall_s or 0)
        self._show_memory(ready, ready.layout.num_blocks, ready.layout.num_slots)

    def replica_is_down(self, news: EngineDown) -> None:
        """Counts the death of one of several engines; the others run on."""
        self._restarts.labels("killed" if news.from_outside else "died").inc()

    def engine_is_down(self, news: EngineDown) -> None:
        if not news.given_up:
            self.replica_is_down(news)
        self._up.set(0)
        self._num_preempted_before += self._num_preempted
        self._num_preempted = 0
        self._missed_before += self._missed
        self._missed = Counter()

    def unloaded(self) -> None:
        """The engine has left, as it should."""
        self._up.set(0)
        self._blocks.clear()
        self._slots.clear()

    def show_status(self, status: Status, ready: Ready | None) -> None:
        self._running.set(status.num_running)
        self._waiting.set(status.num_waiting)
        self._waiting_tokens.set(status.num_waiting_tokens)
        self._missed = Counter(status.missed)
        self._num_preempted = status.num_preemptions
        if ready is not None:
            self._show_memory(ready, status.blocks_free, status.slots_free)
        for step in status.steps:
            self._step.labels(kind_of(step)).observe(step.elapsed)
            if step.predicted:
                self._predicted.observe(step.predicted)

    def text(
        self,
        state: str,
        streams: Iterable[Shown],
        vllm_model: str = "",
        models: "Mapping[str, Metrics] | None" = None,
    ) -> bytes:
        """All of it in Prometheus' text format, with that of several models by their names.

        With a model's name for vLLM, by vLLM's names too.
        """
        for name in _STATES:
            self._state.labels(name).set(name == state)
        states: Counter[str] = Counter()
        num_readers = 0
        for stream in streams:
            states[stream.state] += 1
            num_readers += stream.num_readers
        for name in _STREAM_STATES:
            self._streams.labels(name).set(states[name])
        self._readers.set(num_readers)
        now = time.monotonic()
        self._frame_age.set(max((now - at for at in self._frames_at.values()), default=0))
        if models:
            return merged(self._registry, {name: it._registry for name, it in models.items()})
        text = generate_latest(self._registry)
        return text + as_vllm(self._registry, vllm_model) if vllm_model else text

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
