"""Figures as Prometheus reads them: several models on one page, or by the names of vLLM."""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample


def merged(common: CollectorRegistry, models: Mapping[str, CollectorRegistry]) -> bytes:
    """One page, on which each model's samples carry its name."""
    return _page(_Merged(common, models))


def as_vllm(ours: CollectorRegistry, model: str) -> bytes:
    """Our figures for dashboards that know vLLM's names."""
    return _page(_Renamed(ours, model))


def _page(collector: Collector) -> bytes:
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry)


class _Merged(Collector):
    """The families of several registries, each family once."""

    def __init__(self, common: CollectorRegistry, models: Mapping[str, CollectorRegistry]) -> None:
        self._common, self._models = common, models

    def collect(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}
        for family in self._common.collect():
            found[family.name] = family
        for name, registry in self._models.items():
            for family in registry.collect():
                if family.name not in found:
                    found[family.name] = Metric(family.name, family.documentation, family.type)
                found[family.name].samples += [_of(sample, name) for sample in family.samples]
        yield from found.values()


def _of(sample: Sample, model: str) -> Sample:
    return sample._replace(labels={**sample.labels, "model": model})


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
        """The usage of blocks; of slots where a model has no blocks."""
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
