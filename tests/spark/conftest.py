"""One Spark session for the whole run, because a process has one JVM; configured for a fast start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyiceberg.utils.config import Config
from pyspark.sql import SparkSession

from subscriber.demo.object_store import ObjectStore
from subscriber.spark.session import QUICK, spark_session


@pytest.fixture(scope="session")
def spark_events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the session's event log, which has the plans, settings and errors of all tests before."""
    return tmp_path_factory.mktemp("spark_events")


@pytest.fixture(scope="session")
def spark(object_store: ObjectStore, spark_events: Path) -> Iterator[SparkSession]:
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
    """A catalog of Iceberg that PyIceberg is configured for: its name."""
    monkeypatch.setenv("PYICEBERG_CATALOG__SHOP__TYPE", "sql")
    monkeypatch.setenv("PYICEBERG_CATALOG__SHOP__URI", f"sqlite:///{tmp_path}/shop.db")
    monkeypatch.setenv("PYICEBERG_CATALOG__SHOP__WAREHOUSE", f"{tmp_path}/warehouse")
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())
    return "shop"
