"""The tables of schema "subscriber", for alembic's comparison and for programs that build statements on them.

The migrations are the tables' history and do not use this module; a test asserts that they end in exactly these tables.
Workers use the plain SQL of store/, because importing this module takes a third of a second. The documentation of each
table and column is here, too: `info["doc"]` and `doc`.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    Column,
    DateTime,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    text,
)
from sqlalchemy.dialects.postgresql import BYTEA, JSONB, OID
from sqlalchemy.dialects.postgresql.base import ischema_names
from sqlalchemy.types import UserDefinedType

from subscriber.subscription import STORED_OPTIONS

SCHEMA = "subscriber"
metadata = MetaData(schema=SCHEMA)


class Name(UserDefinedType[str]):
    """An identifier, at most 63 bytes."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        return "name"


class Char(UserDefinedType[str]):
    """The one-byte type of catalog letters, written with its quotes."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        return '"char"'


class Xid8(UserDefinedType[str]):
    """A transaction, with its epoch."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        return "xid8"


class PgLsn(UserDefinedType[str]):
    """A position in WAL."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        return "pg_lsn"


# So that reflection, which alembic compares with, gives these types back.
ischema_names["name"] = Name
ischema_names['"char"'] = Char
ischema_names["pg_lsn"] = PgLsn
ischema_names["xid8"] = Xid8


SUBSCRIPTION = "the subscription"
UNLOGGED = ["UNLOGGED"]  # never published; migrations/versions/0013_unpublished.py says what a crash leaves


def _column(
    name: str, type_: Any, doc: str, *, null: bool = False, default: str | None = None, **more: Any
) -> Column[Any]:
    """A column of no key; `default` is SQL."""
    server_default = None if default is None else text(default)
    return Column(name, type_, nullable=null, server_default=server_default, doc=doc, **more)


def _key(name: str, type_: Any, doc: str, default: str | None = None) -> Column[Any]:
    """A column of the primary key that no sequence fills."""
    server_default = None if default is None else text(default)
    return Column(name, type_, primary_key=True, autoincrement=False, server_default=server_default, doc=doc)


def _id(name: str) -> Column[int]:
    return _key(name, BigInteger, "a number, by time", "subscriber.new_id()")


def _kept(function: str = "new_record") -> Column[int]:
    """The large object that has the row after a crash."""
    return _column("kept", OID, "the large object with this row", default=f"subscriber.{function}()", unique=True)


def _of_subscription(name: str = "subid", *, key: bool = True, unique: bool | None = None) -> Column[int]:
    """A column that goes away with its subscription."""
    cascade = ForeignKey("subscriber.subscription.subid", ondelete="CASCADE")
    return Column(name, OID, cascade, primary_key=key, nullable=False, unique=unique, doc=SUBSCRIPTION)


def _count(name: str, doc: str) -> Column[int]:
    return _column(name, BigInteger, doc, default="0")


def _about(doc: str) -> dict[str, str]:
    return {"doc": doc}


TIME = DateTime(timezone=True)

# The types of the columns of options (subscription.py).
_TYPES = {
    "boolean": Boolean,
    "integer": Integer,
    "text": Text,
    "name": Name,
    '"char"': Char,
    "name[]": ARRAY(Name),
    "text[]": ARRAY(Text),
}

subscription = Table(
    "subscription",
    metadata,
    _key("subid", OID, "its number", "subscriber.new_subscription_oid()"),
    _column("subname", Name, "its name", unique=True),
    _column("subowner", OID, "the role that owns it"),
    _column("subconninfo", Text, "the connection string, as it was written; NULL: a foreign server has it", null=True),
    _column("subserver", OID, "the foreign server that has the connection string; 0: none", default="0"),
    _column("subpublications", ARRAY(Text), "the publications"),
    *(
        _column(
            column.name, _TYPES[column.type], column.about or f"`{option}`", null=column.null, default=column.default
        )
        for option, column in STORED_OPTIONS.items()
    ),
    _column("subskiplsn", PgLsn, "what `SKIP` was told; 0/0: nothing", default="'0/0'::pg_lsn"),
    _column("subsystemid", Text, "the publisher's system identifier; NULL: not known yet", null=True),
    _kept(),
    _column("subownername", Name, "the owner's name; a restored dump has other OIDs", null=True),
    _column("subtimeline", BigInteger, "the publisher's timeline; NULL: not known yet", null=True),
    _column("subtimelinesystem", Text, "the system identifier that the timeline belongs to", null=True),
    _column(
        "subtimelinehistory",
        Text,
        "number and end of the timelines before it; NULL: a standby, which may change it",
        null=True,
    ),
    _column("subacceptloss", Boolean, "whether the next publisher may lack applied changes", default="false"),
    _column("subgaveup", Text, "why the launcher has dropped the slot; NULL: it has not", null=True),
    _column("subgeneration", Integer, "rises with each statement that a worker is started anew for", default="0"),
    prefixes=UNLOGGED,
    info=_about("What CREATE SUBSCRIPTION was told."),
)

subscription_rel = Table(
    "subscription_rel",
    metadata,
    _of_subscription("srsubid"),
    _key("srrelid", OID, "the table on the target"),
    _column("srsubstate", Char, "i init, d data is being copied, f finished copy, s synchronized, r ready"),
    _column("srsublsn", PgLsn, "the publisher's position of that state; NULL until one is known", null=True),
    _column(
        "srsource",
        ARRAY(Text),
        "schema and name on the publisher, where hooks change the rows; NULL: nowhere",
        null=True,
    ),
    _column("srcopy", Text, "until state f: copy, compare or truncate", default="'copy'"),
    _kept(),
    _column("srnspname", Name, "the table's schema", null=True),
    _column("srrelname", Name, "the table's name", null=True),
    _column(
        "srforeignkeys",
        Boolean,
        "the publisher's foreign keys are to be added when the table is ready",
        default="false",
    ),
    prefixes=UNLOGGED,
    info=_about("The tables of each subscription, and how far their copies are."),
)

subscription_sequence = Table(
    "subscription_sequence",
    metadata,
    _of_subscription(),
    _key("nspname", Name, "the sequence's schema"),
    _key("seqname", Name, "the sequence's name"),
    _column("state", Char, "i init, r ready"),
    _column("lsn", PgLsn, "the publisher's position of the value; NULL until the sequence is ready", null=True),
    _column("problem", Text, "the reason why the last synchronization failed; NULL: it did not", null=True),
    _kept("new_record_of_many"),
    prefixes=UNLOGGED,
    info=_about("The sequences of each subscription."),
)

progress_record = Table(
    "progress_record",
    metadata,
    _of_subscription(),
    _key("relid", OID, "0: the apply worker; else the table that is synchronized", "0"),
    _column("record", OID, "the large object", unique=True),
    prefixes=UNLOGGED,
    info=_about("The large objects that hold how far each worker is; view `progress` reads them."),
)

worker = Table(
    "worker",
    metadata,
    _of_subscription(),
    _key("relid", OID, "0: the apply worker; else the table, or below 16384 the number of a parallel worker", "0"),
    _column("worker_type", Text, "apply, parallel apply, table synchronization"),
    _column("pid", Integer, "the backend on the target; NULL while there is no connection", null=True),
    _column("state", Text, "the state, in the words of `subscriber status`"),
    _column("received_lsn", PgLsn, "received so far", null=True),
    _column("last_msg_send_time", TIME, "when the publisher sent the last message", null=True),
    _column("last_msg_receipt_time", TIME, "when it came", null=True),
    _column("latest_end_lsn", PgLsn, "the last position confirmed to the publisher", null=True),
    _column("latest_end_time", TIME, "when the publisher sent that, by its clock; lag is measured from it", null=True),
    _column("error", Text, "the last error, until changes flow again", null=True),
    _column("error_time", TIME, "when that was", null=True),
    _column("error_hint", Text, "what can be done about it", null=True),
    _column("error_sqlstate", Text, "its SQLSTATE", null=True),
    _column("error_is_transient", Boolean, "whether a retry alone can solve it", null=True),
    _column("error_remedy", JSONB, "the hint as fields: advice, command, then, alternative", null=True),
    _column("next_retry", TIME, "when it tries again; NULL: it works, or has stopped", null=True),
    _column("started", TIME, "when it started"),
    _count("transactions", "applied since then"),
    _count("changes", "applied since then"),
    _count("bytes", "received since then"),
    _count("copy_rows", "rows copied"),
    _count("copy_bytes", "bytes copied"),
    _count("copy_total_bytes", "an estimate of what there is to copy: bytes on the publisher's disk"),
    _column("updated_at", TIME, "when this row was written"),
    _column("leader_pid", Integer, "of a parallel apply worker: the apply worker's `pid`", null=True),
    _column("waiting_for", Text, "whom its backend has been waiting for, for a second or more", null=True),
    _column("streamed", JSONB, "transactions that have not ended yet", default="'[]'"),
    _column("limits", ARRAY(Text), "rights and functions that this target lacks; NULL: none", null=True),
    _column("one_by_one", JSONB, "changes that were not applied set by set, by the reason why", default="'{}'"),
    _column("format", Text, "how the apply worker receives values: binary or text", null=True),
    _column("format_reason", Text, "why as text, where the subscription does not say `binary`", null=True),
    prefixes=UNLOGGED,
    info=_about("What each worker says of itself, once a second."),
)

# The counters of pg_stat_subscription_stats, and what each conflict is.
CONFLICTS = {
    "insert_exists": "inserts of a key that was there",
    "update_origin_differs": "updates of rows that another origin wrote last",
    "update_exists": "updates to a key that was there",
    "update_deleted": "updates of rows that another origin deleted",
    "update_missing": "updates of rows that were not there",
    "delete_origin_differs": "deletes of rows that another origin wrote last",
    "delete_missing": "deletes of rows that were not there",
    "multiple_unique_conflicts": "rows with several keys that were there",
}

subscription_stats = Table(
    "subscription_stats",
    metadata,
    _of_subscription(),
    _count("apply_error_count", "errors of the apply worker"),
    _count("sync_error_count", "errors of table synchronization"),
    _count("sync_seq_error_count", "errors of sequence synchronization"),
    *[_count(f"confl_{conflict}", doc) for conflict, doc in CONFLICTS.items()],
    _column("stats_reset", TIME, "since when they count; NULL: always", null=True),
    prefixes=UNLOGGED,
    info=_about("Errors and conflicts, counted."),
)

conflict_hold = Table(
    "hold",
    metadata,
    _of_subscription(),
    _column(
        "stop_at",
        PgLsn,
        "the apply worker is to stop before a transaction that finishes here or later; 0/0: immediately",
    ),
    _column("held_at", PgLsn, "and stays there now; NULL: not yet", null=True),
    prefixes=UNLOGGED,
    info=_about("Apply workers that are held while `subscriber verify` takes its snapshots."),
)

session = Table(
    "session",
    metadata,
    _of_subscription(),
    _key("relid", OID, "the place of the session: see `subscriber/catalog/worker_sessions.py`"),
    _column("pid", Integer, "the backend"),
    _column("backend_start", TIME, "when the backend began"),
    _column("role", OID, "the role that logged in"),
    prefixes=UNLOGGED,
    info=_about("The sessions that work for each subscription. One whose backend has ended does not count."),
)

launcher = Table(
    "launcher",
    metadata,
    Column("leads", Boolean, primary_key=True, server_default=text("true"), doc="always true: there is one row"),
    _column("instance", Text, "the process: host, process ID and a random part"),
    _column("pid", Integer, "its backend"),
    _column("backend_start", TIME, "when the backend began"),
    _column("role", OID, "the role that logged in"),
    _column("renewed", TIME, "when it has renewed its lease"),
    prefixes=UNLOGGED,
    info=_about("The launcher that leads."),
)

identity = Table(
    "identity",
    metadata,
    Column("only_row", Boolean, primary_key=True, server_default=text("true"), doc="always true: there is one row"),
    _column("system_identifier", Text, "the cluster's"),
    _column("timeline", BigInteger, "the cluster's; NULL: not known", null=True),
    _column("database_oid", OID, "the database's number"),
    _column("database_name", Name, "the database's name"),
    _column("sync_id", Text, "part of the names of slots for table synchronization"),
    _column("accept_timelines", Boolean, "whether a new timeline needs no `subscriber.rebind()`", default="false"),
    _kept(),
    prefixes=UNLOGGED,
    info=_about("The database that this catalog belongs to. Elsewhere no subscription runs: see subscriber.rebind()."),
)

migration = Table(
    "migration",
    metadata,
    Column("name", Text, primary_key=True, doc="the subscription that copies the database to its new server"),
    _column("serving", Text, "the server that applications write to: source or target"),
    _column("phase", Text, "how far the move to the other server is: see `subscriber/migration/plan.py`"),
    _column("facts", JSONB, "what later steps need, and the undo", default="'{}'::jsonb"),
    _column("changed", TIME, "when the row was written", default="clock_timestamp()"),
    _kept(),
    prefixes=UNLOGGED,
    info=_about("Moves of this database to another server, or from one. Both servers have a row."),
)

migration_step = Table(
    "migration_step",
    metadata,
    _id("stepid"),
    _column("migration", Text, "the name of the move"),
    _column("command", Text, "the command of `subscriber migrate` that ran the step"),
    _column("step", Text, "the name of the step"),
    _column("began", TIME, "its start", default="clock_timestamp()"),
    _column("ended", TIME, "its end; NULL: it runs, or its command was killed", null=True),
    _column("error", Text, "the reason why it failed; NULL: it did not", null=True),
    _column("detail", JSONB, "its statements, positions and figures", default="'{}'::jsonb"),
    _kept("new_record_of_many"),
    prefixes=UNLOGGED,
    info=_about("The steps of each move that this server has taken part in, by time."),
)

complete = Table(
    "complete",
    metadata,
    _column("since", TIME, "when the tables were filled"),
    prefixes=UNLOGGED,
    info=_about("Has a row while the tables have all rows: a crash of the server empties them."),
)
