"""Formats metrics for Prometheus: several models on one page, or under vLLM's names."""

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class _Collected(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def merged(common: CollectorRegistry, models: Mapping[str, CollectorRegistry]) -> bytes:
    """Return one page with each metric once. Samples of a model have its name as a label."""
    found = {family.name: family for family in common.collect()}
    for name, registry in models.items():
        for family in registry.collect():
            empty = Metric(family.name, family.documentation, family.type)
            found.setdefault(family.name, empty).samples += [
                sample._replace(labels={**sample.labels, "model": name})
                for sample in family.samples
            ]
    return generate_latest(_Collected(found.values()))


_SAME = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:num_preemptions": "preemptions",
    "vllm:prompt_tokens": "prompt_tokens",
    "vllm:generation_tokens": "generated_tokens",
    "vllm:time_to_first_token_seconds": "ttft_seconds",
    "vllm:inter_token_latency_seconds": "inter_token_seconds",
    "vllm:request_queue_time_seconds": "queue_seconds",
    "vllm:request_prefill_time_seconds": "prompt_seconds",
    "vllm:request_decode_time_seconds": "decode_seconds",
    "vllm:e2e_request_latency_seconds": "request_seconds",
}


def as_vllm(ours: CollectorRegistry, model: str) -> bytes:
    """Return Headrace's metrics for dashboards that use vLLM's names."""
    found = {family.name.removeprefix("headrace_"): family for family in ours.collect()}
    labels = {"model_name": model, "engine": "0"}
    page = [_renamed(found[name], theirs, labels) for theirs, name in _SAME.items()]
    looked_up, hits = found["prompt_tokens"], found["cached_tokens"]
    page += [
        _renamed(
            looked_up,
            "vllm:prefix_cache_queries",
            labels,
            "Prompt tokens looked up in the prefix cache",
        ),
        _renamed(hits, "vllm:prefix_cache_hits", labels, "Prompt tokens found in the prefix cache"),
    ]
    usage = GaugeMetricFamily(
        "vllm:kv_cache_usage_perc", "Used share of the cache memory, 0 to 1", labels=list(labels)
    )
    usage.add_metric(list(labels.values()), _usage(found))
    ends = _renamed(found["ends"], "vllm:request_success", labels, "Requests that finished")
    for sample in ends.samples:
        sample.labels["finished_reason"] = sample.labels.pop("reason")
    return generate_latest(_Collected([*page, usage, ends]))


def _renamed(family: Metric, name: str, labels: dict[str, str], help: str = "") -> Metric:
    """Return the metric under another name, with the labels that vLLM uses."""
    renamed = Metric(name, help or family.documentation, family.type)
    for sample in family.samples:
        suffix = sample.name.removeprefix(family.name)
        if suffix != "_created":
            renamed.add_sample(name + suffix, labels | sample.labels, sample.value)
    return renamed


def _usage(found: dict[str, Metric]) -> float:
    """Return the used fraction of the blocks, or of the slots if the model has no blocks."""
    used = 0.0
    for name in ("slots", "blocks"):
        by_state = {sample.labels["state"]: sample.value for sample in found[name].samples}
        if total := sum(by_state.values()):
            used = by_state["used"] / total
    return used
