"""`subscriber lake verify`: compare the tables of a lake with those of the publisher."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from time import monotonic

import anyio

from subscriber.changelog.reader import ChangeLog
from subscriber.cli.commands.lake.lines import LakeProgressLines, ReportedWait
from subscriber.cli.commands.verify import as_json, describe
from subscriber.display import json_text, printable
from subscriber.errors import StatementError
from subscriber.formatting import count, in_seconds
from subscriber.lsn import Lsn
from subscriber.spark.lake.lake import Lake, LakeBatch
from subscriber.spark.lake.verification import verify_lake
from subscriber.sqlstate import OBJECT_NOT_IN_PREREQUISITE_STATE


def compare_lake(
    lake: Lake,
    log: ChangeLog,
    source: str,
    advance: Callable[[Lsn], Iterable[LakeBatch]],
    lines: LakeProgressLines,
    *,
    limit: float,
    json: bool,
) -> bool:
    """Print the differences between a lake and the publisher. Returns True if there are none.

    Args:
        lake: the lake, which this process has locked.
        log: the change log.
        source: the connection string of the publisher.
        advance: brings the lake to a position that the log has reached, batch by batch.
        lines: shows the progress, and long waits.
        limit: seconds that the log may take to reach the position of the publisher's snapshot.
        json: print the result as JSON.
    """
    began = monotonic()

    def reach(position: Lsn) -> None:
        wait_for_log(log, position, lines, limit)
        for _ in advance(position):
            pass

    def show(label: str, rows: int) -> None:
        lines.line.show(f"comparing {label}: {count(rows, 'row')}")

    comparison = anyio.run(partial(verify_lake, lake, log, source, reach, on_rows=show))
    if json:
        print(json_text({"event": "compared", **as_json(comparison)}), flush=True)
    else:
        for text in describe(comparison):
            print(printable(text))
        print(f"compared in {in_seconds(monotonic() - began)}", flush=True)
    return comparison.is_same


def wait_for_log(log: ChangeLog, position: Lsn, lines: LakeProgressLines, limit: float) -> None:
    """Wait until the log has a position. Raises StatementError after `limit` seconds."""
    wait = ReportedWait()
    while (end := log.end()) < position:
        lines.line.show(f"waiting for the change log, which is at {end}, to reach {position}")
        if not wait.moment(limit, partial(lines.log_is_behind, position, end)):
            raise StatementError(
                f"the change log has not reached {position} within {in_seconds(limit)}",
                detail=f"It ends at {end}.",
                hint="Start `subscriber archive` for this log, and run the command again.",
                sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
            )
