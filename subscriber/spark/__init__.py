"""The data pipeline on Spark: the change log and tables as data sources, the lake.

    from pyspark.sql import SparkSession
    from subscriber.spark import Lake, apply_changes

The names in `__all__` are public. The package needs the extra `spark`. Each name is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from subscriber.spark.environment import prepare_environment
    from subscriber.spark.lake.lake import Lake
    from subscriber.spark.pgcdc import register as register_cdc
    from subscriber.spark.publisher_log import archiving
    from subscriber.spark.scd.apply import apply_changes
    from subscriber.spark.snapshot.writer import write_snapshot
    from subscriber.spark.sources.pgchanges import register as register_changes
    from subscriber.spark.sources.pgsnapshot import exported_snapshot
    from subscriber.spark.sources.pgsnapshot import register as register_snapshots

__all__ = [
    "Lake",
    "apply_changes",
    "archiving",
    "exported_snapshot",
    "prepare_environment",
    "register_cdc",
    "register_changes",
    "register_snapshots",
    "write_snapshot",
]

# Public name -> module, and name in that module.
_HOMES = {
    "Lake": ("subscriber.spark.lake.lake", "Lake"),
    "apply_changes": ("subscriber.spark.scd.apply", "apply_changes"),
    "archiving": ("subscriber.spark.publisher_log", "archiving"),
    "exported_snapshot": ("subscriber.spark.sources.pgsnapshot", "exported_snapshot"),
    "prepare_environment": ("subscriber.spark.environment", "prepare_environment"),
    "register_cdc": ("subscriber.spark.pgcdc", "register"),
    "register_changes": ("subscriber.spark.sources.pgchanges", "register"),
    "register_snapshots": ("subscriber.spark.sources.pgsnapshot", "register"),
    "write_snapshot": ("subscriber.spark.snapshot.writer", "write_snapshot"),
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'subscriber.spark' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return __all__
