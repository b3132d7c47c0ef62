"""docs/reference/logs.md: the formats, keys and events of log records, and the sources of metrics."""

from __future__ import annotations

import ast
from pathlib import Path

from subscriber import telemetry
from subscriber.cli.status import prometheus
from subscriber.cli.status.model import TABLE_STATES
from subscriber.cli.status.problems import STATES
from tools.docs import markdown, source
from tools.docs.markdown import code

HEAD = """
`subscriber run` and `subscriber archive` log to stderr, `--log-format` says how. A program that embeds subscriber has the
records in the logger `subscriber` of Python's `logging`: with what has to be known of them in their attributes `parts`
(message, detail, hint, context) and `keys` (the table below).

| format | |
|---|---|
| `rich` | for people: coloured, with DETAIL, HINT and CONTEXT below each message |
| `json` | an object in each line: `time`, `level`, `message`, `detail`, `hint`, `context`, and the keys |
| `postgres` | as a server with `log_line_prefix = '%m [%p] '`; the only one with rows' values, where PostgreSQL's log has them |

Levels are `DEBUG`, `LOG`, `WARNING`, `ERROR` and `FATAL`. `DEBUG` comes with `--debug`, or where the target's
`log_min_messages` asks for it.
""".strip()

# event -> occasion
EVENTS = {
    "apply.conflict": "a change met a row that it should not meet, and the stream goes on",
    "apply.skip": "a transaction is passed over, and the position to skip is cleared",
    "apply_sessions.fewer": "the target has no room for as many sessions as the subscription asks for",
    "archive.recovered": "what a crash left of a transaction was cut off the change log",
    "archive.started": "`subscriber archive` reads the slot",
    "archive.stopping": "`subscriber archive` was asked to end",
    "conflict.unknown": "a transaction failed by a conflict, and the target did not answer all questions about it",
    "copy.failed": "`subscriber copy`, started by the launcher, has failed",
    "copy.finished": "`subscriber copy`, started by the launcher, is done",
    "copy.started": "the launcher has started `subscriber copy`",
    "http.failed": "`subscriber run --http` cannot listen, and tries again, or could not answer a request",
    "http.started": "`subscriber run --http` answers at that address",
    "launcher.lost": "the launcher has lost the target; its workers are stopped and it tries again",
    "launcher.standby": "another launcher works on this database",
    "launcher.started": "the launcher works",
    "launcher.stopping": "the launcher was asked to end",
    "mirror.table": "a table has come into a mirror's publication that the mirror began without",
    "parallel.deadlock": "the apply worker waited for a lock of its own parallel worker; the transaction is applied later",
    "parallel.failed": "a parallel apply worker has failed; its transaction is applied when it ends",
    "parallel.serialize": "a large transaction has no parallel worker and waits in a file",
    "publisher.notice": "what the publisher said in the stream",
    "publisher.timeline": "the publisher has failed over to a server with everything that was applied",
    "publisher.warning": "what the publisher said in the stream of `subscriber.stream()`",
    "stream.lost": "`subscriber.stream()` has lost its connection and opens another",
    "stream.types": "types could not be looked up on the publisher; tried again",
    "subscription.disabled": "by `disable_on_error`",
    "table.replaced": "another table of the target has a table's name, and takes its changes",
    "tablesync.finished": "a table is copied and handed over",
    "tablesync.started": "a table is going to be copied",
    "target.answers": "the target has answered after `target.silent`",
    "target.silent": "the apply worker has had no answer from the target for ten seconds, and who holds the lock, if it is one",
    "target.limit": "what has to be done without on this target, once",
    "target.timeline": "the target has failed over, and `subscriber.accept_timelines(true)` was called before",
    "worker.ended": "the publisher has ended the stream in good order; the worker starts again",
    "worker.restart": "the apply worker starts again, because the subscription was changed",
    "worker.started": "the apply worker has started",
    "worker.stopped": "the launcher stops the worker of a subscription",
}

FIGURES = """
## Figures

Figures are rows of the target database, keys of `subscriber status --json`, and with `subscriber run --http` what
Prometheus reads from `/metrics`; see [metrics, health and a page](../operations.md#metrics-health-and-a-page).

| what | where |
|---|---|
| transactions, changes and bytes since a worker started; rows and bytes copied; positions; the last error and the next attempt | [`subscriber.worker`](catalog.md#worker) |
| positions and times as PostgreSQL shows them | [`subscriber.pg_stat_subscription`](catalog.md#pg_stat_subscription) |
| errors and conflicts, counted since they were reset | [`subscriber.pg_stat_subscription_stats`](catalog.md#pg_stat_subscription_stats) |
| each conflict | [`subscriber.conflict_history`](catalog.md#conflict_history) |
| states of tables | [`subscriber.pg_subscription_rel`](catalog.md#pg_subscription_rel) |
| lag in bytes and seconds, on the publisher's side too; rates with `--watch` | `subscriber status --json` |

`subscriber status --json` prints an object with `time`, `launcher_pid` (null: none runs) and `subscriptions`. Of each, `state` is
one of {states}, `tables` counts those in each of the states {tables}, and `not_ready` has those that are not ready, one by one.

### Metrics

All but the first three have the label `subscription`. What is not known at the moment is left out. Counters of a worker begin
anew when the worker does. `process_…` has memory and processor time of the program, by the names Prometheus gives them.
""".strip()


def page() -> str:
    messages = _events()
    assert set(messages) == set(EVENTS), f"explain or remove: {set(messages) ^ set(EVENTS)}"
    keys = source.field_comments(Path(telemetry.__file__).read_text(), "LogKeys")
    figures = FIGURES.format(
        states=", ".join(map(code, STATES)),
        tables=", ".join(map(code, dict.fromkeys([*TABLE_STATES.values(), "failed"]))),
    )
    return markdown.page(
        "Logs and figures",
        HEAD,
        "## Keys",
        "A key that does not apply to a record is left out.",
        markdown.table(["key", ""], [[code(key), says] for key, says in keys.items()]),
        "## Events",
        "The value of `event` stays the same when a message changes. Errors have none unless they stand here: `error_class` and"
        " `sqlstate` tell them apart, see [errors](errors.md).",
        markdown.table(["event", "when"], [[code(event), EVENTS[event]] for event in sorted(messages)]),
        figures,
        markdown.table(["metric", "label", ""], _metrics()),
    )


def _metrics() -> list[list[str]]:
    general = [[code(name), "", says] for name, says in prometheus.GENERAL.items()]
    return general + [[code(figure.name), code(figure.label), figure.says] for figure in prometheus.FIGURES]


def _events() -> set[str]:
    """Return every event that is passed to a call in the package."""
    found = set()
    for module, text in source.modules():
        for call in source.calls(text):
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
