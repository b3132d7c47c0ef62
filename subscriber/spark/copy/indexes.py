"""Indexes of the publisher's tables that the target's lack, made when the rows are there.

An index that is filled row by row costs the copy more than one that is built at once. So the tables are made with
their keys alone, and what else the publisher has is built after the copy, from its definitions. Nothing that is there
is dropped or changed: an index of a name that the target knows is left out, as are those of constraints and of
partitioned tables.

No text of the publisher's is run: a definition is taken apart and put together again (publisher/index_definition.py).
It runs alone in a statement of the extended protocol, as the table's owner and with an empty search_path. The functions
of its expressions cannot leave that role, since CREATE INDEX runs them in a security-restricted operation.

Kill points considered: an index is built in the transaction that stores its table as complete. Before that the table
is one of which all parts are there and which is not complete yet; the next keeper builds what is missing, if it is
told to. Since 14 the target notices while it builds that the keeper is gone; an older one builds that index to its
end, and until then another keeper finds somebody at work. A build that fails costs its table nothing else: it is
stored as complete, and the failure is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import asyncpg

from subscriber.apply.table_states import TableState
from subscriber.catalog import store
from subscriber.catalog.connection import Connection, translate
from subscriber.connection.connect import open_session
from subscriber.errors import ProtocolError, SubscriberError
from subscriber.publisher.answers import parsing
from subscriber.publisher.index_definition import IndexDefinition
from subscriber.publisher.quoting import identifier, literal
from subscriber.spark.copy.executor import APPLICATION_NAME, SOURCE_SETTINGS, Failure
from subscriber.subscription import Subscription

NOTICED = "1s"  # after which the target gives up an index, and our locks, when we are gone

_PUBLISHED = """
SELECT i.relname, pg_catalog.pg_get_indexdef(x.indexrelid)
  FROM pg_catalog.pg_index x JOIN pg_catalog.pg_class i ON i.oid = x.indexrelid
  JOIN pg_catalog.pg_class c ON c.oid = x.indrelid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = {schema} AND c.relname = {name} AND c.relkind = 'r' AND x.indisvalid
   AND NOT EXISTS (SELECT FROM pg_catalog.pg_constraint k
                    WHERE k.conindid = x.indexrelid AND k.contype IN ('p', 'u', 'x'))
 ORDER BY i.relname
"""
_OURS = """
SELECT pg_catalog.pg_get_userbyid(c.relowner)::text, ARRAY(SELECT o.relname::text FROM pg_catalog.pg_class o
         WHERE o.relnamespace = c.relnamespace)
  FROM pg_catalog.pg_class c WHERE c.oid = $1
"""


async def complete_with_indexes(
    subscription: Subscription, connection: Connection, tables: Sequence[tuple[int, str, str]]
) -> list[Failure]:
    """Build what (relid, schema, name) of the target lack, and store each as complete; what could not be built.

    Raises ConnectionLost, ServerError and PublisherError where the publisher cannot be asked.
    """
    failures: list[Failure] = []
    source = await open_session(
        subscription.conninfo,
        application_name=APPLICATION_NAME,
        settings=SOURCE_SETTINGS,
        must_use_password=subscription.must_use_password,
    )
    try:
        for relid, schema, name in tables:
            published = await source.rows(_PUBLISHED.format(schema=literal(schema), name=literal(name)))
            found: SubscriberError
            try:
                await _complete(connection, subscription.oid, relid, _statements(published, schema, name))
                continue
            except ProtocolError as error:
                found = error
            except asyncpg.PostgresError as error:
                if connection.is_closed():
                    raise
                found = translate(error)
            what = f'an index of table "{schema}.{name}" was not built: {found.message}'
            failures.append(Failure(0, what, found.hint, found.sqlstate))  # the table itself has been copied
            await _complete(connection, subscription.oid, relid, {})
    finally:
        source.abort()
    return failures


def _statements(published: Sequence[tuple[str | None, ...]], schema: str, name: str) -> dict[str, str]:
    """By the index's name, what makes it on the target. Raises ProtocolError for what is no definition of an index."""
    with parsing(f'the indexes of table "{schema}.{name}"'):
        return {
            index or "": IndexDefinition.parse(text or "", schema, name).create(index or "", schema, name)
            for index, text in published
        }


async def _notice_our_end(connection: Connection) -> None:
    """Have statements of this transaction canceled when our process is gone."""
    with suppress(asyncpg.PostgresError):  # older servers do not know it, and not every system can
        async with connection.transaction():
            await connection.execute(f"SET LOCAL client_connection_check_interval = '{NOTICED}'")


async def _complete(connection: Connection, subid: int, relid: int, statements: dict[str, str]) -> None:
    async with connection.transaction():
        owner, there = await connection.fetchrow(_OURS, relid) or ("", [])
        if missing := [statement for name, statement in statements.items() if name not in there]:
            await _notice_our_end(connection)
            await connection.execute("SET LOCAL standard_conforming_strings = on")
            # What an index calls must not run with our rights.
            await connection.execute(f"SET LOCAL ROLE {identifier(owner)}")
            await connection.execute("SET LOCAL search_path = ''")
            for statement in missing:
                await connection.fetch(statement, timeout=None)  # not execute(), which takes several statements
            await connection.execute("RESET ROLE")
        await store.set_relation_state(connection, subid, relid, TableState.FINISHEDCOPY, None)
