"""An SCD-2 dimension of one table: a Delta table with all versions of its rows, kept by Spark.

    python examples/dimension.py SOURCE_DSN PUBLICATION DIRECTORY public.customers id

Run it every hour, or add --follow to have it run until Ctrl-C. DIRECTORY gets the snapshot that the dimension begins
with, the log of the changes after it, and the Delta table.

Shows: rows and changes straight from a publisher, apply_changes() with SCD type 2, the versions that were valid at a
time.
"""

from __future__ import annotations

import argparse
import re
from datetime import datetime
from pathlib import Path

from deltalake import DeltaTable
from pyarrow.compute import field
from pyspark.sql import SparkSession

from subscriber.spark import apply_changes
from subscriber.spark.session import spark_session


def update(
    spark: SparkSession, source: str, publication: str, directory: Path, table: str, key: list[str], *, follow: bool
) -> None:
    """Bring the dimension to the present position of the publisher."""
    options = {
        "conninfo": source,
        "publications": publication,
        "slot": re.sub(r"[^a-z0-9]+", "_", f"dimension_{table.lower()}"),
        "tables": table,
        "snapshot": str(directory / "snapshot"),
        "maxChangesPerTrigger": "100000",
    }
    changes = spark.readStream.format("pgcdc").options(**options).load(str(directory / "log"))
    query = apply_changes(changes, directory / "dimension", keys=key, stored_as_scd_type=2, available_now=not follow)
    query.awaitTermination()


def valid_at(directory: Path, time: datetime) -> list[dict[str, object]]:
    """Return the rows that the table had at a time."""
    start, end = field("__START_TIME"), field("__END_TIME")
    versions = DeltaTable(directory / "dimension").to_pyarrow_dataset()
    rows: list[dict[str, object]] = versions.to_table(
        filter=(start <= time) & (end.is_null() | (end > time))
    ).to_pylist()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Maintain a Delta table with all versions of the rows of a table.")
    parser.add_argument("source", help="connection string of the publisher")
    parser.add_argument("publication", help="publication that has the table")
    parser.add_argument("directory", type=Path, help="where the snapshot, the log and the Delta table are")
    parser.add_argument("table", help="schema.table")
    parser.add_argument("key", nargs="+", help="the columns of its replica identity")
    parser.add_argument("--follow", action="store_true", help="run until Ctrl-C")
    given = parser.parse_args()
    with spark_session() as spark:
        update(
            spark,
            given.source,
            given.publication,
            given.directory,
            given.table,
            given.key,
            follow=given.follow,
        )


if __name__ == "__main__":
    main()
