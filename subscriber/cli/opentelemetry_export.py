"""`subscriber run --opentelemetry`: send traces and metrics over OTLP/HTTP, as OpenTelemetry's variables say."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import anyio
import anyio.to_thread

from subscriber.catalog.connection import CatalogConnection
from subscriber.errors import SubscriberError
from subscriber.opentelemetry import instrument_status
from subscriber.settings import DEFAULTS, Settings
from subscriber.sqlstate import UNDEFINED_FILE
from subscriber.status.collect import assess_all, read_catalog
from subscriber.status.model import SubscriptionStatus

try:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
except ModuleNotFoundError as error:
    raise SubscriberError(
        f"{error.name} is not installed",
        hint="Install it with: pip install 'pgsubscriber[opentelemetry]'",
        sqlstate=UNDEFINED_FILE,
    ) from None

FLUSH_TIMEOUT = 5.0  # seconds to send the last spans and metrics when the command ends


@asynccontextmanager
async def exporting(target: str, settings: Settings = DEFAULTS) -> AsyncIterator[None]:
    """Send traces and metrics until the end of the block.

    Args:
        target: the connection string of the target.
        settings: time-outs.
    """

    async def read() -> Sequence[SubscriptionStatus]:
        with anyio.fail_after(settings.http_target_timeout):
            async with CatalogConnection.open(target, "subscriber status") as catalog:
                look = await read_catalog(catalog)
        return await assess_all(look, settings)

    resource = Resource.create()
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "subscriber"}))
    tracer_provider = TracerProvider(resource=resource)
    if os.environ.get("OTEL_TRACES_EXPORTER") != "none":
        tracer_provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    has_metrics = os.environ.get("OTEL_METRICS_EXPORTER") != "none"
    readers = [PeriodicExportingMetricReader(OTLPMetricExporter())] if has_metrics else []
    meter_provider = MeterProvider(readers, resource)
    try:
        async with instrument_status(read, tracer_provider, meter_provider):
            try:
                yield
            finally:
                await _flush(meter_provider)
    finally:
        await _flush(tracer_provider)


async def _flush(provider: TracerProvider | MeterProvider) -> None:
    flush = partial(provider.force_flush, int(FLUSH_TIMEOUT * 1000))
    with anyio.move_on_after(FLUSH_TIMEOUT, shield=True):
        await anyio.to_thread.run_sync(flush, abandon_on_cancel=True)
