"""What pglogical publishes here: replication sets, and how they compare with publications. For `subscriber adopt`.

A replication set is pglogical's publication. A subscription with several sets gets a change if one set contains the
change, and a column if one set lists the column. Several publications have the same effect.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from subscriber import server_features as features
from subscriber.publisher.answers import parsing
from subscriber.publisher.connection import Publisher
from subscriber.quoting import literal, literals

PLUGIN = "pglogical_output"
ACTIONS = ("insert", "update", "delete", "truncate")

Name = tuple[str, str]  # schema and name

# The columns that are sent, without generated ones, which the target computes.
_COLUMNS = """
(SELECT pg_catalog.json_agg(a.attname) FROM pg_catalog.pg_attribute a
  WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''
        AND ({listed} IS NULL OR a.attname::text = ANY ({listed}::text[])))
"""
_SETS = f"""
SELECT s.set_name, n.nspname, c.relname, s.replicate_insert, s.replicate_update, s.replicate_delete,
       s.replicate_truncate, {_COLUMNS.format(listed="t.set_att_list")}, t.set_row_filter IS NOT NULL,
       t.set_att_list IS NOT NULL
  FROM pglogical.replication_set s JOIN pglogical.local_node l ON l.node_id = s.set_nodeid
  JOIN pglogical.replication_set_table t ON t.set_id = s.set_id
  JOIN pg_catalog.pg_class c ON c.oid = t.set_reloid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE s.set_name IN ({{names}}) AND n.nspname <> 'pglogical' ORDER BY 1, 2, 3
"""
_SEQUENCES = """
SELECT s.set_name, n.nspname, c.relname
  FROM pglogical.replication_set s JOIN pglogical.local_node l ON l.node_id = s.set_nodeid
  JOIN pglogical.replication_set_seq t ON t.set_id = s.set_id
  JOIN pg_catalog.pg_class c ON c.oid = t.set_seqoid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE s.set_name IN ({names}) ORDER BY 1, 2, 3
"""
_PUBLICATIONS = """
SELECT p.pubname, n.nspname, c.relname, p.pubinsert, p.pubupdate, p.pubdelete, p.pubtruncate, {columns}, {filtered},
       false
  FROM pg_catalog.pg_publication p JOIN pg_catalog.pg_publication_tables t ON t.pubname = p.pubname
  JOIN pg_catalog.pg_namespace n ON n.nspname = t.schemaname
  JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = t.tablename
 WHERE p.pubname IN ({names}) ORDER BY 1, 2, 3
"""
# Messages of other types than TRUNCATE, which publications publish as well.
_MESSAGES = """
SELECT pg_catalog.count(*), pg_catalog.max(q.queued_at), pg_catalog.pg_current_wal_insert_lsn()
  FROM pglogical.queue q WHERE q.message_type <> 'T'
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """One table of a replication set or publication."""

    container: str
    table: Name
    actions: frozenset[str]
    columns: frozenset[str]  # without generated ones
    is_filtered: bool  # only some rows
    has_column_list: bool = False


@dataclass(slots=True)
class Published:
    """The changes of one table that several sets or publications have together."""

    actions: set[str] = field(default_factory=set)
    columns: set[str] = field(default_factory=set)
    is_filtered: bool = False


@dataclass(frozen=True, slots=True)
class Messages:
    """The messages that pglogical has sent to its subscribers beside changes, DDL for example.

    Messages that are visible at `position` were committed before it.
    """

    count: str
    newest: str | None
    position: str

    def are_those_of(self, other: Messages) -> bool:
        """Return True if no message was added or removed between the two."""
        return (self.count, self.newest) == (other.count, other.newest)


async def replication_sets(publisher: Publisher, names: Sequence[str]) -> list[Entry]:
    """Return the tables of replication sets, without pglogical's own."""
    return await _entries(publisher, _SETS.format(names=literals(names)), "replication sets")


async def publications(publisher: Publisher, names: Sequence[str]) -> list[Entry]:
    """Return the tables of publications."""
    lists = features.COLUMN_LISTS.is_in(publisher.server_version)
    query = _PUBLICATIONS.format(
        names=literals(names),
        columns=_COLUMNS.format(listed="t.attnames" if lists else "NULL"),
        filtered="t.rowfilter IS NOT NULL" if lists else "false",
    )
    return await _entries(publisher, query, "publications")


async def _entries(publisher: Publisher, query: str, what: str) -> list[Entry]:
    rows = await publisher.session.rows(query)
    with parsing(what):
        entries = []
        for container, schema, name, *flags in rows:
            *wanted, columns, is_filtered, has_list = flags
            actions = frozenset(action for action, flag in zip(ACTIONS, wanted, strict=True) if flag == "t")
            sent = frozenset(str(column) for column in json.loads(columns or "[]"))
            table = (schema or "", name or "")
            entries.append(Entry(container or "", table, actions, sent, is_filtered == "t", has_list == "t"))
        return entries


async def sequences(publisher: Publisher, names: Sequence[str]) -> list[tuple[str, Name]]:
    """Return the sequences of replication sets, each with the name of its set."""
    rows = await publisher.session.rows(_SEQUENCES.format(names=literals(names)))
    return [(container or "", (schema or "", name or "")) for container, schema, name in rows]


async def messages(publisher: Publisher) -> Messages:
    """Return which messages are in the queue, with a position after their commits and those of all publications."""
    ((count, newest, position),) = await publisher.session.rows(_MESSAGES)
    return Messages(count or "", newest, position or "")


async def flush_wal(publisher: Publisher) -> None:
    """Commit a transaction without changes, so that pglogical gets all WAL until then, also of an idle server."""
    await publisher.session.rows("SELECT pg_catalog.pg_logical_emit_message(true, 'subscriber', '')")


async def copy_slot(publisher: Publisher, source: str, name: str) -> None:
    """Create slot `name` for pgoutput at the position of the inactive slot `source`, which does not change.

    Raises:
        ServerError: The server refuses it.
    """
    await publisher.session.rows(
        f"SELECT pg_catalog.pg_copy_logical_replication_slot({literal(source)}, {literal(name)}, false, 'pgoutput')"
    )


def combined(entries: Iterable[Entry]) -> dict[Name, Published]:
    """Return the changes of each table that a subscriber of all these sets, or publications, gets."""
    tables_by_name: dict[Name, Published] = {}
    for entry in entries:
        published = tables_by_name.setdefault(entry.table, Published())
        published.actions |= entry.actions
        published.columns |= entry.columns
        published.is_filtered |= entry.is_filtered
    return tables_by_name
