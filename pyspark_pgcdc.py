"""Where Spark looks for data sources by itself: modules named pyspark_*, with a class DefaultSource."""

from __future__ import annotations

from subscriber.spark.pgcdc import CdcSource as DefaultSource

__all__ = ["DefaultSource"]
