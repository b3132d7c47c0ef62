"""docs/reference/logs.md: the formats, keys and events of log records, and the sources of metrics."""

from __future__ import annotations

import ast
from pathlib import Path

from subscriber import telemetry
from subscriber.status import metrics
from subscriber.status.model import TABLE_STATES
from subscriber.status.problems import STATES
from tools.docs import markdown, source
from tools.docs.markdown import code

HEAD = """
`subscriber run` and `subscriber archive` log to stderr, in the format of `--log-format`. A program that embeds subscriber gets
the records from the logger `subscriber` of Python's `logging`. Each record has the attributes `parts` (message, detail, remedy,
context) and `keys` (the table below).

| format | |
|---|---|
| `rich` | for people: coloured, with DETAIL, HINT and CONTEXT below each message |
| `json` | an object on each line: `time`, `level`, `message`, `detail`, `hint`, `command`, `context`, and the keys |
| `postgres` | like a server with `log_line_prefix = '%m [%p] '`; the only format with values of rows, in the same places as in PostgreSQL's log |

Control characters and other invisible characters are escaped as `\\x1B` and `\\u202E`. A continuation line starts with a tab.
Passwords never appear.

Levels are `DEBUG`, `LOG`, `WARNING`, `ERROR` and `FATAL`. `DEBUG` is logged with `--debug`, or if the target's
`log_min_messages` includes it.
""".strip()

# event -> occasion
EVENTS = {
    "apply.conflict": "a change conflicted with a row of the target, and the stream continues",
    "quarantine.parked": "a transaction was put in quarantine",
    "quarantine.applied": "a transaction was applied after it had been in quarantine",
    "apply.skip": "a transaction is skipped, and the position to skip is cleared",
    "apply_sessions.fewer": "the target lacks connections or replication origins for all `apply_sessions`",
    "archive.recovered": "an incomplete transaction was removed from the end of the change log after a crash",
    "archive.slot_wait": "`subscriber archive` waits for another process of the publisher that reads the slot, or for transactions that the creation of the slot needs, with a line each minute",
    "archive.standby": "`subscriber archive --standby` waits while another process writes the change log, with a line each minute",
    "archive.started": "`subscriber archive` reads the slot",
    "archive.table_changed": "a table of the change log has other columns, or is published in another way",
    "archive.takeover": "`subscriber archive --standby` has the lock or the lease of the change log now, and continues the log",
    "conflict.incomplete": "the publisher's role may not read a row of which a large value was not sent",
    "conflict.unknown": "a transaction failed because of a conflict, and not all facts about the conflict could be read from the target",
    "ranges.copied": "a range of a table is copied, with its time; only with `--debug`",
    "ranges.fewer_sessions": "a table is copied in fewer sessions, because one could not be opened",
    "ranges.paused": "the copy of a table pauses outside of `range_window`",
    "ranges.restarted": "a table is emptied and copied again after a failover of the publisher",
    "ranges.spoiled": "a range is read again, because a change has waited too long for it",
    "ranges.unsuitable": "a table cannot be copied by ranges, with the reason",
    "command.stopping": "the launcher, the archiver or the console was requested to end",
    "comparison.again": "a table is compared again, because it was dropped, rewritten, altered or locked meanwhile",
    "comparison.waits": "a comparison or repair cannot take a snapshot of the publisher yet, and retries",
    "repair.locked": "`subscriber repair` has left a row as it is, because another transaction has locked it for seconds",
    "repair.origin_remains": "`subscriber repair` could not drop its replication origin at its end",
    "console.action": "a person has run an action on the console, with its result; or `subscriber.audit` lacks its end",
    "console.failed": "a comparison or repair of the console has an unexpected error",
    "console.history": "the console cannot read or write `subscriber.history`",
    "console.refused": "a wrong token was sent to the console",
    "console.signed_in": "a person has opened a session on the console",
    "http.clear_text": "a console with tokens listens on an address that other machines reach, without TLS",
    "http.failed": "`subscriber run --http` cannot listen, and retries, or could not answer a request",
    "database.waiting": "wait_for_sync() or wait_for_lsn() of a program has waited for another minute",
    "foreign_key.left_out": "a foreign key is not added, because the subscription lacks the table that it references",
    "foreign_key.validated": "a foreign key is added and validated, with `copy_indexes = after`",
    "http.full": "connections without a request are dropped, because there are too many; at most once a minute",
    "http.started": "`subscriber run --http` listens at that address",
    "index.built": "an index of a table is built, with `copy_indexes = after`",
    "launcher.left_out": "enabled subscriptions that the program does not run, because of `running(only=…)`",
    "launcher.lost": "the launcher has lost the target; its workers are stopped, and it retries",
    "launcher.standby": "another launcher is active on this database",
    "launcher.started": "the launcher has started",
    "migrate.unrecorded": "the record of a step could not be stored; status and report of the move lack it",
    "migrate.lock_wait": "a statement that creates an index or a constraint is repeated after a deadlock or a long wait for a lock",
    "mirror.table": "a table was added to a mirror's publication after the mirror had started",
    "parallel.deadlock": "the apply worker was blocked by its own parallel worker; the parallel worker's transaction is applied later",
    "parallel.failed": "a parallel apply worker has failed; its transaction is applied when it commits",
    "parallel.serialize": "a large transaction has no parallel worker and is spooled",
    "publisher.notice": "a NOTICE or WARNING of the publisher in the stream; `subscriber.stream()` logs WARNINGs",
    "publisher.timeline": "the publisher has failed over to a server with everything that was applied",
    "publisher.notices_suppressed": "messages of the publisher beyond `notices_per_minute`, with their number",
    "retention.failed": "deleted rows of a table are not remembered, or cannot be forgotten now",
    "retention.forgot": "deleted rows that no subscription needs were removed",
    "retention.resumed": "all deleted rows that a subscription needs are remembered again",
    "retention.stopped": "deleted rows were removed although a subscription may need them, because of `max_retention_duration`",
    "snapshot.wait": "a query of `pgcdc` waits for its snapshot, which another process writes, with a line each minute",
    "statement.notice": "a NOTICE or WARNING of a statement that a program has executed",
    "stream.lost": "`subscriber.stream()` has lost its connection and reconnects",
    "stream.types": "types could not be read from the publisher; retried",
    "subscription.gave_up": "the launcher gives a subscription up, because the publisher keeps more WAL than `wal_budget`",
    "subscription.budget_not_enforced": "the launcher cannot measure the WAL of a subscription with `wal_budget`, or cannot"
    " drop its slot, and retries",
    "subscription.disabled": "an error has disabled the subscription (`disable_on_error`)",
    "table.unpublished": "tables are no longer part of the subscription's publications, so their changes do not arrive",
    "table.renamed": "a table that both sides have renamed keeps its state; `REFRESH PUBLICATION` stores its name",
    "table.replaced": "another table of the target has taken a table's name, and receives its changes",
    "sequence.failed": "a sequence cannot be synchronized, or was set back on the publisher",
    "sequencesync.finished": "sequences are set to the publisher's values",
    "sequencesync.started": "the synchronization of sequences starts",
    "opentelemetry.failed": "traces or metrics could not be made; replication continues",
    "tablesync.compared": "a table was compared instead of copied, and the rows that differed are repaired",
    "tablesync.finished": "a table is copied and handed over",
    "tablesync.started": "the copy of a table starts",
    "target.answers": "the target has answered after `target.silent`",
    "target.silent": "the target has not answered the apply worker for ten seconds; the record names the holder of a lock, if there is one",
    "target.limit": "a capability that this target lacks, logged once",
    "target.timeline": "the target has failed over, and `subscriber.accept_timelines(true)` was called before",
    "wait.long": "another session or a server is waited for: locks, transactions, the end of a session, the flush of WAL",
    "worker.ended": "the publisher has ended the stream normally; the worker restarts",
    "worker.restart": "the apply worker restarts, because the subscription was changed",
    "worker.started": "the apply worker has started",
    "worker.stopped": "the launcher stops the worker of a subscription",
}

METRICS_PAGE = """
## Status and metrics

Metrics are available in three places: in tables and views of the target database, in `subscriber status --json`, and with
`subscriber run --http` at `/metrics` for Prometheus; see [monitoring](../monitoring.md#over-http).

| metrics | place |
|---|---|
| transactions, changes and bytes since a worker started; rows and bytes copied; positions; the last error and the next attempt | [`subscriber.worker`](catalog.md#worker) |
| positions and times as PostgreSQL shows them | [`subscriber.pg_stat_subscription`](catalog.md#pg_stat_subscription) |
| errors and conflicts since the counters were reset | [`subscriber.pg_stat_subscription_stats`](catalog.md#pg_stat_subscription_stats) |
| each conflict | [`subscriber.conflict_history`](catalog.md#conflict_history) |
| states of tables | [`subscriber.pg_subscription_rel`](catalog.md#pg_subscription_rel) |
| lag in bytes and seconds, also as measured on the publisher; rates with `--watch` | `subscriber status --json` |

`subscriber status --json` prints an object with `time`, `launcher_pid` (null: none runs) and `subscriptions`. In each
subscription, `state` is one of {states}, `tables` has the number of tables in each of the states {tables}, and `not_ready` lists the
tables that are not ready.

### Metrics

All metrics except the first three have the label `subscription`. A metric without a known value is left out. A worker's counters
restart from 0 with the worker. `process_…` are memory and processor time of the program, under Prometheus's names.
""".strip()


def page() -> str:
    messages = _events()
    assert set(messages) == set(EVENTS), f"explain or remove: {set(messages) ^ set(EVENTS)}"
    keys = source.field_comments(Path(telemetry.__file__).read_text(), "LogKeys")
    status_and_metrics = METRICS_PAGE.format(
        states=", ".join(map(code, STATES)),
        tables=", ".join(map(code, dict.fromkeys([*TABLE_STATES.values(), "failed"]))),
    )
    return markdown.page(
        "Logs and metrics",
        HEAD,
        "## Keys",
        "A key that does not apply to a record is left out.",
        markdown.table(["key", ""], [[code(key), says] for key, says in keys.items()]),
        "## Events",
        "The value of `event` stays the same when a message changes. Errors without an event in this table are"
        " identified by `error_class` and `sqlstate`, see [errors](errors.md).",
        markdown.table(["event", "when"], [[code(event), EVENTS[event]] for event in sorted(messages)]),
        status_and_metrics,
        markdown.table(["metric", "label", ""], _metrics()),
    )


def _metrics() -> list[list[str]]:
    general = [[code(name), "", says] for name, says in metrics.GENERAL.items()]
    return general + [[code(metric.name), code(metric.label), metric.says] for metric in metrics.METRICS]


def _events() -> set[str]:
    """Return every event that is passed to a call in the package."""
    found = set()
    for module, text in source.modules():
        for call in source.calls(text) if "event=" in text else ():
            for keyword in call.keywords:
                if keyword.arg == "event":
                    found |= _values(keyword.value, module)
    return found


def _values(value: ast.expr, module: str) -> set[str]:
    if isinstance(value, ast.Constant):
        return {str(value.value)}
    assert (ast.unparse(value), module) == ("f'tablesync.{what}'", "worker/tablesync/worker.py"), (
        f"what event is {ast.unparse(value)}?"
    )
    return {"tablesync.started", "tablesync.finished"}
