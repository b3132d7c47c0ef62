"""`subscriber prepare-spark`: store Spark's classes, so that Spark starts faster."""

from __future__ import annotations

from subscriber.cli.progress import ProgressLine
from subscriber.display import printable


def prepare_spark() -> int:
    """Store Spark's classes for this user, so that Spark starts in half of the time.

    The file is in SUBSCRIBER_SPARK_CLASSES, or in ~/.cache/subscriber/spark, and has 200 MB. All commands and programs
    of this user that start Spark use it. It belongs to one Java runtime and one installation of pyspark: repeat the
    command after an upgrade. If the file is there and usable, nothing is done.
    """
    from subscriber.spark.class_archive_builder import create_class_archive

    with ProgressLine("storing Spark's classes, which takes a minute"):
        file = create_class_archive()
    print(f"Spark's classes are stored in {printable(str(file))} ({file.stat().st_size / 1e6:.0f} MB)")
    return 0
