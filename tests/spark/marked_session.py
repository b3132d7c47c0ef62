"""Spark jobs on databases whose connection strings have a password.

    python -m tests.spark.marked_session JSON

The JSON is {"source": DSN, "target": DSN, "broken": DSN, "events": DIRECTORY}. It prints all of Spark's output about
the jobs: plans, errors, descriptions and the pages of its user interface.
"""

from __future__ import annotations

import json
import sys
import traceback
from urllib.request import urlopen

import anyio

from subscriber.spark.copy.job import copy_tables
from subscriber.spark.session import QUICK, spark_session
from subscriber.spark.sources.pgsnapshot import exported_snapshot, register

PAGES = (
    "/jobs/",
    "/stages/",
    "/environment/",
    "/executors/",
    "/SQL/",
    "/SQL/execution/?id=0",
    "/api/v1/applications/{id}/environment",
    "/api/v1/applications/{id}/sql?details=true",
    "/api/v1/applications/{id}/stages",
)


def main() -> None:
    given = json.loads(sys.argv[1] if len(sys.argv) > 1 else sys.stdin.readline())
    conf = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": f"file:{given['events']}",
        "spark.eventLog.compress": "false",
        "spark.ui.enabled": "true",
        "spark.ui.port": "0",
    }
    with spark_session(master="local[2,4]", conf=conf, java_options=QUICK) as spark:
        register(spark)
        with exported_snapshot(given["source"]) as snapshot:
            frame = spark.read.format("pgsnapshot").options(**snapshot).option("table", "public.t").load()
            print("rows", frame.count())
            frame.explain(extended=True)
            frame.explain("formatted")
            frame.createTempView("marked")
            spark.sql("DESCRIBE EXTENDED marked").show(truncate=False)
            for options in ({**snapshot, "table": "nowhere"}, snapshot, {"conninfo": given["broken"], "table": "t"}):
                try:
                    spark.read.format("pgsnapshot").options(**options).load().count()
                except Exception:
                    print(traceback.format_exc())
        print("copied", anyio.run(_copy, given["target"], spark))
        for page in PAGES:
            address = f"{spark.sparkContext.uiWebUrl}{page.format(id=spark.sparkContext.applicationId)}"
            print(page, urlopen(address, timeout=20).read().decode())
        print("conf", spark.sparkContext.getConf().getAll())
        print("done", flush=True)
        sys.stdin.readline()


async def _copy(target: str, spark: object) -> object:
    return await copy_tables(target, "s", spark=spark)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
