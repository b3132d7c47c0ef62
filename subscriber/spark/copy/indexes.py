"""Indexes of the publisher's tables that the target's tables lack, built after the copy.

**Purpose.** An index that is filled row by row costs the copy more than one that is built at the end. The tables can
therefore be created with only their keys, and the publisher's other indexes are built after the copy, from their
definitions.

**Invariants.**

- No existing index is dropped or changed. An index whose name exists on the target is skipped, and so are indexes of
  constraints and of partitioned tables.
- No text of the publisher is executed: a definition is parsed and written again (publisher/index_definition.py). It
  runs alone in a statement of the extended protocol, as the table's owner and with an empty search_path. The functions
  of its expressions cannot leave that role, because CREATE INDEX runs them in a security-restricted operation.

**Failure cases.**

- Keeper killed while an index is built: the index is built in the transaction that marks its table as complete, so the
  table is still incomplete although all its parts exist. The next keeper builds the missing indexes, if it has the
  option. A target since 14 notices that the keeper is gone and stops building. An older one builds the index to its
  end, and until then the next keeper finds the table locked.
- Index cannot be built: its table is marked as complete without the index, and the error is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import asyncpg

from subscriber.apply.table_states import TableState
from subscriber.catalog.connection import Connection, translate
from subscriber.catalog.store.subscription_rel import set_relation_state
from subscriber.connection.connect import open_session
from subscriber.errors import ProtocolError, SubscriberError
from subscriber.publisher.answers import parsing
from subscriber.publisher.index_definition import IndexDefinition
from subscriber.quoting import identifier, literal
from subscriber.spark.copy.executor import APPLICATION_NAME, SOURCE_SETTINGS, Failure
from subscriber.subscription import Subscription

NOTICED = "1s"  # delay after which the target stops building an index, and releases our locks, if this process is gone

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
    """Build the missing indexes of `tables` on the target, and mark each table as complete.

    Args:
        tables: (relid, schema, name) on the target.

    Returns:
        The indexes that could not be built.

    Raises:
        ConnectionLost: a server cannot be reached, or the connection is lost.
        ServerError: the publisher refuses a query.
        PublisherError: the publisher cannot serve the subscription.
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
    """Return CREATE INDEX by index name. Raises ProtocolError if a definition cannot be parsed."""
    with parsing(f'the indexes of table "{schema}.{name}"'):
        return {
            index or "": IndexDefinition.parse(text or "", schema, name).create(index or "", schema, name)
            for index, text in published
        }


async def _notice_our_end(connection: Connection) -> None:
    """Have the server cancel statements of this transaction if this process is gone."""
    with suppress(asyncpg.PostgresError):  # older servers do not have the setting, and some systems do not support it
        async with connection.transaction():
            await connection.execute(f"SET LOCAL client_connection_check_interval = '{NOTICED}'")


async def _complete(connection: Connection, subid: int, relid: int, statements: dict[str, str]) -> None:
    async with connection.transaction():
        owner, there = await connection.fetchrow(_OURS, relid) or ("", [])
        if missing := [statement for name, statement in statements.items() if name not in there]:
            await _notice_our_end(connection)
            await connection.execute("SET LOCAL standard_conforming_strings = on")
            # Functions that an index calls must not run with our privileges.
            await connection.execute(f"SET LOCAL ROLE {identifier(owner)}")
            await connection.execute("SET LOCAL search_path = ''")
            for statement in missing:
                await connection.fetch(statement, timeout=None)  # execute() would accept several statements
            await connection.execute("RESET ROLE")
        await set_relation_state(connection, subid, relid, TableState.FINISHEDCOPY, None)
