"""`subscriber catchup`: apply a backlog from a change log in large batches."""

from __future__ import annotations

import time

from subscriber.catalog.commands.execute import execute
from subscriber.changelog.reader import ChangeLog
from subscriber.cli.progress import ProgressLine
from subscriber.connection.connect import connect
from subscriber.display import json_text, printable
from subscriber.formatting import count, in_seconds
from subscriber.lsn import Lsn
from subscriber.quoting import identifier
from subscriber.spark.catchup.job import BATCH, CaughtUp, catch_up
from subscriber.spark.changes.net_job import JAVA_OPTIONS
from subscriber.spark.session import spark_session


async def run_catchup(
    target: str,
    name: str,
    log_directory: str,
    *,
    until: Lsn | None,
    batch: int | None,
    enable: bool,
    master: str,
    json: bool,
) -> int:
    """Bring the subscription to `until` or to the end of the log, and enable it if requested.

    Returns the exit status.
    """
    log = ChangeLog(log_directory)
    line = ProgressLine("starting Spark", json=json)
    began = time.monotonic()
    first: Lsn | None = None

    def report(done: CaughtUp) -> None:
        nonlocal began, first
        seconds, began = time.monotonic() - began, time.monotonic()
        first = done.start if first is None else first
        line.show("catching up", done.end - first, min(until or log.end(), log.end()) - first)
        if json:
            found = {"event": "batch", "from": str(done.start), "lsn": str(done.end), "changes": done.changes}
            print(json_text({**found, "rows": done.rows, "seconds": round(seconds, 3)}), flush=True)
        else:
            what = f"{count(done.changes, 'change')} became {count(done.rows, 'row')}"
            print(f"{done.end}  {what} in {in_seconds(seconds)}", flush=True)

    with line, spark_session(master=master, java_options=JAVA_OPTIONS) as spark:
        line.show("catching up")
        began = time.monotonic()
        position = await catch_up(target, name, log, spark, until=until, batch=batch or BATCH, on_batch=report)
    if enable:
        await _enable(target, name)
    if json:
        print(json_text({"event": "done", "lsn": str(position), "enabled": enable}))
    else:
        print(f"{printable(name)} is at {position}" + (", and enabled" if enable else ""))
    return 0


async def _enable(target: str, name: str) -> None:
    connection = await connect(target, settings={"synchronous_commit": "on"})
    try:
        await execute(connection, f"ALTER SUBSCRIPTION {identifier(name)} ENABLE", notice=lambda *_: None)
    finally:
        connection.terminate()
