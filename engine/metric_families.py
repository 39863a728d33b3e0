"""Short ways to say a metric with its values; every name begins with ``hicache_``."""

from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


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
