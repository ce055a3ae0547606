"""The same figures by vLLM's names, for dashboards that know those."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_SAME = {
    "headrace_running": "vllm:num_requests_running",
    "headrace_waiting": "vllm:num_requests_waiting",
    "headrace_preemptions": "vllm:num_preemptions",
    "headrace_prompt_tokens": "vllm:prompt_tokens",
    "headrace_generated_tokens": "vllm:generation_tokens",
    "headrace_ttft_seconds": "vllm:time_to_first_token_seconds",
    "headrace_inter_token_seconds": "vllm:inter_token_latency_seconds",
    "headrace_queue_seconds": "vllm:request_queue_time_seconds",
    "headrace_prompt_seconds": "vllm:request_prefill_time_seconds",
    "headrace_decode_seconds": "vllm:request_decode_time_seconds",
    "headrace_request_seconds": "vllm:e2e_request_latency_seconds",
}


class _Renamed(Collector):
    """Every sample of a family under its other name, with the labels that vLLM gives it."""

    def __init__(self, ours: CollectorRegistry, model: str) -> None:
        self._ours = ours
        self._labels = {"model_name": model, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        found = {family.name: family for family in self._ours.collect()}
        for ours, theirs in _SAME.items():
            yield self._renamed(found[ours], theirs)
        yield self._sum("prefix_cache_queries", "Prompt tokens looked up", found, "prompt_tokens")
        yield self._sum("prefix_cache_hits", "Prompt tokens found", found, "cached_tokens")
        yield self._cache_usage(found)
        names = list(self._labels)
        ends = CounterMetricFamily(
            "vllm:request_success", "Requests that ended whole", labels=[*names, "finished_reason"]
        )
        for sample in found["headrace_ends"].samples:
            if sample.name.endswith("_total"):
                ends.add_metric([*self._labels.values(), sample.labels["reason"]], sample.value)
        yield ends

    def _renamed(self, family: Metric, name: str) -> Metric:
        renamed = Metric(name, family.documentation, family.type)
        for sample in family.samples:
            suffix = sample.name.removeprefix(family.name)
            if suffix != "_created":
                renamed.add_sample(name + suffix, self._labels | sample.labels, sample.value)
        return renamed

    def _sum(self, name: str, help: str, found: dict[str, Metric], ours: str) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", help, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), _total(found[f"headrace_{ours}"]))
        return family

    def _cache_usage(self, found: dict[str, Metric]) -> Metric:
        """Of blocks; of slots where a model has no blocks."""
        family = GaugeMetricFamily(
            "vllm:kv_cache_usage_perc", "Share in use, 0 to 1", labels=list(self._labels)
        )
        used = 0.0
        for name in ("headrace_slots", "headrace_blocks"):
            by_state = {s.labels["state"]: s.value for s in found[name].samples}
            if total := sum(by_state.values()):
                used = by_state["used"] / total
        family.add_metric(list(self._labels.values()), used)
        return family


def _total(family: Metric) -> float:
    return sum(sample.value for sample in family.samples if sample.name.endswith("_total"))


def as_vllm(ours: CollectorRegistry, model: str) -> bytes:
    """The figures of this registry in Prometheus' text format, by vLLM's names."""
    registry = CollectorRegistry()
    registry.register(_Renamed(ours, model))
    return generate_latest(registry)
