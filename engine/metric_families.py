"""Short ways to say a metric with its values; every name begins with ``hicache_``."""

from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from hicache.histogram import Histogram


def counter(name: str, text: str, value: float) -> Metric:
    """Return a total."""
    return CounterMetricFamily(f"hicache_{name}", text, value=value)


def by_label(name: str, text: str, label: str, values: Iterable[tuple[str, float]]) -> Metric:
    """Return totals by one label."""
    return by_labels(name, text, (label,), [((key,), value) for key, value in values])


def by_labels(
    name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]
) -> Metric:
    """Return totals by several labels."""
    family = CounterMetricFamily(f"hicache_{name}", text, labels=labels)
    for key, value in values:
        family.add_metric(key, value)
    return family


def gauge(name: str, text: str, value: float) -> Metric:
    """Return a value that goes up and down."""
    return GaugeMetricFamily(f"hicache_{name}", text, value=value)


def gauges(name: str, text: str, label: str, values: Iterable[tuple[str, float]]) -> Metric:
    """Return such values by one label."""
    family = GaugeMetricFamily(f"hicache_{name}", text, labels=[label])
    for key, value in values:
        family.add_metric([key], value)
    return family


def histograms(name: str, text: str, label: str, values: Iterable[tuple[str, Histogram]]) -> Metric:
    """Return durations by bucket, and by one label."""
    family = HistogramMetricFamily(f"hicache_{name}", text, labels=[label])
    for key, histogram in values:
        bounds = [*map(str, histogram.bounds_s), "+Inf"]
        counts = map(float, accumulate(histogram.counts))
        family.add_metric([key], list(zip(bounds, counts, strict=True)), histogram.sum_s)
    return family
