"""instrument(): OpenTelemetry's traces and metrics of the subscriptions of a program.

    async with subscriber.connect(dsn) as db, instrument(db), db.running():
        …

Each transaction that a worker of the block applies becomes a trace: a span from its arrival to its confirmation, with a
child for each stage (`receive`, `apply`, `flush`, `confirm`). The spans are made when the transaction has ended, from
the times in transaction_times.py. Names and attributes are in docs/monitoring.md. They have no values of rows.

The package needs OpenTelemetry's API only. Without a provider, OpenTelemetry's global ones are used, which the program
has set.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial

import anyio

from subscriber import __version__, telemetry
from subscriber.database import Database
from subscriber.errors import SubscriberError
from subscriber.sqlstate import UNDEFINED_FILE
from subscriber.status.metrics import METRICS, TARGET_UP, MetricSpec
from subscriber.status.model import SubscriptionStatus
from subscriber.timestamps import to_datetime, to_unix
from subscriber.transaction_times import TimesReceiver, TransactionTimes, measured_by

try:
    from opentelemetry import metrics, trace
    from opentelemetry.context import Context
    from opentelemetry.metrics import CallbackOptions, Histogram, Meter, MeterProvider, Observation
    from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, TracerProvider
except ModuleNotFoundError as error:
    raise SubscriberError(
        f"{error.name} is not installed",
        hint="Install it with: pip install 'pgsubscriber[opentelemetry]'",
        sqlstate=UNDEFINED_FILE,
    ) from None

NAME = "subscriber"  # of the tracer and the meter
INTERVAL = 15.0  # seconds between two reads of the status
BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)  # seconds
STAGES = ("receive", "apply", "flush", "confirm")
UNITS = {"_bytes": "By", "_seconds": "s"}

StatusReader = Callable[[], Awaitable[Sequence[SubscriptionStatus]]]
_EMPTY = Context()  # a transaction has a trace of its own


@asynccontextmanager
async def instrument(
    db: Database,
    *,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
    interval: float = INTERVAL,
) -> AsyncIterator[None]:
    """Send traces of the transactions that are applied, and metrics of all subscriptions, until the end of the block.

    Launchers that are started in the block are traced: open `db.running()` inside of it.

    Args:
        db: the target.
        tracer_provider: receives the traces. None: OpenTelemetry's global provider.
        meter_provider: receives the metrics. None: OpenTelemetry's global provider.
        interval: seconds between two reads of the status for the metrics. A read queries the target and the publishers.

    Raises:
        SubscriberError: OpenTelemetry is not installed.
    """
    async with instrument_status(db.status, tracer_provider, meter_provider, interval):
        yield


@asynccontextmanager
async def instrument_status(
    read: StatusReader,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
    interval: float = INTERVAL,
) -> AsyncIterator[None]:
    """Register the metrics of a function that reads the status, as instrument() does for a database."""
    tracer = trace.get_tracer(NAME, __version__, tracer_provider)
    meter = metrics.get_meter(NAME, __version__, meter_provider)
    spans, status = TransactionRecorder(tracer, meter), StatusMetrics(meter)
    error: Exception | None = None
    with measured_by(spans.receiver_for):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(status.follow, read, interval)
            try:
                yield
            except Exception as raised:  # raised below, outside of the group
                error = raised
            finally:
                tasks.cancel_scope.cancel()
    if error is not None:
        raise error


class StatusMetrics:
    """The metrics of the status as observable instruments. They show the last status that was read."""

    def __init__(self, meter: Meter) -> None:
        self._statuses: Sequence[SubscriptionStatus] = ()
        self._is_up: bool | None = None  # None: not read yet, or no longer
        name, says = TARGET_UP
        meter.create_observable_gauge(_instrument_name(name), [self._observe_target], "", says)
        for metric in METRICS:
            create = meter.create_observable_counter if metric.is_counter else meter.create_observable_gauge
            unit = next((unit for end, unit in UNITS.items() if metric.name.removesuffix("_total").endswith(end)), "")
            create(_instrument_name(metric.name), [partial(self._observe, metric)], unit, metric.says)

    async def follow(self, read: StatusReader, interval: float) -> None:
        """Read the status until canceled."""
        try:
            while True:
                try:
                    self._statuses, self._is_up = await read(), True
                except (SubscriberError, OSError):
                    self._statuses, self._is_up = (), False
                except Exception as error:
                    self._statuses = ()
                    telemetry.log_error(error, event="opentelemetry.failed")
                await anyio.sleep(interval)
        finally:
            self._statuses, self._is_up = (), None

    # The SDK calls these functions in a thread of its own.

    def _observe_target(self, _options: CallbackOptions) -> Iterator[Observation]:
        if (is_up := self._is_up) is not None:
            yield Observation(int(is_up))

    def _observe(self, metric: MetricSpec, _options: CallbackOptions) -> Iterator[Observation]:
        now = datetime.now(UTC)
        for status in self._statuses:
            for value, number in metric.samples(status, now).items():
                yield Observation(number, {"subscription": status.name, **({metric.label: value} if value else {})})


class TransactionRecorder:
    """Makes the spans and durations of transactions."""

    def __init__(self, tracer: Tracer, meter: Meter) -> None:
        self._tracer = tracer
        self._broken: set[str] = set()  # subscriptions whose transactions could not be recorded
        self._durations = _histogram(meter, "subscriber.transaction.duration", "time of a transaction in each stage")
        self._lags = _histogram(
            meter,
            "subscriber.transaction.lag",
            "time from the commit on the publisher until it is durable on the target, by two clocks",
        )

    def receiver_for(self, subscription: str) -> TimesReceiver:
        """Return the function that records the transactions of a subscription."""
        return partial(self._receive, subscription)

    def _receive(self, subscription: str, times: TransactionTimes) -> None:
        if subscription in self._broken:
            return
        try:
            self._record(subscription, times)
        except Exception as error:  # of the program's span processor: replication goes on
            self._broken.add(subscription)
            telemetry.log_error(error, subscription=subscription, event="opentelemetry.failed")

    def _record(self, subscription: str, times: TransactionTimes) -> None:
        reached = [times.received, times.applied, times.flushed, times.confirmed]
        ends = [end for end in reached if end is not None]
        starts = [times.began, *ends]
        stages = list(zip(STAGES, starts, ends, strict=False))
        if times.failed is not None:
            stages.append((STAGES[len(ends)], starts[-1], times.failed))
        for stage, start, end in stages:
            self._durations.record((end - start) / 1e9, {"subscription": subscription, "stage": stage})
        if times.flushed is not None:
            lag = times.flushed / 1e9 - to_unix(times.committed) / 1e6
            self._lags.record(max(0.0, lag), {"subscription": subscription})
        span = self._tracer.start_span(
            "apply transaction",
            _EMPTY,
            SpanKind.CONSUMER,
            _attributes(subscription, times),
            start_time=times.began,
        )
        if span.is_recording():
            if times.error is not None:
                _set_error(span, times.error)
            inside = trace.set_span_in_context(span, _EMPTY)
            for stage, start, end in stages:
                self._tracer.start_span(stage, inside, start_time=start).end(end)
        span.end(stages[-1][2] if stages else times.began)


def _histogram(meter: Meter, name: str, says: str) -> Histogram:
    return meter.create_histogram(name, "s", says, explicit_bucket_boundaries_advisory=BUCKETS)


def _instrument_name(metric: str) -> str:
    """Return subscriber.lag_bytes for subscriber_lag_bytes. Counters have no suffix in OpenTelemetry."""
    return metric.removesuffix("_total").replace("_", ".", 1)


def _attributes(subscription: str, times: TransactionTimes) -> dict[str, str | int]:
    attributes: dict[str, str | int] = {
        "db.system.name": "postgresql",
        "subscriber.subscription": subscription,
        "subscriber.transaction.xid": times.xid,
        "subscriber.transaction.changes": times.changes,
        "subscriber.transaction.bytes": times.bytes,
    }
    if times.received is not None:
        attributes["subscriber.transaction.end"] = times.kind
        attributes["subscriber.transaction.finish_lsn"] = str(times.finish_lsn)
        attributes["subscriber.transaction.commit_time"] = to_datetime(times.committed).isoformat()
    return attributes


def _set_error(span: Span, error: SubscriberError) -> None:
    parts = telemetry.parts_without_values(error)
    span.set_status(Status(StatusCode.ERROR, parts.message))
    span.set_attribute("error.type", type(error).__name__)
    span.set_attribute("db.response.status_code", error.sqlstate)
    if error.relation is not None:
        span.set_attribute("subscriber.relation", error.relation)
    if parts.hint is not None:
        span.set_attribute("subscriber.hint", parts.hint)
