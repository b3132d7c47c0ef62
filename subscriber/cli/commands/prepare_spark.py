"""`subscriber prepare-spark`: store Spark's classes, so that Spark starts faster."""

from __future__ import annotations

from subscriber.cli.progress import ProgressLine
from subscriber.display import printable
from subscriber.spark.class_archive_builder import create_class_archive


def run_prepare_spark() -> int:
    """Create the archive of Spark's classes, unless there is one, and print its file. Returns the exit status."""
    with ProgressLine("storing Spark's classes, which takes a minute"):
        file = create_class_archive()
    print(f"Spark's classes are stored in {printable(str(file))} ({file.stat().st_size / 1e6:.0f} MB)")
    return 0
