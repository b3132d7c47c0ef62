"""The metrics of /metrics in Prometheus's format, computed from the status at the moment of the request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from subscriber.status.metrics import GENERAL, METRICS, MetricSpec
from subscriber.status.model import SubscriptionStatus
from subscriber.status.snapshot import StatusSnapshot

Family = CounterMetricFamily | GaugeMetricFamily


@dataclass(frozen=True, slots=True, eq=False)  # the registry identifies collectors by identity
class _Figures(Collector):
    """All metrics of one moment. `look` is None if the target does not answer."""

    look: StatusSnapshot | None
    statuses: Sequence[SubscriptionStatus]
    standby: bool | None

    def collect(self) -> Iterator[Family]:
        up = self.look is not None
        launcher = None if self.look is None else self.look.launcher_pid is not None
        for (name, says), value in zip(GENERAL.items(), (up, launcher, self.standby), strict=True):
            if value is not None:
                yield GaugeMetricFamily(name, says, value=value)
        if self.look is not None:
            for metric in METRICS:
                yield _family(metric, self.statuses, self.look.at)


def _family(metric: MetricSpec, statuses: Sequence[SubscriptionStatus], now: datetime) -> Family:
    labels = ["subscription", metric.label] if metric.label else ["subscription"]
    family = (CounterMetricFamily if metric.is_counter else GaugeMetricFamily)(metric.name, metric.says, labels=labels)
    for status in statuses:
        for value, number in metric.samples(status, now).items():
            family.add_metric([status.name, value][: len(labels)], number)
    return family


def exposition(
    look: StatusSnapshot | None, statuses: Sequence[SubscriptionStatus], *, standby: bool, accept: str
) -> tuple[bytes, str]:
    """Return the metrics for a client that accepts `accept`, and their content type.

    Memory and processor time of this process are included.

    Args:
        look: the snapshot; None if the target does not answer.
        standby: another launcher is active.
        accept: the request's Accept header.
    """
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(_Figures(look, statuses, standby if look else None))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type
