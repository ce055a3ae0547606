"""One page of figures for several models: each model's samples carry its name."""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample


class _Merged:
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


def merged(common: CollectorRegistry, models: Mapping[str, CollectorRegistry]) -> bytes:
    """In Prometheus' text format."""
    whole = CollectorRegistry()
    whole.register(_Merged(common, models))
    return generate_latest(whole)
