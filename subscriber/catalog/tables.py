"""The tables of schema "subscriber", for alembic's comparison and for anyone who builds statements on them.

The migrations are the tables' history and stand on their own; a test asserts that they end in exactly these. What
runs in a worker uses the plain SQL of store.py: importing this module costs a third of a second.
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
    Identity,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB, OID
from sqlalchemy.dialects.postgresql.base import ischema_names
from sqlalchemy.types import UserDefinedType

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


class PgLsn(UserDefinedType[str]):
    """A position in WAL."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        return "pg_lsn"


# So that reflection, which alembic compares with, gives these types back.
ischema_names["name"] = Name
ischema_names['"char"'] = Char
ischema_names["pg_lsn"] = PgLsn


def _subscription_column(name: str = "subid", *, primary_key: bool = True) -> Column[int]:
    """A column that goes away with its subscription."""
    return Column(name, OID, ForeignKey("subscriber.subscription.subid", ondelete="CASCADE"), primary_key=primary_key)


def _count(name: str) -> Column[int]:
    return Column(name, BigInteger, nullable=False, server_default=text("0"))


subscription = Table(
    "subscription",
    metadata,
    Column("subid", OID, primary_key=True, server_default=text("subscriber.new_subscription_oid()")),
    Column("subname", Name, nullable=False, unique=True),
    Column("subowner", OID, nullable=False),
    Column("subenabled", Boolean, nullable=False),
    Column("subconninfo", Text, nullable=False),
    Column("subslotname", Name),  # NULL: slot_name = NONE
    Column("subsynccommit", Text, nullable=False),
    Column("subpublications", ARRAY(Text), nullable=False),
    Column("subbinary", Boolean, nullable=False),
    Column("substream", Char, nullable=False),  # f off, t on, p parallel
    Column("subtwophasestate", Char, nullable=False),  # d disabled, p pending, e enabled
    Column("subdisableonerr", Boolean, nullable=False),
    Column("subpasswordrequired", Boolean, nullable=False),
    Column("subrunasowner", Boolean, nullable=False),
    Column("suborigin", Text, nullable=False),
    Column("subfailover", Boolean, nullable=False),
    Column("subskiplsn", PgLsn, nullable=False, server_default=text("'0/0'::pg_lsn")),
    Column("subconflictpolicy", Text, nullable=False, server_default=text("''")),
    Column("subconflicthistory", Text, nullable=False, server_default=text("'decided'")),  # or all, none
    Column("subconflictrows", Boolean, nullable=False, server_default=text("false")),
    Column("subcopyengine", Text, nullable=False, server_default=text("'auto'")),  # or asyncio, spark
)

subscription_rel = Table(
    "subscription_rel",
    metadata,
    _subscription_column("srsubid"),
    Column("srrelid", OID, primary_key=True, autoincrement=False),
    Column("srsubstate", Char, nullable=False),  # i, d, f, s or r
    Column("srsublsn", PgLsn),  # NULL until a position is known
    Column("srsource", ARRAY(Text)),  # schema and name on the publisher, where hooks change the rows; NULL: nowhere
)

progress = Table(
    "progress",
    metadata,
    _subscription_column(),
    Column("relid", OID, primary_key=True, autoincrement=False, server_default=text("0")),  # 0: the apply worker
    Column("remote_lsn", PgLsn, nullable=False),
    Column("system_id", Text),  # the publisher's; NULL until its first connection
)

confirmed = Table(
    "confirmed",
    metadata,
    _subscription_column(),
    Column("confirmed_lsn", PgLsn, nullable=False),  # the publisher has been told of nothing beyond it
)

worker = Table(
    "worker",
    metadata,
    _subscription_column(),
    Column("relid", OID, primary_key=True, autoincrement=False, server_default=text("0")),  # 0: the apply worker
    Column("worker_type", Text, nullable=False),
    Column("pid", Integer),  # the backend on the target; NULL while there is no connection
    Column("state", Text, nullable=False),
    Column("received_lsn", PgLsn),
    Column("last_msg_send_time", DateTime(timezone=True)),
    Column("last_msg_receipt_time", DateTime(timezone=True)),
    Column("latest_end_lsn", PgLsn),
    Column("latest_end_time", DateTime(timezone=True)),
    Column("error", Text),
    Column("error_time", DateTime(timezone=True)),
    Column("error_hint", Text),
    Column("next_retry", DateTime(timezone=True)),
    Column("started", DateTime(timezone=True), nullable=False),
    _count("transactions"),
    _count("changes"),
    _count("bytes"),
    _count("copy_rows"),
    _count("copy_bytes"),
    _count("copy_total_bytes"),
    Column("updated_at", DateTime(timezone=True), nullable=False),
    Column("leader_pid", Integer),  # of a parallel apply worker: the apply worker's `pid`
    Column("waiting_for", Text),  # what the worker's backend has been waiting for
    Column("streamed", JSONB, nullable=False, server_default=text("'[]'")),  # transactions that have not ended yet
    Column("limits", ARRAY(Text)),  # what it has to do without; NULL: nothing
    Column("one_by_one", JSONB, nullable=False, server_default=text("'{}'")),  # reason to number of changes
    prefixes=["UNLOGGED"],
)

# One row written by the prepared transaction itself, `committed`, and one beside it.
prepared = Table(
    "prepared",
    metadata,
    Column("subid", OID, primary_key=True, autoincrement=False),
    Column("xid", BigInteger, primary_key=True, autoincrement=False),  # the publisher's
    Column("committed", Boolean, primary_key=True),
    Column("gid", Text, nullable=False),  # on the target
    Column("publisher_gid", Text),
    Column("prepare_end_lsn", PgLsn),
    Column("prepared_at", DateTime(timezone=True)),  # on the publisher
)

CONFLICTS = (
    "insert_exists",
    "update_origin_differs",
    "update_exists",
    "update_missing",
    "delete_origin_differs",
    "delete_missing",
    "multiple_unique_conflicts",
)

subscription_stats = Table(
    "subscription_stats",
    metadata,
    _subscription_column(),
    _count("apply_error_count"),
    _count("sync_error_count"),
    *[_count(f"confl_{conflict}") for conflict in CONFLICTS],
    Column("stats_reset", DateTime(timezone=True)),
)

# What each conflict was about and what was done; see target/history.py.
conflict_history = Table(
    "conflict_history",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("subid", OID, ForeignKey("subscriber.subscription.subid", ondelete="CASCADE"), nullable=False),
    Column("detected", DateTime(timezone=True), nullable=False, server_default=text("clock_timestamp()")),
    Column("last_detected", DateTime(timezone=True), nullable=False, server_default=text("clock_timestamp()")),
    Column("occurrences", BigInteger, nullable=False, server_default=text("1")),
    Column("relid", OID, nullable=False),
    Column("relation", Text, nullable=False),  # schema.table; a partition's own name
    Column("conflict_type", Text, nullable=False),
    Column("index_name", Text),  # the unique index that refused; NULL: the row to be changed, or none
    Column("key", JSONB),  # column -> value
    Column("remote_xid", BigInteger, nullable=False),
    Column("remote_finish_lsn", PgLsn, nullable=False),  # what SKIP takes
    Column("remote_commit_time", DateTime(timezone=True)),
    Column("local_xid", BigInteger),  # this and the next two: of who wrote the target's row
    Column("local_origin", Text),  # NULL: no replication origin, or one that does not exist any more
    Column("local_commit_time", DateTime(timezone=True)),
    Column("policy", Text, nullable=False),
    Column("resolution", Text, nullable=False),
    Column("local_row", JSONB),  # these two only with conflict_log_rows
    Column("remote_row", JSONB),
    Index("conflict_history_subid_detected_idx", "subid", "detected"),
    Index("conflict_history_subid_remote_finish_lsn_idx", "subid", "remote_finish_lsn"),
)

bulk_copy = Table(
    "bulk_copy",
    metadata,
    Column("copyid", BigInteger, Identity(always=True), primary_key=True),
    Column("subid", OID, ForeignKey("subscriber.subscription.subid", ondelete="CASCADE"), nullable=False, unique=True),
    Column("lsn", PgLsn, nullable=False),  # of the snapshot
)

bulk_copy_rel = Table(
    "bulk_copy_rel",
    metadata,
    Column("copyid", BigInteger, ForeignKey("subscriber.bulk_copy.copyid", ondelete="CASCADE"), primary_key=True),
    Column("relid", OID, primary_key=True, autoincrement=False),
    Column("parts", Integer, nullable=False),
)

copy_done = Table(
    "copy_done",
    metadata,
    Column("copyid", BigInteger, primary_key=True, autoincrement=False),
    Column("relid", OID, primary_key=True, autoincrement=False),
    Column("part", Integer, primary_key=True, autoincrement=False),
    Column("rows", BigInteger),
    Column("bytes", BigInteger),
    ForeignKeyConstraint(
        ["copyid", "relid"], ["subscriber.bulk_copy_rel.copyid", "subscriber.bulk_copy_rel.relid"], ondelete="CASCADE"
    ),
)

hold = Table(
    "hold",
    metadata,
    _subscription_column(),
    Column("stop_at", PgLsn, nullable=False),
    Column("held_at", PgLsn),
)
