"""One Spark session for the whole run, because a process has one JVM; configured for a fast start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyiceberg.utils.config import Config
from pyspark.sql import SparkSession

from subscriber.spark.session import QUICK, spark_session
from tests.plugins.fix_object_store import Server


@pytest.fixture(scope="session")
def spark_events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the session's event log, which has the plans, settings and errors of all tests before."""
    return tmp_path_factory.mktemp("spark_events")


@pytest.fixture(scope="session")
def spark(object_store: Server, google_store: int, spark_events: Path) -> Iterator[SparkSession]:
    conf = {
        "spark.sql.shuffle.partitions": "2",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": f"file:{spark_events}",
        "spark.eventLog.compress": "false",
        "spark.ui.enabled": "true",
        "spark.ui.port": "0",
    }
    with spark_session(master="local[2,4]", conf=conf, java_options=QUICK) as session:
        yield session


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A SQL catalog of Iceberg that PyIceberg is configured for: its name."""
    place = f"{tmp_path}/warehouse"
    return configured(monkeypatch, TYPE="sql", URI=f"sqlite:///{tmp_path}/shop.db", WAREHOUSE=place)


@pytest.fixture
def rest_catalog(object_store: Server, object_server: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """A REST catalog of Iceberg that PyIceberg is configured for: its name."""
    return configured(monkeypatch, **object_store.create_catalog())


def configured(monkeypatch: pytest.MonkeyPatch, **options: str) -> str:
    """Configure PyIceberg for a catalog. Returns its name."""
    for name, value in options.items():
        monkeypatch.setenv(f"PYICEBERG_CATALOG__SHOP__{name}", value)
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())
    return "shop"
