"""Figures for Prometheus, by who tells them: what requests took, how the server stands. No ids.

A request is counted once, when its stream ends; sums of tokens are those of the usage told. Gaps
and times to the first token are told as they happen. Nothing here waits, so a scrape never does.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from headrace.engines.client import EngineDown
from headrace.metrics.exposition import as_vllm, merged
from headrace.metrics.families import Families
from headrace.metrics.history import History, class_of
from headrace.metrics.traces import NoTraces, Traces
from headrace.streams.events import Timings, Usage
from headrace.streams.tally import Tally
from headrace_common.errors import OVERRAN, RequestError
from headrace_common.messages import Ready, Status, StepTrace

_STATES = ("loading", "ok", "recovering", "draining", "dead")
_STREAM_STATES = ("queued", "prompt", "decode", "recovering")

LiveFigures = tuple[str, int, float]
"""The state of a live stream, its number of readers, and the seconds since its last news."""
_BY_LABEL = {  # counts of an engine: title, help, label
    "missed": ("headrace_stall_target_missed", "Steps that missed the stall target", "cause"),
    "disk_misses": ("headrace_disk_prefix_misses", "Runs on disk that were computed", "reason"),
}
_OF_DISK = {
    "runs": ("headrace_disk_prefix_hits", "Runs of blocks that were read instead of computed"),
    "tokens": ("headrace_disk_prefix_tokens", "Their tokens"),
    "read_bytes": ("headrace_disk_prefix_read_bytes", "Their bytes"),
    "written_bytes": ("headrace_disk_prefix_written_bytes", "Bytes of runs that were written"),
}
_COUNTS = (*_BY_LABEL, "disk")


class RequestFigures:
    """Figures of a model's requests, told by generation; watches each stream that runs.

    Those of the background are counted, but not timed: they wait for all others.
    """

    def __init__(self, families: Families, history: History, is_timed: bool = True) -> None:
        self._totals, self._times = families.totals, families.times
        self._history = history
        self._is_timed = is_timed

    def planned(self, num_prompt: int, num_cached: int, queue_s: float) -> None:
        point = self._history.now()
        point.prompt += num_prompt
        point.cached += num_cached
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
        point.generated += number
        if gap_s is not None and self._is_timed:
            self._times["inter_token"].observe(gap_s)
            point.waits["gap"][class_of(gap_s)] += 1

    def ended(
        self, route: str, outcome: str, tally: Tally, seconds: float
    ) -> tuple[Usage, Timings]:
        """Count a request, and return its usage and timings.

        `outcome` is how it finished, or the code of its error.
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

    def adapted(self, adapter: str, outcome: str, tally: Tally) -> None:
        """The same request, which named an adapter."""
        self._totals["adapter_requests"].labels(adapter, outcome).inc()
        self._totals["adapter_tokens"].labels(adapter).inc(tally.usage.completion_tokens)

    def embedded(self, route: str, outcome: str, num_tokens: int, seconds: float) -> None:
        """A request for vectors: the tokens of those that it got."""
        self._totals["requests"].labels(route, outcome).inc()
        self._totals["prompt_tokens"].inc(num_tokens)
        if self._is_timed:
            self._times["request"].observe(seconds)


class EngineFigures:
    """Figures of a model's engine, told by its host. It collects those that the engine counts."""

    def __init__(self, families: Families, history: History) -> None:
        self._families, self._history = families, history
        self._num_preempted = self._num_preempted_before = 0
        self._counts = {name: Counter[str]() for name in _COUNTS}
        self._counts_before = {name: Counter[str]() for name in _COUNTS}  # of engines that ended
        self._num_steps = 0
        self._stepped_at: float | None = None
        families.registry.register(self)

    @property
    def last_step_age_s(self) -> float | None:
        """Seconds since its last step was told; None before the first."""
        return None if self._stepped_at is None else time.monotonic() - self._stepped_at

    def collect(self) -> list[Metric]:
        preempted = CounterMetricFamily(
            "headrace_preemptions",
            "Times that a sequence lost its memory to others",
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
        age = GaugeMetricFamily("headrace_last_step_age_seconds", "Since the engine's last step")
        if (age_s := self.last_step_age_s) is not None:
            age.add_metric([], age_s)
        return [*families, age]

    def is_up(self, ready: Ready) -> None:
        self._families.totals["engine_starts"].inc()
        self._families.gauges["engine_up"].set(1)
        self._families.gauges["stall_target_seconds"].set(ready.max_stall_s or 0)
        self._show_memory(ready, ready.layout.num_blocks, ready.layout.num_slots)

    def replica_is_down(self, news: EngineDown) -> None:
        """Counts the death of one of several engines; the others run on."""
        cause = "killed" if news.from_outside else "died"
        self._families.totals["engine_restarts"].labels(cause).inc()

    def is_down(self, news: EngineDown) -> None:
        if not news.given_up:
            self.replica_is_down(news)
        self._families.gauges["engine_up"].set(0)
        self._num_preempted_before += self._num_preempted
        self._num_preempted = 0
        for name in _COUNTS:
            self._counts_before[name] += self._counts[name]
            self._counts[name] = Counter()

    def unloaded(self) -> None:
        """The engine has left, as it should."""
        self._families.gauges["engine_up"].set(0)
        self._families.gauges["blocks"].clear()
        self._families.gauges["slots"].clear()

    def show_status(self, status: Status, ready: Ready | None) -> None:
        gauges, times = self._families.gauges, self._families.times
        gauges["running"].set(status.num_running)
        gauges["waiting"].set(status.num_waiting)
        gauges["waiting_tokens"].set(status.num_waiting_tokens)
        told = {"missed": status.missed, "disk": status.disk, "disk_misses": status.disk_misses}
        self._counts = {name: Counter(counts) for name, counts in told.items()}
        self._num_preempted = status.num_preemptions
        if status.num_steps != self._num_steps:  # else the figures of a queue alone
            self._num_steps, self._stepped_at = status.num_steps, time.monotonic()
        if ready is not None:
            self._show_memory(ready, status.blocks_free, status.slots_free)
        self._history.now().computed += sum(step.num_prompt_tokens for step in status.steps)
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
    """Figures of the server, whichever model: its answers, told by the gateway, and its streams."""

    def __init__(self, families: Families) -> None:
        self._families = families
        self._frames_at: dict[object, float] = {}  # of each open event stream, the last
        self.committed = families.times["log_commit"].observe
        self.recovered = families.totals["recovered_streams"].inc
        self.attached = families.totals["attaches"].inc

    def refused(self, error: RequestError) -> None:
        """A request was answered with an error instead of a stream."""
        self._families.totals["rejections"].labels(error.code).inc()
        if error.code == "template_failed" and error.message.startswith(OVERRAN):
            self._families.totals["template_overruns"].inc()

    def resumed(self, face: str, seconds: float) -> None:
        """A reader's first byte has left, `seconds` after it had asked."""
        self._families.totals["resumes"].labels(face).inc()
        self._families.times["resume"].observe(seconds)

    def stopped(self, state: str, seconds: float) -> None:
        """A client's stop has had its effect on a stream that was in this state."""
        self._families.totals["stops"].labels(state).inc()
        self._families.times["stop"].observe(seconds)

    def swept(self, store: str, num_bytes: int) -> None:
        """Takes the number of bytes that a store keeps."""
        self._families.gauges["log_bytes"].labels(store).set(num_bytes)

    def frame_left(self, connection: object) -> None:
        """An open event stream has been sent a frame."""
        self._frames_at[connection] = time.monotonic()

    def frames_ended(self, connection: object) -> None:
        self._frames_at.pop(connection, None)

    def show(self, state: str, streams: Iterable[LiveFigures]) -> None:
        """Takes how the server stands, and the figures of each live stream."""
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
    """A page of all figures: the server's, or one model's where there are several."""

    def __init__(self) -> None:
        self._families = Families()
        self.history = History()
        self.requests = RequestFigures(self._families, self.history)
        self._background = RequestFigures(self._families, self.history, is_timed=False)
        self.engine = EngineFigures(self._families, self.history)
        self.server = ServerFigures(self._families)
        self.traces: Traces = NoTraces()

    def of(self, is_background: bool) -> RequestFigures:
        """The figures that a request counts among."""
        return self._background if is_background else self.requests

    def text(
        self,
        state: str,
        streams: Iterable[LiveFigures],
        vllm_model: str = "",
        models: "Mapping[str, Metrics] | None" = None,
    ) -> bytes:
        """The page in Prometheus' text format, with those of several models by their names.

        With a model's name for vLLM, by vLLM's names too.
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
