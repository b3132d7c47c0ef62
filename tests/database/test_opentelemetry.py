"""Traces and metrics: with the SDK's exporters in memory, and sent by the command to a receiver of OTLP."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import anyio
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import subscriber
from subscriber.opentelemetry import instrument
from subscriber.settings import Settings
from subscriber.status.metrics import METRICS
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Program

pytestmark = pytest.mark.usefixtures("with_schema")

QUICK = Settings(retry_interval=0.2, empty_database_poll_interval=0.1)
STAGES = ["receive", "apply", "flush", "confirm"]


@dataclass
class Telemetry:
    """Providers that keep everything in memory."""

    spans: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)
    reader: InMemoryMetricReader = field(default_factory=InMemoryMetricReader)

    def __post_init__(self) -> None:
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self.spans))
        self.meters = MeterProvider([self.reader])

    def traces(self, **attributes: object) -> list[ReadableSpan]:
        """Return the spans without a parent that have the attributes of a transaction."""
        roots = [span for span in self.spans.get_finished_spans() if span.parent is None]
        wanted = {f"subscriber.transaction.{name}": value for name, value in attributes.items()}
        return [span for span in roots if wanted.items() <= dict(span.attributes or {}).items()]

    async def trace(self, **attributes: object) -> ReadableSpan:
        with anyio.fail_after(30):
            while not (traces := self.traces(**attributes)):
                await anyio.sleep(0.02)
        return traces[0]

    def children(self, span: ReadableSpan) -> list[ReadableSpan]:
        spans = self.spans.get_finished_spans()
        return [child for child in spans if child.parent is not None and child.parent.span_id == span.context.span_id]

    def metrics(self) -> dict[str, Any]:
        data = self.reader.get_metrics_data()
        if data is None:
            return {}
        scopes = [scope for resource in data.resource_metrics for scope in resource.scope_metrics]
        return {metric.name: metric for scope in scopes for metric in scope.metrics}


async def two_tables(source: Database, target: Database) -> None:
    for database in (source, target):
        await database.execute("CREATE TABLE city (id int PRIMARY KEY, name text)")
    await source.execute("CREATE PUBLICATION atlas FOR ALL TABLES")


async def test_a_transaction_becomes_a_trace(source_db: Database, target_db: Database) -> None:
    await two_tables(source_db, target_db)
    told = Telemetry()
    async with subscriber.connect(target_db.dsn(), settings=QUICK) as db:
        await db.create_subscription("s", source=source_db.dsn(), publications=["atlas"])
        instrumented = instrument(db, interval=0.1, tracer_provider=told.tracers, meter_provider=told.meters)
        async with instrumented, db.running():
            await db.wait_for_sync("s", timeout=60)
            await source_db.execute("INSERT INTO city SELECT i, 'Ulm' FROM generate_series(1, 7) i")
            span = await told.trace(changes=7)
            assert (span.name, span.kind, span.status.status_code) == (
                "apply transaction",
                SpanKind.CONSUMER,
                StatusCode.UNSET,
            )
            attributes = dict(span.attributes or {})
            assert attributes["subscriber.subscription"] == "s"
            assert attributes["subscriber.transaction.end"] == "COMMIT"
            children = told.children(span)
            assert [child.name for child in children] == STAGES
            times = [span.start_time, *(child.end_time for child in children)]
            assert times == sorted(times, key=lambda time: time or 0)
            assert [child.start_time for child in children] == times[:-1]
            assert span.end_time == times[-1]

            # An error: one span for each attempt, with the next step and without values of rows.
            await target_db.execute("INSERT INTO city VALUES (100, 'Linz')")
            await source_db.execute("INSERT INTO city VALUES (100, 'Graz')")
            with anyio.fail_after(30):
                while not (failed := [trace for trace in told.traces() if not trace.status.is_ok]):
                    await anyio.sleep(0.02)
            attributes = dict(failed[0].attributes or {})
            assert attributes["error.type"] == "ConflictError"
            assert attributes["db.response.status_code"] == "23505"
            assert attributes["subscriber.relation"] == "public.city"
            assert "Graz" not in failed[0].to_json()
            assert [child.name for child in told.children(failed[0])] == ["receive", "apply"]
            await target_db.execute("DELETE FROM city WHERE id = 100")
            xid = attributes["subscriber.transaction.xid"]
            with anyio.fail_after(30):
                while not [trace for trace in told.traces(xid=xid) if trace.status.is_ok]:
                    await anyio.sleep(0.02)

            metrics = told.metrics()
            assert {
                stage: point.count
                for point in metrics["subscriber.transaction.duration"].data.data_points
                if (stage := point.attributes["stage"])
            }.keys() == set(STAGES)
            assert metrics["subscriber.transaction.lag"].data.data_points[0].count >= 2
            assert metrics["subscriber.target_up"].data.data_points[0].value == 1
            assert metrics["subscriber.transactions"].data.is_monotonic
            assert metrics["subscriber.lag_bytes"].unit == "By"
            ready = [
                point.value
                for point in metrics["subscriber.tables"].data.data_points
                if point.attributes == {"subscription": "s", "state": "ready"}
            ]
            assert ready == [1]
            known = {metric.name.removesuffix("_total").replace("_", ".", 1) for metric in METRICS}
            assert metrics.keys() <= {
                *known,
                "subscriber.target_up",
                "subscriber.transaction.duration",
                "subscriber.transaction.lag",
            }
        assert "subscriber.target_up" not in told.metrics()


async def test_streamed_and_prepared_transactions_have_traces(source_db: Database, target_db: Database) -> None:
    await two_tables(source_db, target_db)
    told = Telemetry()
    async with subscriber.connect(target_db.dsn(), settings=QUICK) as db:
        source = source_db.dsn(options="-c logical_decoding_work_mem=64kB")
        await db.create_subscription(
            "s", source=source, publications=["atlas"], streaming="parallel", two_phase=True, copy_data=False
        )
        async with instrument(db, tracer_provider=told.tracers), db.running():
            await db.wait_for_sync("s", timeout=60)
            await target_db.wait_for("SELECT subtwophasestate::text FROM subscriber.subscription", "e")
            await source_db.execute("INSERT INTO city SELECT i, repeat('x', 100) FROM generate_series(1, 5000) i")
            streamed = await told.trace(end="STREAM COMMIT")
            await source_db.execute("BEGIN; INSERT INTO city VALUES (-1); PREPARE TRANSACTION 'traced'")
            prepared = await told.trace(end="PREPARE")
            await source_db.execute("COMMIT PREPARED 'traced'")
            committed = await told.trace(end="COMMIT PREPARED")
    changes = [(span.attributes or {})["subscriber.transaction.changes"] for span in (streamed, prepared, committed)]
    assert changes == [5000, 1, 0]
    assert [child.name for child in told.children(streamed)] == STAGES


async def test_the_error_of_the_block_is_raised_as_itself(target_db: Database) -> None:
    async with subscriber.connect(target_db.dsn(), settings=QUICK) as db:
        with pytest.raises(KeyError, match="mine"):
            async with instrument(db):
                raise KeyError("mine")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1), instrument(db):
                await asyncio.sleep(10)


class Broken(SpanProcessor):
    """A processor of the program that has a bug."""

    def on_end(self, span: ReadableSpan) -> None:
        raise ZeroDivisionError


async def test_a_bug_of_a_span_processor_does_not_stop_replication(
    source_db: Database, target_db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    await two_tables(source_db, target_db)
    tracers = TracerProvider()
    tracers.add_span_processor(Broken())
    async with subscriber.connect(target_db.dsn(), settings=QUICK) as db:
        await db.create_subscription("s", source=source_db.dsn(), publications=["atlas"])
        async with instrument(db, tracer_provider=tracers), db.running():
            await db.wait_for_sync("s", timeout=60)
            for number in range(3):
                await source_db.execute(f"INSERT INTO city VALUES ({number}, 'Ulm')")
            await target_db.wait_for("SELECT count(*) FROM city", 3)
            with anyio.fail_after(20):
                while "ZeroDivisionError" not in caplog.text:
                    await anyio.sleep(0.02)
    assert caplog.text.count("unexpected error: ZeroDivisionError") == 1


@dataclass
class Receiver:
    """The requests of exporters, decoded by OpenTelemetry's own definition of the protocol."""

    port: int = 0
    traces: list[ExportTraceServiceRequest] = field(default_factory=list)
    metrics: list[ExportMetricsServiceRequest] = field(default_factory=list)


@contextmanager
def otlp_receiver() -> Iterator[Receiver]:
    received = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/v1/traces":
                received.traces.append(ExportTraceServiceRequest.FromString(body))
            else:
                received.metrics.append(ExportMetricsServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        received.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield received
        finally:
            server.shutdown()
            thread.join()


async def test_the_command_sends_everything_over_otlp(
    source_db: Database, target_db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await two_tables(source_db, target_db)
    async with subscriber.connect(target_db.dsn(), settings=QUICK) as db:
        await db.create_subscription("s", source=source_db.dsn(), publications=["atlas"])
    with otlp_receiver() as received:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{received.port}")
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "500")
        program = Program(target_db.dsn(), tmp_path / "run.log", options=["--opentelemetry"])
        await program.start("apply worker.* has started")
        try:
            await source_db.execute("INSERT INTO city VALUES (1, 'Ulm')")
            await target_db.wait_for("SELECT count(*) FROM city", 1)
            with anyio.fail_after(60):
                while not received.metrics:
                    await anyio.sleep(0.05)
            await source_db.wait_for_catchup("s")
        finally:
            await program.stop()
        assert "opentelemetry" not in program.text
    spans = [
        span
        for request in received.traces
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    names = [span.name for span in spans]
    assert "apply transaction" in names
    assert {*STAGES} <= {*names}
    (service,) = {
        attribute.value.string_value
        for request in received.traces
        for resource in request.resource_spans
        for attribute in resource.resource.attributes
        if attribute.key == "service.name"
    }
    assert service == "subscriber"
    metrics = {
        metric.name
        for request in received.metrics
        for resource in request.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    assert {"subscriber.target_up", "subscriber.lag_bytes", "subscriber.transaction.duration"} <= metrics
