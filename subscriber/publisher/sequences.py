"""The publisher's sequences: those that a subscription synchronizes, and their values.

A publication contains sequences since PostgreSQL 19. An older publication stands for the sequences that are owned by
the columns that it publishes: those of serial and identity columns.

Source: src/backend/replication/logical/sequencesync.c, copy_sequences(); src/backend/commands/subscriptioncmds.c.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from subscriber import quoting
from subscriber import server_features as features
from subscriber.lsn import Lsn

Name = tuple[str, str]  # schema, name
BATCH_SIZE = 100  # sequences that are read in one query, and set in one transaction


@dataclass(frozen=True, slots=True)
class SequenceDefinition:
    """The properties that have to be the same on both sides."""

    type_oid: int
    start: int
    increment: int
    least: int
    greatest: int
    cycles: bool


@dataclass(frozen=True, slots=True)
class SequenceValue:
    """A sequence of the publisher."""

    last_value: int
    is_called: bool  # nextval() returns the value after `last_value`
    lsn: Lsn  # of the page with the value; before PostgreSQL 19 the WAL position before the value was read
    definition: SequenceDefinition


def published_query(publications: Sequence[str], server_version: int) -> str:
    """Build a query for schema and name of the sequences of publications, ordered by them."""
    names = quoting.literals(publications)
    if features.PUBLISHED_SEQUENCES.is_in(server_version):
        return (
            "SELECT DISTINCT s.schemaname, s.sequencename FROM pg_catalog.pg_publication_sequences s"
            f" WHERE s.pubname IN ({names}) ORDER BY 1, 2"
        )
    listed = " AND a.attname = ANY (p.attnames)" if features.COLUMN_LISTS.is_in(server_version) else ""
    # A sequence of a partition's column is owned by the column of the root.
    return (
        "SELECT DISTINCT n.nspname, c.relname FROM pg_catalog.pg_publication_tables p"
        " JOIN pg_catalog.pg_namespace pn ON pn.nspname = p.schemaname"
        " JOIN pg_catalog.pg_class pc ON pc.relnamespace = pn.oid AND pc.relname = p.tablename"
        " JOIN LATERAL (SELECT pc.oid AS relid UNION"
        " SELECT relid FROM pg_catalog.pg_partition_ancestors(pc.oid)) t ON true"
        " JOIN pg_catalog.pg_depend d ON d.refclassid = 'pg_catalog.pg_class'::pg_catalog.regclass"
        " AND d.refobjid = t.relid AND d.refobjsubid > 0 AND d.deptype IN ('a', 'i')"
        " AND d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass"
        f" JOIN pg_catalog.pg_attribute a ON a.attrelid = t.relid AND a.attnum = d.refobjsubid{listed}"
        " JOIN pg_catalog.pg_class c ON c.oid = d.objid AND c.relkind = 'S'"
        " JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
        f" WHERE p.pubname IN ({names}) ORDER BY 1, 2"
    )


def values_query(names: Sequence[Name], server_version: int) -> str:
    """Build a query for a row of each sequence that exists.

    Its columns: the place in `names`; whether the role may read the sequence; last_value, is_called and the page's LSN;
    type, start, increment, least and greatest value, cycle. Before PostgreSQL 19, last_value and is_called are NULL,
    and the LSN is the present WAL position.
    """
    wanted = ", ".join(
        f"({quoting.literal(schema)}, {quoting.literal(name)}, {place})" for place, (schema, name) in enumerate(names)
    )
    value, source = (
        "ps.last_value, ps.is_called, ps.page_lsn",
        (" JOIN LATERAL pg_catalog.pg_get_sequence_data(seq.seqrelid) AS ps ON true"),
    )
    if not features.PUBLISHED_SEQUENCES.is_in(server_version):
        value, source = (
            "NULL, NULL, CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()"
            " ELSE pg_catalog.pg_current_wal_insert_lsn() END",
            "",
        )
    return (
        f"SELECT s.place, pg_catalog.has_sequence_privilege(c.oid, 'SELECT'), {value}, seq.seqtypid, seq.seqstart,"
        " seq.seqincrement, seq.seqmin, seq.seqmax, seq.seqcycle"
        f" FROM (VALUES {wanted}) AS s (schema, name, place)"
        " JOIN pg_catalog.pg_namespace n ON n.nspname = s.schema"
        " JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = s.name"
        f" JOIN pg_catalog.pg_sequence seq ON seq.seqrelid = c.oid{source}"
    )


def last_values_query(names: Sequence[tuple[int, Name]]) -> str:
    """Build a query for place, last_value and is_called of sequences that the role may read, before PostgreSQL 19."""
    return " UNION ALL ".join(
        f"SELECT {place}, last_value, is_called FROM {quoting.qualified(*name)}" for place, name in names
    )
