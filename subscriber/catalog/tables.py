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
    Float,
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
    _column("subdisabledat", TIME, "when it was disabled; NULL: it is enabled", null=True),
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
    _column("srcopy", Text, "until state f: copy, compare, delete_extra or truncate", default="'copy'"),
    _kept(),
    _column("srnspname", Name, "the table's schema", null=True),
    _column("srrelname", Name, "the table's name", null=True),
    _column(
        "srforeignkeys",
        Boolean,
        "the publisher's foreign keys are to be added when the table is ready",
        default="false",
    ),
    _column(
        "srmemberships",
        Text,
        "the publisher's system identifier, and the entries of its publications with the table, as last seen;"
        " NULL: not seen yet",
        null=True,
    ),
    _column(
        "srmissedlsn",
        PgLsn,
        "the position since which changes may be missing, because the table was not published; NULL: it always was",
        null=True,
    ),
    _column("srmisseduntil", PgLsn, "the position at which it was seen published again; NULL: it is not", null=True),
    _column("srmissedat", TIME, "when the launcher has noticed it", null=True),
    _column("srformer", OID, "the table that had the name before, if it still exists", null=True),
    _column(
        "srextra",
        BigInteger,
        "rows that the publisher did not have when a repair or a synchronization has compared the table, and that were"
        " kept",
        default="0",
    ),
    _column(
        "srdifferentlsn", PgLsn, "the position of the last comparison, which found differences; NULL: none", null=True
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

conflict_history = Table(
    "conflict_history",
    metadata,
    _id("id"),
    _of_subscription(key=False),
    _column("detected", TIME, "when it was met first", default="clock_timestamp()"),
    _column("last_detected", TIME, "when it was met last", default="clock_timestamp()"),
    _column("occurrences", BigInteger, "how often: an error comes again with each attempt", default="1"),
    _column("relid", OID, "the table on the target"),
    _column("relation", Text, "schema.table; a partition's own name"),
    _column("conflict_type", Text, "PostgreSQL's name of the conflict"),
    _column("index_name", Text, "the unique index that refused; NULL: the row to be changed, or none", null=True),
    _column("key", JSONB, "the key's values by column; NULL if the whole row is the key", null=True),
    _column("remote_xid", BigInteger, "the publisher's transaction"),
    _column("remote_finish_lsn", PgLsn, "the position that `SKIP` takes"),
    _column("remote_commit_time", TIME, "by the publisher's clock", null=True),
    _column("local_xid", BigInteger, "who wrote the target's row", null=True),
    _column("local_origin", Text, "by which replication origin; NULL: none, or one that is gone", null=True),
    _column("local_commit_time", TIME, "and when", null=True),
    _column("policy", Text, "the policy that decided"),
    _column("resolution", Text, "the decision"),
    _column("local_row", JSONB, "the target's row, values as texts; with `conflict_log_rows`", null=True),
    _column("remote_row", JSONB, "the publisher's row, values as texts; with `conflict_log_rows`", null=True),
    _kept("new_record_of_many"),
    Index("conflict_history_subid_detected_idx", "subid", "detected"),
    Index("conflict_history_subid_remote_finish_lsn_idx", "subid", "remote_finish_lsn"),
    prefixes=UNLOGGED,
    info=_about("The rows of each conflict, and the decision."),
)

quarantine = Table(
    "quarantine",
    metadata,
    _of_subscription(),
    _key("finish_lsn", PgLsn, "the position of its commit on the publisher, as `SKIP` takes it"),
    _column("remote_xid", BigInteger, "the publisher's transaction"),
    _column("commit_time", TIME, "the time of its commit, by the publisher's clock", null=True),
    _column("parked", TIME, "the time at which it was put in quarantine", default="clock_timestamp()"),
    _column("relations", ARRAY(Text), "the tables that it changes, with their schemas"),
    _column("changes", BigInteger, "the number of its changes"),
    _column("bytes", BigInteger, "the size of its messages", default="0"),
    _column("depends_on", ARRAY(PgLsn), "earlier ones that must be applied first", default="'{}'::pg_lsn[]"),
    _column("error", Text, "the last error; NULL: it only depends on others", null=True),
    _column("error_detail", Text, "the detail of that error", null=True),
    _column("attempts", Integer, "retries that have failed", default="0"),
    _column("retry", Boolean, "whether the worker is to retry it now", default="false"),
    _column("edited", Integer, "how often its changes were edited", default="0"),
    _column("content", OID, "the large object with its messages", unique=True),
    _kept("new_record_of_many"),
    prefixes=UNLOGGED,
    info=_about("Transactions in quarantine: they could not be applied, or depend on such a one."),
)

repair_transaction = Table(
    "repair_transaction",
    metadata,
    _id("id"),
    _of_subscription(key=False),
    _column("repaired_at", TIME, "the time of the repair", default="clock_timestamp()"),
    _column("role", Name, "the role that has run the command"),
    _column("command", Text, "the command: repair, or resync for tables that a worker has compared"),
    _column("relation", Text, "the table on the target, with its schema"),
    _column("lsn", PgLsn, "the publisher's position whose rows the target has since then"),
    _column("changes", JSONB, "the rows: action, key, row_before and row_after, as in view `repairs`"),
    _kept("new_record_of_many"),
    Index("repair_transaction_subid_repaired_at_idx", "subid", "repaired_at"),
    prefixes=UNLOGGED,
    info=_about("Transactions that have repaired rows. View `repairs` has a row for each row of the target."),
)

audit = Table(
    "audit",
    metadata,
    _id("id"),
    _column("began", TIME, "the start of the action", default="clock_timestamp()"),
    _column("ended", TIME, "its end; NULL: it runs, or its process was killed", null=True),
    _column("subid", OID, "the subscription, which may be dropped meanwhile"),
    _column("subname", Name, "the name that the subscription had"),
    _column("who", Text, "the label of the person's token, or `command line`"),
    _column("role", Name, "the role that has run the action", default="SESSION_USER"),
    _column("address", Text, "the address of the client, or `local`"),
    _column("action", Text, "the action: see `docs/console.md`"),
    _column("arguments", JSONB, "its arguments"),
    _column("result", Text, "`done`, or the reason why it failed; NULL: it has not ended", null=True),
    _column("summary", JSONB, "the figures of a comparison or a repair", null=True),
    _kept("new_record_of_many"),
    Index("audit_subid_id_idx", "subid", "id"),
    prefixes=UNLOGGED,
    info=_about("Actions of people on the console, and comparisons of `subscriber verify`."),
)

deleted_row = Table(
    "deleted_row",
    metadata,
    _column("relid", OID, "the table on the target; of a partitioned table the partition, if that was named"),
    _column("key", BYTEA, "a hash of the key"),
    _column("xid", Xid8, "the transaction that deleted it"),
    _column("record", OID, "the large object with this row and others of the same statement"),
    Index("deleted_row_relid_key_idx", "relid", "key"),
    Index("deleted_row_xid_record_idx", "xid", "record"),
    prefixes=UNLOGGED,
    info=_about("The deleted rows of tables of subscriptions with `retain_dead_tuples`."),
)

retention = Table(
    "retention",
    metadata,
    _of_subscription(),
    _column("horizon", Xid8, "the subscription does not need the deleted rows of earlier transactions", null=True),
    _column("expired", Xid8, "the last transaction whose deleted rows became too old while needed", null=True),
    prefixes=UNLOGGED,
    info=_about("Which deleted rows each subscription with `retain_dead_tuples` still needs."),
)

bulk_copy = Table(
    "bulk_copy",
    metadata,
    _id("copyid"),
    _of_subscription(key=False, unique=True),
    _column("lsn", PgLsn, "the position of the snapshot"),
    _column("fence", BYTEA, "the token that its executors have to show", default="uuid_send(gen_random_uuid())"),
    _kept(),
    prefixes=UNLOGGED,
    info=_about("Copies by `subscriber copy` that are under way."),
)

bulk_copy_rel = Table(
    "bulk_copy_rel",
    metadata,
    Column(
        "copyid",
        BigInteger,
        ForeignKey("subscriber.bulk_copy.copyid", ondelete="CASCADE"),
        primary_key=True,
        doc="the copy",
    ),
    _key("relid", OID, "the table on the target"),
    _column("parts", Integer, "into how many parts it is cut"),
    _kept(),
    prefixes=UNLOGGED,
    info=_about("Their tables."),
)

copy_done = Table(
    "copy_done",
    metadata,
    _key("copyid", BigInteger, "the copy"),
    _key("relid", OID, "the table on the target"),
    _key("part", Integer, "the number of the part"),
    _column("rows", BigInteger, "rows copied", null=True),
    _column("bytes", BigInteger, "bytes copied", null=True),
    _kept("new_record_of_many"),
    ForeignKeyConstraint(
        ["copyid", "relid"], ["subscriber.bulk_copy_rel.copyid", "subscriber.bulk_copy_rel.relid"], ondelete="CASCADE"
    ),
    prefixes=UNLOGGED,
    info=_about("Their parts that are committed on the target."),
)

copied_range = Table(
    "copied_range",
    metadata,
    _id("rangeid"),
    _of_subscription(key=False),
    _column("relid", OID, "the table on the target"),
    _column("key_columns", ARRAY(Text), "the columns of the key"),
    _column("key_types", ARRAY(OID), "their types"),
    _column("low", ARRAY(Text), "the lowest key; NULL: no limit", null=True),
    _column("high", ARRAY(Text), "the first key behind the range; NULL: no limit", null=True),
    _column("single", Boolean, "whether the range is the key `low` alone", default="false"),
    _column("snapshot", Text, "the publisher's snapshot of the rows; NULL: the key is to be read again", null=True),
    _column("lsn", PgLsn, "a WAL position behind all transactions that the snapshot sees", null=True),
    _column("timeline", BigInteger, "the publisher's timeline"),
    _kept("new_record_of_many"),
    _column(
        "key_comparisons", ARRAY(Text), "type and collation of the columns that the publisher compares; NULL: others"
    ),
    Index("copied_range_subid_relid_idx", "subid", "relid"),
    prefixes=UNLOGGED,
    info=_about("Ranges of tables that are being copied with `copy_engine = ranges`."),
)

touched_range = Table(
    "touched_range",
    metadata,
    _id("id"),
    _of_subscription(key=False),
    _column("touched", JSONB, "the tables, and the ranges of each"),
    _column("verification", BigInteger, "the comparison that reads them; NULL: none yet", null=True),
    _kept("new_record_of_many"),
    Index("touched_range_subid_idx", "subid"),
    prefixes=UNLOGGED,
    info=_about("Ranges of keys that the stream has changed, of subscriptions with `track_ranges`."),
)

verification = Table(
    "verification",
    metadata,
    _of_subscription(),
    _column("number", BigInteger, "the last comparison that has begun"),
    _column("publisher", Text, "system identifier and timeline; NULL: none has ended", null=True),
    _column("tables", JSONB, "the tables without a difference", default="'[]'::jsonb"),
    _kept("new_record_of_many"),
    prefixes=UNLOGGED,
    info=_about("The last comparison of each subscription with `track_ranges`."),
)

history = Table(
    "history",
    metadata,
    _of_subscription(),
    _key("at", TIME, "the end of the minute"),
    _column("transactions", Float(53), "per second; NULL: not known", null=True),
    _column("changes", Float(53), "per second", null=True),
    _column("bytes", Float(53), "received, per second", null=True),
    _column("lag_bytes", BigInteger, "the greatest lag of the minute", null=True),
    _column("lag_seconds", Float(53), "the greatest lag of the minute", null=True),
    _column("retained_bytes", BigInteger, "the WAL that the publisher kept for the slot at its end", null=True),
    Index("history_at_idx", "at"),
    prefixes=UNLOGGED,
    info=_about("The history of each subscription, with the setting `history_retention`."),
)

hold = Table(
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

own_session = Table(
    "own_session",
    metadata,
    Column("pid", Integer, primary_key=True, autoincrement=False, doc="the backend"),
    _column("backend_start", TIME, "when the backend began"),
    _column("role", OID, "the role that logged in"),
    prefixes=UNLOGGED,
    info=_about(
        "Sessions of launchers and workers that are not in table `session`. One whose backend has ended does not count."
    ),
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
