"""Counts and times requests, engines and streams for Prometheus. Labels never contain ids.

A request is counted once, when its stream ends, with the tokens of its reported usage. Gaps and
times to the first token are recorded as they happen. No method here waits, so a scrape is never
delayed.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from headrace.engines.client import EngineDown
from headrace.metrics.exposition import as_vllm, merged
from headrace.metrics.families import Families
from headrace.metrics.history import History, bucket_of
from headrace.metrics.traces import NoTraces, Traces
from headrace.streams.events import Timings, Usage
from headrace.streams.usage import UsageCounter
from headrace_common.errors import OVERRAN, RequestError
from headrace_common.messages import Ready, Status, StepTrace

_STATES = ("loading", "ok", "recovering", "draining", "dead")
_STREAM_STATES = ("queued", "prompt", "decode", "recovering")

LiveFigures = tuple[str, int, float]
"""The state of a live stream, the number of its readers, and the seconds since its last event.

Heartbeats do not count as events here.
"""
# Counters that an engine keeps per label value: metric name, help text, label name.
_BY_LABEL = {
    "missed": ("headrace_stall_target_missed", "Steps that missed the stall target", "cause"),
    "disk_misses": (
        "headrace_disk_prefix_misses",
        "Groups of blocks that were on disk but were computed again",
        "reason",
    ),
    "drafted": (
        "headrace_drafted_tokens",
        "Guessed tokens that the draft model chose; right ones were accepted",
        "result",
    ),
}
_OF_DISK = {
    "runs": ("headrace_disk_prefix_hits", "Groups of blocks that were read from disk"),
    "tokens": ("headrace_disk_prefix_tokens", "Prompt tokens in blocks that were read from disk"),
    "read_bytes": ("headrace_disk_prefix_read_bytes", "Bytes of blocks that were read from disk"),
    "written_bytes": (
        "headrace_disk_prefix_written_bytes",
        "Bytes of blocks that were written to disk",
    ),
}
_COUNTS = (*_BY_LABEL, "disk")


class RequestFigures:
    """Counts and times a model's requests. `generation` reports their tokens and ends.

    Background requests are counted but not timed, because they wait for all other requests.
    """

    def __init__(self, families: Families, history: History, is_timed: bool = True) -> None:
        self._totals, self._times = families.totals, families.times
        self._history = history
        self._is_timed = is_timed

    def planned(self, num_prompt: int, num_cached: int, queue_s: float) -> None:
        point = self._history.now()
        point.plan(num_prompt, num_cached)
        if self._is_timed:
            point.wait("queue", queue_s)

    def answered(self, seconds: float) -> None:
        if self._is_timed:
            self._times["ttft"].observe(seconds)
            self._history.now().wait("ttft", seconds)

    def tokens(self, number: int, gap_s: float | None) -> None:
        # This runs for every token, so it calls the history only in a new second.
        point = self._history.current
        if point.number != int(self._history.clock()):
            point = self._history.now()
        point.generate(number)
        if gap_s is not None and self._is_timed:
            self._times["inter_token"].observe(gap_s)
            point.waits["gap"][bucket_of(gap_s)] += 1

    def ended(
        self, route: str, outcome: str, tally: UsageCounter, seconds: float
    ) -> tuple[Usage, Timings]:
        """Count a request, and return its usage and its timings.

        `outcome` is `finished`, or the code of the error that ended the request.
        """
        usage, timings = tally.usage, tally.timings
        totals, times = self._totals, self._times
        self.embedded(route, outcome, usage.prompt_tokens, seconds)
        totals["cached_tokens"].inc(usage.cached_tokens)
        totals["generated_tokens"].inc(usage.completion_tokens)
        totals["guessed_tokens"].inc(timings.draft_n)
        totals["accepted_tokens"].inc(timings.draft_n_accepted)
        if outcome == "finished":
            totals["ends"].labels(tally.last_end).inc()
        if self._is_timed:
            times["queue"].observe(timings.queue_ms / 1000)
            if timings.prompt_n:
                times["prompt"].observe(timings.prompt_ms / 1000)
            if tally.first_token_ms is not None:
                times["decode"].observe(timings.predicted_ms / 1000)
                times["max_gap"].observe(timings.max_gap_ms / 1000)
        return usage, timings

    def adapted(self, adapter: str, outcome: str, tally: UsageCounter) -> None:
        """Count a request again, for the adapter that the request named."""
        self._totals["adapter_requests"].labels(adapter, outcome).inc()
        self._totals["adapter_tokens"].labels(adapter).inc(tally.usage.completion_tokens)

    def embedded(self, route: str, outcome: str, num_tokens: int, seconds: float) -> None:
        """Count a request for vectors, with the tokens of the embedded inputs."""
        self._totals["requests"].labels(route, outcome).inc()
        self._totals["prompt_tokens"].inc(num_tokens)
        if self._is_timed:
            self._times["request"].observe(seconds)


class EngineFigures:
    """Counts the steps, starts and ends of a model's engine, as the engine's host reports them.

    As a collector of the registry, it also exports the counters that the engine keeps.
    """

    def __init__(self, families: Families, history: History) -> None:
        self._families, self._history = families, history
        self._num_preempted = self._num_preempted_before = 0
        self._counts = {name: Counter[str]() for name in _COUNTS}
        # The counts of engines that have ended.
        self._counts_before = {name: Counter[str]() for name in _COUNTS}
        self._num_steps = 0
        self._stepped_at: float | None = None
        families.registry.register(self)

    @property
    def last_step_age_s(self) -> float | None:
        """Return the seconds since the last reported step; None before the first step."""
        return None if self._stepped_at is None else time.monotonic() - self._stepped_at

    def collect(self) -> list[Metric]:
        preempted = CounterMetricFamily(
            "headrace_preemptions",
            "Preemptions, in which a sequence loses its memory to other sequences",
            self._num_preempted + self._num_preempted_before,
        )
        families = [preempted]
        for name, (title, help, label) in _BY_LABEL.items():
            families.append(CounterMetricFamily(title, help, labels=[label]))
            for value, number in (self._counts[name] + self._counts_before[name]).items():
                families[-1].add_metric([value], number)
        disk = self._counts["disk"] + self._counts_before["disk"]
        for name, (title, help) in _OF_DISK.items():
            families.append(CounterMetricFamily(title, help, disk[name]))
        age = GaugeMetricFamily(
            "headrace_last_step_age_seconds", "Time since the engine's last step"
        )
        if (age_s := self.last_step_age_s) is not None:
            age.add_metric([], age_s)
        return [*families, age]

    def is_up(self, ready: Ready) -> None:
        self._families.totals["engine_starts"].inc()
        self._families.gauges["engine_up"].set(1)
        self._families.gauges["stall_target_seconds"].set(ready.max_stall_s or 0)
        self._show_memory(ready, ready.layout.num_blocks, ready.layout.num_slots)

    def record_replica_down(self, news: EngineDown) -> None:
        """Count the end of one of several engines. The other engines continue."""
        cause = "killed" if news.from_outside else "died"
        self._families.totals["engine_restarts"].labels(cause).inc()

    def is_down(self, news: EngineDown) -> None:
        if not news.given_up:
            self.record_replica_down(news)
        self._families.gauges["engine_up"].set(0)
        self._num_preempted_before += self._num_preempted
        self._num_preempted = 0
        for name in _COUNTS:
            self._counts_before[name] += self._counts[name]
            self._counts[name] = Counter()

    def unloaded(self) -> None:
        """Record that the engine was stopped on purpose."""
        self._families.gauges["engine_up"].set(0)
        self._families.gauges["blocks"].clear()
        self._families.gauges["slots"].clear()

    def show_status(self, status: Status, ready: Ready | None) -> None:
        gauges, times = self._families.gauges, self._families.times
        gauges["running"].set(status.num_running)
        gauges["waiting"].set(status.num_waiting)
        gauges["waiting_tokens"].set(status.num_waiting_tokens)
        reported = {"missed": status.missed, "disk": status.disk, "disk_misses": status.disk_misses}
        if status.num_drafted:
            num_right = status.num_drafted_right
            reported["drafted"] = {"right": num_right, "wrong": status.num_drafted - num_right}
        self._counts = {name: Counter(reported.get(name)) for name in _COUNTS}
        self._num_preempted = status.num_preemptions
        # If no step has run, the report only has new values for the queue.
        if status.num_steps != self._num_steps:
            self._num_steps, self._stepped_at = status.num_steps, time.monotonic()
        if ready is not None:
            self._show_memory(ready, status.blocks_free, status.slots_free)
        self._history.now().compute(sum(step.num_prompt_tokens for step in status.steps))
        if status.steps:
            gauges["stall_target_seconds"].set(status.steps[-1].stall_target or 0)
        for step in status.steps:
            times["step"].labels(kind_of(step)).observe(step.elapsed)
            if step.predicted:
                times["step_predicted"].observe(step.predicted)

    def _show_memory(self, ready: Ready, blocks_free: int, slots_free: int) -> None:
        for name, total, free in (
            ("blocks", ready.layout.num_blocks, blocks_free),
            ("slots", ready.layout.num_slots, slots_free),
        ):
            self._families.gauges[name].labels("free").set(free)
            self._families.gauges[name].labels("used").set(total - free)


class ServerFigures:
    """Counts for all models together: the gateway's answers, and the streams."""

    def __init__(self, families: Families) -> None:
        self._families = families
        # The time of the last frame of each open event stream.
        self._frames_at: dict[object, float] = {}
        self.committed = families.times["log_commit"].observe
        self.recovered = families.totals["recovered_streams"].inc
        self.attached = families.totals["attaches"].inc

    def refused(self, error: RequestError) -> None:
        """Count a request that was answered with an error instead of a stream."""
        self._families.totals["rejections"].labels(error.code).inc()
        if error.code == "template_failed" and error.message.startswith(OVERRAN):
            self._families.totals["template_overruns"].inc()

    def resumed(self, face: str, seconds: float) -> None:
        """Record that a reader got its first byte `seconds` after its request to resume."""
        self._families.totals["resumes"].labels(face).inc()
        self._families.times["resume"].observe(seconds)

    def stopped(self, state: str, seconds: float) -> None:
        """Record that a client's stop has taken effect on a stream with this state."""
        self._families.totals["stops"].labels(state).inc()
        self._families.times["stop"].observe(seconds)

    def swept(self, store: str, num_bytes: int) -> None:
        """Record the number of bytes that a store keeps."""
        self._families.gauges["log_bytes"].labels(store).set(num_bytes)

    def frame_sent(self, connection: object) -> None:
        """Record that a frame was sent on an open event stream."""
        self._frames_at[connection] = time.monotonic()

    def frames_ended(self, connection: object) -> None:
        self._frames_at.pop(connection, None)

    def show(self, state: str, streams: Iterable[LiveFigures]) -> None:
        """Record the state of the server, and the metrics of each live stream."""
        gauges, now = self._families.gauges, time.monotonic()
        for name in _STATES:
            gauges["state"].labels(name).set(name == state)
        states, num_readers, silent_s = Counter[str](), 0, 0.0
        for stream_state, number, stream_silent_s in streams:
            states[stream_state] += 1
            num_readers += number
            silent_s = max(silent_s, stream_silent_s)
        for name in _STREAM_STATES:
            gauges["streams"].labels(name).set(states[name])
        gauges["readers"].set(num_readers)
        gauges["silent_stream_age_seconds"].set(silent_s)
        oldest_s = max((now - at for at in self._frames_at.values()), default=0)
        gauges["heartbeat_age_seconds"].set(oldest_s)


class Metrics:
    """Holds the metrics of one page: of the server, or of one model if there are several models."""

    def __init__(self, traces: Traces | None = None) -> None:
        self.traces = traces or NoTraces()
        self._families = Families()
        self.history = History()
        self.requests = RequestFigures(self._families, self.history)
        self._background = RequestFigures(self._families, self.history, is_timed=False)
        self.engine = EngineFigures(self._families, self.history)
        self.server = ServerFigures(self._families)

    def of(self, is_background: bool) -> RequestFigures:
        """Return the metrics that count a request."""
        return self._background if is_background else self.requests

    def text(
        self,
        state: str,
        streams: Iterable[LiveFigures],
        vllm_model: str = "",
        models: "Mapping[str, Metrics] | None" = None,
    ) -> bytes:
        """Return the page in Prometheus' text format, with the metrics of several models by name.

        If `vllm_model` is given, a server with one model adds its metrics under vLLM's names.
        """
        self.server.show(state, streams)
        registry = self._families.registry
        if models:
            return merged(registry, {name: it._families.registry for name, it in models.items()})
        text = generate_latest(registry)
        return text + as_vllm(registry, vllm_model) if vllm_model else text


def kind_of(step: StepTrace) -> str:
    if not step.num_prompt_tokens:
        return "decode"
    return "mixed" if step.num_decoding else "prompt"
