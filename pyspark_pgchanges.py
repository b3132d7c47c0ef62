"""Where Spark looks for data sources by itself: modules named pyspark_*, with a class DefaultSource."""

from __future__ import annotations

from subscriber.spark.sources.pgchanges import ChangesSource as DefaultSource

__all__ = ["DefaultSource"]
