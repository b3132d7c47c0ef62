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

CONFLICTS_OF_19 = ("update_deleted",)  # views of an older server do not have them

INTRODUCTION = """
The first command that needs schema `subscriber` of the target database creates or upgrades it, with the migrations in
`migrations/versions`. `subscriber.alembic_version` has the current migration, now `{head}`. Read the views in your programs. The
tables are internal and may change in any version; they are described here for troubleshooting. Only a subscription's owner and
superusers can see the rows of the tables. Times are of the target's clock unless the description names another one.
""".strip()

DIALECT = PGDialect()  # type: ignore[no-untyped-call]

VIEWS_HEAD = """
## Views

The views have the names, columns, types and meaning of PostgreSQL 18's views, and show subscriber's subscriptions. With
`search_path = public, subscriber, pg_catalog`, a query without schema names finds these views before the server's own. As in
PostgreSQL, only the owner sees the connection string; it is NULL for other roles.
""".strip()

# view -> column -> meaning
VIEWS: dict[str, dict[str, str]] = {
    "pg_subscription": {
        "oid": "the subscription's OID, in a range that PostgreSQL's own OIDs do not reach soon",
        "subdbid": "the database",
        "subskiplsn": "the position of `SKIP`; 0/0: none",
        "subname": "its name",
        "subowner": "the role that owns it",
        "subenabled": "whether it is enabled",
        "subbinary": "`binary`; false if it is not set",
        "substream": "`streaming`: f off, t on, p parallel",
        "subtwophasestate": "`two_phase`: d disabled, p pending, e enabled",
        "subdisableonerr": "`disable_on_error`",
        "subpasswordrequired": "`password_required`",
        "subrunasowner": "`run_as_owner`",
        "subfailover": "`failover`",
        "subconninfo": "the connection string; NULL for roles other than the owner",
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
        "leader_pid": "for a parallel apply worker, the session of its apply worker",
        "relid": "for table synchronization, the table",
        "received_lsn": "the last position received",
        "last_msg_send_time": "when the publisher sent the last message, by its clock",
        "last_msg_receipt_time": "when the worker received it, by the clock of the worker's machine",
        "latest_end_lsn": "the last position confirmed to the publisher",
        "latest_end_time": "when the publisher sent that, by its clock",
    },
    "pg_stat_subscription_stats": {
        "subid": "the subscription",
        "subname": "its name",
        "apply_error_count": "errors of the apply worker",
        "sync_error_count": "errors of table synchronization",
        **{f"confl_{conflict}": says for conflict, says in CONFLICTS.items() if conflict not in CONFLICTS_OF_19},
        "stats_reset": "when the counters were reset; NULL: never",
    },
}

FUNCTIONS = """
## Functions

| function | does |
|---|---|
| `subscriber.pg_stat_reset_subscription_stats(oid)` | resets the counters of a subscription, or of all with NULL. It is found before the server's own function of the same name, which it calls for the server's own subscriptions |

The other functions are for subscriber itself. They create and drop replication origins, read their progress and end workers'
sessions. They run with the rights of the schema's owner, and refuse callers that may not manage the subscription.
""".strip()

TABLES_HEAD = """
## Tables

Most tables have a column `subid`. Dropping a subscription deletes its rows in these tables.
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
    assert column.doc, f"{column} has no documentation"
    name = column.type.compile(dialect=DIALECT).lower()
    return [code(column.name), code(name.replace("timestamp with time zone", "timestamptz")), column.doc]
