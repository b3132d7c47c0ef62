"""The lines that `subscriber lake …` prints: for people, or one JSON object for each."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from subscriber.changelog.consumers import FOLDER
from subscriber.cli.messages import print_message
from subscriber.cli.progress import ProgressLine
from subscriber.display import json_text, printable
from subscriber.errors import SubscriberError
from subscriber.formatting import count, in_seconds
from subscriber.lsn import Lsn
from subscriber.spark.lake.lake import LakeBatch
from subscriber.spark.lake.lake_table import TableProblem
from subscriber.spark.lake.load_ranges import RangeStep
from subscriber.spark.lake.retention import ForgottenPositions
from subscriber.spark.tables.recluster import Reclustered

CHECK = 60.0  # seconds between two checks of the publication
IDLE = 1.0  # seconds between two checks of a log that has nothing new
WAIT_REPORTED = 10.0  # seconds after which a wait is reported


class ReportedWait:
    """A wait for something else, which is reported if it is long."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._report_after = WAIT_REPORTED

    def end(self) -> None:
        """Nothing waits any more."""
        self._since, self._report_after = None, WAIT_REPORTED

    def moment(self, limit: float, report: Callable[[float], None]) -> bool:
        """Wait a moment.

        Args:
            limit: seconds of the whole wait.
            report: called after a long wait with its seconds, each time after twice as many.

        Returns:
            False at the limit.
        """
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        waited = now - self._since
        if waited >= self._report_after:
            report(waited)
            self._report_after = 2 * waited
        time.sleep(IDLE)
        return waited < limit


class LoadLines:
    """Prints the lines of the loads of tables."""

    def __init__(self, json: bool, *, loads: bool = False, follow: bool = False) -> None:
        """Create the lines.

        Args:
            json: print JSON objects.
            loads: the run loads tables that only need a load.
            follow: the run repeats a load that has failed.
        """
        self.line = ProgressLine("starting", json=json)
        self._json = json
        self._loads = loads
        self._follow = follow

    def rows(self, table: str, number: int) -> None:
        """Report that `number` rows of a table have been loaded."""
        self.line.show(f"loading {table}: {count(number, 'row')}")

    def loaded(self, position: Lsn, tables: Sequence[str]) -> None:
        if self._json:
            print(json_text({"event": "loaded", "lsn": str(position), "tables": list(tables)}), flush=True)
            return
        print(f"{count(len(tables), 'table')} as of {position}", flush=True)

    def unpublished(self, tables: Sequence[str]) -> None:
        """Report tables that are no longer published."""
        for table in tables:
            message = f"table {printable(table)} is no longer published, and the lake keeps its earlier rows only"
            self._report({"event": "unpublished", "table": table}, "NOTICE", message)

    def in_one_snapshot(self, table: str, reason: str) -> None:
        """Report that a large table is read in one snapshot."""
        message = f"table {printable(table)} is not loaded by ranges: {printable(reason)}"
        self._report({"event": "in_one_snapshot", "table": table, "reason": reason}, "NOTICE", message)

    def kept_as_text(self, column: str, reason: str) -> None:
        """Report that a new table has a column as text."""
        message = f"column {printable(column)} is kept as text: {printable(reason)}"
        self._report({"event": "kept_as_text", "column": column, "reason": reason}, "NOTICE", message)

    def ranges(self, step: RangeStep) -> None:
        """Report what was done for a table that is loaded by ranges."""
        if step.position is not None:
            self.loaded(step.position, [step.label])
        elif step.error is not None:
            self.not_loaded([step.label], step.error)
        elif step.waits_for is not None:
            self.line.show(f"loading {step.label}: waiting for {step.waits_for}")
        else:
            self.line.show(f"loading {step.label}", step.rows, max(step.of, step.rows), "rows")

    def waiting(self, steps: Sequence[RangeStep], seconds: float) -> None:
        """Report that all loads by ranges wait."""
        for step in steps:
            line = {"event": "waiting", "table": step.label, "for": step.waits_for, "seconds": round(seconds, 3)}
            what = f"the load of {printable(step.label)} waits for {printable(step.waits_for or '')}"
            self._report(line, "NOTICE", f"{what}, since {in_seconds(seconds)}")

    def ahead(self, positions: Mapping[str, Lsn]) -> None:
        """Report loaded tables that cannot be read, because the lake has not reached their `positions`."""
        names, position = ", ".join(map(printable, positions)), max(positions.values())
        subject = f"table {names} is" if len(positions) == 1 else f"tables {names} are"
        self._report(
            {"event": "ahead", "tables": {name: str(lsn) for name, lsn in positions.items()}},
            "NOTICE",
            f"{subject} ahead of the lake, and cannot be read before the log has reached {position}",
            "Start `subscriber archive`, and run this command again.",
        )

    def not_loaded(self, tables: Sequence[str], error: SubscriberError) -> None:
        """Report that tables could not be loaded."""
        what = ", ".join(map(printable, tables)) or "new tables"
        self._report(
            {"event": "not_loaded", "tables": list(tables), "message": error.message},
            "WARNING",
            f"{what} cannot be loaded now: {printable(error.message)}",
            f"The command loads them again in {CHECK:.0f} s."
            if self._follow
            else error.hint or "Run the command again.",
        )

    def _report(self, line: Mapping[str, object], severity: str, message: str, hint: str | None = None) -> None:
        """Print `line` as JSON, or the message for people."""
        if self._json:
            print(json_text(line), flush=True)
        else:
            print_message(severity, message, hint=hint)


class LakeProgressLines(LoadLines):
    """Prints all lines of a run."""

    def advancing(self, first: Lsn, position: Lsn, end: Lsn) -> None:
        """Report that the lake, which was at `first`, is at `position` on its way to `end`."""
        self.line.show("applying the log", position - first, end - first)

    def unused(self, option: str, column: str) -> None:
        """Report an option for a table that the lake does not have."""
        message = f"the lake has no table for --{option} {printable(column)}"
        self._report({"event": "no_table", option: column}, "NOTICE", message)

    def log_is_behind(self, position: Lsn, end: Lsn, seconds: float) -> None:
        """Report that the comparison waits for the change log, which ends at `end`."""
        line = {"event": "waiting", "for": f"the change log, which has not reached {position}"}
        message = f"the comparison waits for the change log, which is at {end}, to reach {position}"
        self._report({**line, "seconds": round(seconds, 3)}, "NOTICE", f"{message}, since {in_seconds(seconds)}")

    def clustering(self, table: str, rows: int, of: int) -> None:
        """Report that `rows` rows of a table are in the order of its cluster columns again."""
        self.line.show(f"clustering {table}", rows, max(of, 1), "rows")

    def clustered(self, table: str, done: Reclustered) -> None:
        """Report the files of a table that were written again."""
        if self._json:
            line = {"event": "clustered", "table": table, "removed": done.removed, "added": done.added}
            print(json_text(line), flush=True)
            return
        what = f"{count(done.removed, 'file')} written again as {done.added}" if done.removed else "in order already"
        print(f"{printable(table)}: {what}", flush=True)

    def batch(self, batch: LakeBatch, seconds: float) -> None:
        if self._json:
            line = {"event": "batch", "from": str(batch.start), "lsn": str(batch.end), "seconds": round(seconds, 3)}
            print(json_text({**line, "rows": dict(batch.rows)}), flush=True)
        else:
            rows, tables = count(sum(batch.rows.values()), "row"), count(len(batch.rows), "table")
            print(f"{batch.end}  {rows} of {tables} in {in_seconds(seconds)}", flush=True)
        self.problems(batch.problems)

    def forgotten(self, done: ForgottenPositions) -> None:
        """Report the positions and files that were removed because of their age."""
        if self._json:
            errors = {label: error.message for label, error in done.errors.items()}
            line = {"event": "forgotten", "positions": done.positions, "files": done.files, "errors": errors}
            print(json_text(line), flush=True)
            return
        if done.positions or done.files:
            print(f"removed {count(done.positions, 'old position')} and {count(done.files, 'file')}", flush=True)
        for label, error in done.errors.items():
            message = f"old rows of table {printable(label)} were not removed: {printable(error.message)}"
            print_message("WARNING", message)

    def not_registered(self, log: str) -> None:
        """Report that the log does not know the lake."""
        message = "this process may not write in the change log, which may remove segments that the lake needs"
        hint = f"Let it write in {printable(log)}/{FOLDER}, or keep the log long enough with --keep-age."
        self._report({"event": "not_registered", "message": message}, "WARNING", message, hint)

    def problems(self, problems: Mapping[str, TableProblem]) -> None:
        """Report tables that are set aside."""
        for table, problem in problems.items():
            line = {"event": "set_aside", "table": table, "message": problem.message, "hint": problem.hint}
            what = printable(problem.message)
            if self._loads and problem.needs_load:
                self._report(line, "NOTICE", f"table {printable(table)} is loaded again: {what}")
            else:
                self._report(line, "WARNING", f"table {printable(table)} is set aside: {what}", problem.hint)
