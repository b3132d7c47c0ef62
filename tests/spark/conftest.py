"""One Spark session for the whole run, because a process has one JVM; configured for a fast start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from subscriber.demo.object_store import ObjectStore
from subscriber.spark.session import QUICK, spark_session


@pytest.fixture(scope="session")
def spark(object_store: ObjectStore) -> Iterator[SparkSession]:
    with spark_session(master="local[2,4]", conf={"spark.sql.shuffle.partitions": "2"}, java_options=QUICK) as session:
        yield session
