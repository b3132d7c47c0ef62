"""docs/reference/catalog.md: tables and views of schema "subscriber" in the target, with their columns.

The tables are those of SQLAlchemy; a test compares them with the result of the migrations. The views are described
here, and tests/catalog/test_schema.py compares them with the server's.
"""

from __future__ import annotations

from sqlalchemy import Column, Table
from sqlalchemy.dialects.postgresql.base import PGDialect

from subscriber.catalog.schema import HEAD
from subscriber.catalog.tables import CONFLICTS, metadata
from tools.docs import markdown
from tools.docs.markdown import code

INTRODUCTION = """
Schema `subscriber` of the target database is made and upgraded by the first command that needs it, through the
migrations in `migrations/versions`; `subscriber.alembic_version` says which one it is at, now `{head}`. Read the views; the
tables are subscriber's own, may change from one version to the next, and are here for whoever looks for a fault. Rows of
tables can be seen by a subscription's owner, and by superusers. Times are of the target's clock unless they say otherwise.
""".strip()

DIALECT = PGDialect()  # type: ignore[no-untyped-call]

VIEWS_HEAD = """
## Views

They have the names, columns, types and meaning of PostgreSQL 18's, for the subscriptions that are here. With `search_path =
public, subscriber, pg_catalog` a query that names none of the schemas finds these before the server's own. As there, the
connection string is NULL for everybody but the owner.
""".strip()

# view -> column -> meaning
VIEWS: dict[str, dict[str, str]] = {
    "pg_subscription": {
        "oid": "the subscription's number, beyond those PostgreSQL gives for a long time",
        "subdbid": "the database",
        "subskiplsn": "what `SKIP` was told; 0/0: nothing",
        "subname": "its name",
        "subowner": "the role that owns it",
        "subenabled": "whether it is to run",
        "subbinary": "`binary`; false where it is not said",
        "substream": "`streaming`: f off, t on, p parallel",
        "subtwophasestate": "`two_phase`: d disabled, p pending, e enabled",
        "subdisableonerr": "`disable_on_error`",
        "subpasswordrequired": "`password_required`",
        "subrunasowner": "`run_as_owner`",
        "subfailover": "`failover`",
        "subconninfo": "the connection string; NULL for others than the owner",
        "subslotname": "the slot; NULL: `slot_name = NONE`",
        "subsynccommit": "`synchronous_commit`",
        "subpublications": "the publications",
        "suborigin": "`origin`",
    },
    "pg_subscription_rel": {
        "srsubid": "the subscription",
        "srrelid": "the table",
        "srsubstate": "i init, d data is being copied, f finished copy, s synchronized, r ready",
        "srsublsn": "the publisher's position of that state; NULL before it is known",
    },
    "pg_stat_subscription": {
        "subid": "the subscription",
        "subname": "its name",
        "worker_type": "apply, parallel apply, table synchronization; NULL: no worker",
        "pid": "the worker's session on the target",
        "leader_pid": "of a parallel apply worker, the apply worker's",
        "relid": "of table synchronization, the table",
        "received_lsn": "received so far",
        "last_msg_send_time": "when the publisher sent the last message, by its clock",
        "last_msg_receipt_time": "when it came, by the clock of the worker's machine",
        "latest_end_lsn": "the last position confirmed to the publisher",
        "latest_end_time": "when the publisher sent that, by its clock",
    },
    "pg_stat_subscription_stats": {
        "subid": "the subscription",
        "subname": "its name",
        "apply_error_count": "errors of the apply worker",
        "sync_error_count": "errors of table synchronization",
        **{f"confl_{conflict}": says for conflict, says in CONFLICTS.items()},
        "stats_reset": "since when they count; NULL: always",
    },
}

FUNCTIONS = """
## Functions

| function | does |
|---|---|
| `subscriber.pg_stat_reset_subscription_stats(oid)` | sets the counters of a subscription to zero, with NULL those of all; found before the server's own of that name, which it calls for subscriptions that are not here |

The others are called by subscriber: they create and drop replication origins, read their progress and end workers' sessions,
with the rights of the schema's owner, and refuse whoever may not manage the subscription.
""".strip()

TABLES_HEAD = """
## Tables

`subid` of most goes with the subscription: dropping it takes their rows along.
""".strip()


def page() -> str:
    parts = [INTRODUCTION.format(head=HEAD), VIEWS_HEAD]
    for view, columns in VIEWS.items():
        rows = [[code(column), says] for column, says in columns.items()]
        parts += [f"### {view}", markdown.table(["column", ""], rows)]
    parts.append(TABLES_HEAD)
    for table in sorted(metadata.tables.values(), key=lambda table: table.name):
        parts += [f"### {table.name}", _about(table), markdown.table(["column", "type", ""], map(_row, table.columns))]
    return markdown.page("Catalog", *parts, FUNCTIONS)


def _about(table: Table) -> str:
    key = ", ".join(code(column.name) for column in table.primary_key)
    unlogged = " Unlogged: empty after a crash of the target." if "UNLOGGED" in table._prefixes else ""
    return f"{table.info['doc']}{unlogged} Primary key: {key}."


def _row(column: Column[object]) -> list[str]:
    assert column.doc, f"{column} says nothing about itself"
    name = column.type.compile(dialect=DIALECT).lower()
    return [code(column.name), code(name.replace("timestamp with time zone", "timestamptz")), column.doc]
