"""`subscriber lake --verify`: compare the tables of a lake with those of the publisher."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from time import monotonic

import anyio

from subscriber.changelog.reader import ChangeLog
from subscriber.cli.commands.verify import as_json, describe
from subscriber.cli.progress import ProgressLine
from subscriber.display import json_text, printable
from subscriber.errors import StatementError
from subscriber.formatting import in_seconds
from subscriber.lsn import Lsn
from subscriber.spark.lake.lake import Lake
from subscriber.spark.lake.verification import verify_lake
from subscriber.sqlstate import OBJECT_NOT_IN_PREREQUISITE_STATE

_POLL = 0.2  # seconds


def compare_lake(
    lake: Lake,
    log: ChangeLog,
    source: str,
    advance: Callable[[Lsn], None],
    line: ProgressLine,
    *,
    limit: float,
    json: bool,
) -> bool:
    """Print the differences between a lake and the publisher. Returns True if there are none.

    Args:
        lake: the lake, which this process has locked.
        log: the change log.
        source: the connection string of the publisher.
        advance: brings the lake to a position that the log has reached.
        line: shows the progress.
        limit: seconds that the log may take to reach the position of the publisher's snapshot.
        json: print the result as JSON.
    """
    began = monotonic()

    def reach(position: Lsn) -> None:
        wait_for_log(log, position, line, limit)
        advance(position)

    def show(label: str, rows: int) -> None:
        line.show(f"comparing {label}: {rows:,} rows")

    found = anyio.run(partial(verify_lake, lake, log, source, reach, on_rows=show))
    if json:
        print(json_text({"event": "compared", **as_json(found)}), flush=True)
    else:
        for text in describe(found):
            print(printable(text))
        print(f"compared in {in_seconds(monotonic() - began)}", flush=True)
    return found.is_same


def wait_for_log(log: ChangeLog, position: Lsn, line: ProgressLine, limit: float) -> None:
    """Wait until the log has a position. Raises StatementError after `limit` seconds."""
    began = monotonic()
    while (end := log.end()) < position:
        if monotonic() - began >= limit:
            raise StatementError(
                f"the change log has not reached {position} within {in_seconds(limit)}",
                detail=f"It ends at {end}.",
                hint="Start `subscriber archive` for this log, and run the command again.",
                sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
            )
        line.show(f"waiting for the change log, which is at {end}, to reach {position}")
        time.sleep(_POLL)
