"""What publishes each table: the entries of the publisher's catalogs, by which a table is recognized as published.

An entry is a letter and an OID: `p` a publication of all tables, `n` its entry of a schema, `r` its entry of a table or
of a root of its partition tree. An entry that is dropped and created again has another OID. So two looks at a table
that have an entry in common show that the table was published in between.

Source: pg_publication, pg_publication_namespace, pg_publication_rel.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from subscriber import quoting
from subscriber import server_features as features
from subscriber.connection.session import Session
from subscriber.publisher.answers import parsing
from subscriber.publisher.tables import tables_query

Name: TypeAlias = tuple[str, str]  # schema, name

_ENTRY = re.compile(r"[pnr]\d{1,10}")


@dataclass(frozen=True, slots=True)
class PublishedTables:
    """The tables of a subscription's publications.

    Attributes:
        tables: the entries of each table.
        missing_publications: names of publications that do not exist, in the order of the subscription.
        other_publications: all publications, if one is missing.
        dropped: tables of the subscription that are not published, and do not exist on the publisher.
    """

    tables: Mapping[Name, frozenset[str]] = field(default_factory=dict)
    missing_publications: tuple[str, ...] = ()
    other_publications: tuple[str, ...] = ()
    dropped: frozenset[Name] = frozenset()


async def read_published_tables(
    session: Session, publications: Sequence[str], subscribed: Collection[Name] = ()
) -> PublishedTables:
    """Read the tables of publications.

    Args:
        session: a session on the publisher.
        publications: the publications of the subscription.
        subscribed: names of the subscription's tables on the publisher.

    Raises:
        ServerError: the publisher refuses a query.
        ProtocolError: its answer is malformed.
    """
    rows = await session.rows(_query(publications, session.server_version))
    with parsing("replicated tables"):
        tables = {(schema or "", name or ""): _entries(text) for schema, name, text in rows}
    existing = [name for (name,) in await session.rows("SELECT pubname FROM pg_catalog.pg_publication ORDER BY 1")]
    missing = tuple(name for name in publications if name not in existing)
    others = tuple(name or "" for name in existing) if missing else ()
    unpublished = sorted(set(subscribed) - tables.keys())
    there = {tuple(row) for row in await session.rows(_existing(unpublished))} if unpublished else set()
    dropped = frozenset(table for table in unpublished if table not in there)
    return PublishedTables(tables, missing, others, dropped)


def all_entries(tables: Mapping[Name, frozenset[str]]) -> frozenset[str]:
    """Return the entries of all tables. A table that was renamed has its entry under the new name."""
    return frozenset().union(*tables.values())


def _entries(text: str | None) -> frozenset[str]:
    entries = frozenset((text or "").split())
    if not all(map(_ENTRY.fullmatch, entries)):
        raise ValueError("an entry of a publication is malformed")
    return entries


def _query(publications: Sequence[str], version: int) -> str:
    """Rows: schema, name, and the entries with a space between two."""
    names = quoting.literals(publications)
    of_ours = f"JOIN pg_catalog.pg_publication p ON p.pubname IN ({names})"
    tree = "SELECT c.oid"
    if features.PARTITION_TREES.is_in(version):
        tree += " UNION ALL SELECT a.relid FROM pg_catalog.pg_partition_ancestors(c.oid) a"
    entries = [
        f"SELECT 'p' || p.oid FROM pg_catalog.pg_publication p WHERE p.pubname IN ({names}) AND p.puballtables",
        f"SELECT 'r' || r.oid FROM pg_catalog.pg_publication_rel r {of_ours} AND p.oid = r.prpubid"
        f" WHERE r.prrelid IN ({tree})",
    ]
    if features.COLUMN_LISTS.is_in(version):
        entries.append(
            f"SELECT 'n' || s.oid FROM pg_catalog.pg_publication_namespace s {of_ours} AND p.oid = s.pnpubid"
            f" WHERE s.pnnspid IN (SELECT m.relnamespace FROM pg_catalog.pg_class m WHERE m.oid IN ({tree}))"
        )
    return (
        "SELECT DISTINCT t.nspname, t.relname, (SELECT pg_catalog.string_agg(e.entry, ' ')"
        f" FROM ({' UNION ALL '.join(entries)}) AS e (entry))"
        f" FROM ({tables_query(publications, version)}) AS t (nspname, relname)"
        " JOIN pg_catalog.pg_namespace n ON n.nspname = t.nspname"
        " JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = t.relname"
    )


def _existing(names: Iterable[Name]) -> str:
    """Rows: schema and name of the tables that exist."""
    wanted = ", ".join(f"({quoting.literal(schema)}, {quoting.literal(name)})" for schema, name in names)
    return (
        f"SELECT n.nspname, c.relname FROM (VALUES {wanted}) AS w (schema, name)"
        " JOIN pg_catalog.pg_namespace n ON n.nspname = w.schema::pg_catalog.name"
        " JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = w.name::pg_catalog.name"
        " AND c.relkind IN ('r', 'p')"
    )
