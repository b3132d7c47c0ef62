"""schema_diff(): compare the definitions of two databases."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import asyncpg

from subscriber.catalog.connection import Connection
from subscriber.errors import StatementError
from subscriber.migration import record
from subscriber.migration.diff.catalog import CatalogObject, ObjectKey, read_catalog
from subscriber.migration.diff.difference import SchemaDifference, compare
from subscriber.migration.schema.code_owners import TRUSTED
from subscriber.quoting import identifier, literal
from subscriber.targets.postgres.restricted_operation import run_restricted

# Attributes whose texts servers print differently in different versions: expressions, and queries of views.
_EXPRESSIONS = {
    "column": ("default",),
    "constraint": ("check",),
    "index": ("columns", "predicate"),
    "policy": ("using", "check"),
    "relation": ("definition",),
}
_VIEW = "subscriber_diff"
# A cast to a type with a schema, which is no type of the system. To parse its literal can run code of the type's owner.
_CAST = re.compile(r'::\s*((?:"(?:[^"]|"")+"|\w+)\.(?:"(?:[^"]|"")+"|\w+))')
# The relation of an expression, whether its owner is trusted, and whether types have no code but that of trusted roles.
_PLACE = f"""
WITH trusted (name) AS ({TRUSTED})
SELECT pg_catalog.quote_ident(n.nspname), pg_catalog.pg_get_userbyid(c.relowner)::text,
       pg_catalog.pg_get_userbyid(c.relowner) IN (SELECT t.name FROM trusted t),
       NOT EXISTS (SELECT FROM pg_catalog.unnest($3::text[]) u (name)
                     LEFT JOIN pg_catalog.pg_type y ON y.oid = pg_catalog.to_regtype(u.name)
                    WHERE y.typtype IN ('b', 'e') IS NOT TRUE OR y.typelem <> 0
                       OR pg_catalog.pg_get_userbyid(y.typowner) NOT IN (SELECT t.name FROM trusted t))
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE c.oid = pg_catalog.to_regclass($2)
"""


async def schema_diff(source: Connection, target: Connection, *, without: Iterable[str] = ()) -> list[SchemaDifference]:
    """Compare the definitions of two databases of any versions since 13. Can be called at any time of a move.

    Both are read in one snapshot each, under locks that conflict with nothing but DDL. The target creates views in
    transactions that are rolled back, if the versions differ and texts of expressions do.

    Args:
        without: names of publications that are not compared, such as those of the move.

    Returns:
        The differences, in an order in which most of their statements can be executed. Empty if there are none.
    """
    versions = [side.get_server_version().major for side in (source, target)]
    for side in (source, target):  # statements have plain strings with backslashes
        await side.execute("SET standard_conforming_strings = on")
    left_out = {ObjectKey("publication", identifier(name)) for name in without}
    left_out |= {ObjectKey("publication", name) for name in without}
    there = await read_catalog(source, versions[1])
    here = await read_catalog(target, versions[0])
    for catalog in (there, here):
        for key in left_out:
            catalog.pop(key, None)
    if versions[0] != versions[1]:
        await print_alike(there, here, target)
    return list(compare(there, here))


async def own_publications(source: Connection, target: Connection) -> set[str]:
    """Return the publications that moves between two databases have created. They belong to no definition."""
    return await record.created_publications(source) | await record.created_publications(target)


async def print_alike(
    source: dict[ObjectKey, CatalogObject], target: Mapping[ObjectKey, CatalogObject], connection: Connection
) -> None:
    """Replace expressions of `source` by those of `target` if the target prints both alike."""
    for key, there in source.items():
        here = target.get(key)
        if here is None:
            continue
        changed: dict[str, Any] = {}
        for attribute in _EXPRESSIONS.get(key.kind, ()):
            old, new = there.attributes.get(attribute), here.attributes.get(attribute)
            if old is None or new is None or old == new:
                continue
            queries = [_query(key.kind, value, here.table) for value in (old, new)]
            relation = here.table or key.name
            printed = [await _printed(connection, query, relation) for query in queries]
            if printed[0] is not None and printed[0] == printed[1]:
                changed[attribute] = new
        if changed:
            source[key] = replace(there, attributes={**there.attributes, **changed})


def _query(kind: str, value: Any, table: str | None) -> str:
    if kind == "relation":
        return str(value)
    expressions = value if isinstance(value, list) else [value]
    columns = ", ".join(f"({expression}) AS c{number}" for number, expression in enumerate(expressions))
    return f"SELECT {columns} FROM {table}"


async def _printed(connection: Connection, query: str, relation: str) -> str | None:
    """Return a query as the server prints it. None: it cannot be parsed there, or by no role.

    The extended protocol refuses a second statement in the text, which the source has written. A query with types of
    users is parsed as the owner of the relation.
    """
    transaction = connection.transaction()
    await transaction.start()
    try:
        view, owner = f"pg_temp.{_VIEW}", None
        if types := [cast[1] for cast in _CAST.finditer(query)]:
            place = await connection.fetchrow(_PLACE, [], relation, types)
            if place is None:
                return None
            schema, owner, is_trusted, are_harmless = place
            if is_trusted and not are_harmless:
                return None
            view, owner = (view, None) if is_trusted else (f"{schema}.{_VIEW}", owner)
        if owner is None:
            await connection.fetch(f"CREATE TEMPORARY VIEW {_VIEW} AS {query}")
        else:
            await run_restricted(connection, owner, f"CREATE VIEW {view} AS {query}")
        printed = await connection.fetchval(f"SELECT pg_catalog.pg_get_viewdef({literal(view)}::pg_catalog.regclass)")
    except (asyncpg.PostgresError, StatementError):
        return None
    else:
        return str(printed)
    finally:
        await transaction.rollback()
