"""The definitions of types that are not built in, from the publisher's catalog."""

from __future__ import annotations

from collections.abc import Iterable

import asyncpg

from subscriber.change_stream.types.registry import TypeRow
from subscriber.connection.connect import connect
from subscriber.connection.conninfo import Conninfo
from subscriber.connection.errors import CLIENT_ERRORS, server_fields
from subscriber.errors import ConnectionLost, ServerError

_QUERY = """
SELECT t.oid::bigint, pg_catalog.format_type(t.oid, NULL),
       CASE WHEN t.typcategory = 'A' AND t.typelem <> 0 THEN 'a' ELSE t.typtype::text END,
       (CASE WHEN t.typcategory = 'A' AND t.typelem <> 0 THEN t.typelem WHEN t.typtype = 'd' THEN t.typbasetype
             ELSE coalesce({subtype}, 0) END)::bigint,
       t.typdelim::text,
       ARRAY(SELECT a.attname::text FROM pg_catalog.pg_attribute a
              WHERE a.attrelid = t.typrelid AND t.typtype = 'c' AND a.attnum > 0 AND NOT a.attisdropped
              ORDER BY a.attnum),
       ARRAY(SELECT a.atttypid::bigint FROM pg_catalog.pg_attribute a
              WHERE a.attrelid = t.typrelid AND t.typtype = 'c' AND a.attnum > 0 AND NOT a.attisdropped
              ORDER BY a.attnum)
  FROM pg_catalog.pg_type t WHERE t.oid::bigint = ANY ($1::bigint[])
"""
_SUBTYPE = "(SELECT r.rngsubtype FROM pg_catalog.pg_range r WHERE r.rngtypid = t.oid{multirange})"


async def look_up(conninfo: Conninfo, oids: Iterable[int], known: Iterable[int]) -> list[TypeRow]:
    """Read types from the publisher's catalog, together with the types that they contain.

    The catalog has current definitions. If a type was altered after a change, the change is decoded with the newer
    definition.

    Args:
        conninfo: the publisher. The function opens a connection and closes it.
        oids: OIDs of types. Types that no longer exist are missing in the result.
        known: OIDs of types that are not needed.

    Raises:
        ConnectionLost: the publisher cannot be reached, or the connection is lost.
        ServerError: the publisher rejects the connection or the query.
    """
    connection = await connect(conninfo, application_name="subscriber types")
    try:
        multirange = " OR r.rngmultitypid = t.oid" if connection.get_server_version() >= (14,) else ""
        query = _QUERY.format(subtype=_SUBTYPE.format(multirange=multirange))
        seen = set(known)
        types: list[TypeRow] = []
        wanted = set(oids) - seen
        while wanted:
            rows = [_row(record) for record in await connection.fetch(query, sorted(wanted))]
            types += rows
            seen |= wanted
            wanted = {oid for row in rows for oid in row.needs} - seen
        return types
    except asyncpg.PostgresError as error:
        raise ServerError(server_fields(error)) from error
    except CLIENT_ERRORS as error:
        raise ConnectionLost(f"could not look up types on the publisher: {error}") from error
    finally:
        connection.terminate()


def _row(record: asyncpg.Record) -> TypeRow:
    oid, name, kind, part, delimiter, names, types = record
    return TypeRow(oid, name, kind, part, delimiter, tuple(zip(names, types, strict=True)))
