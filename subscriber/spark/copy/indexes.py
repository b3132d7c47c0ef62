"""Build the indexes that the target's tables lack after `subscriber copy --indexes` has copied them.

targets/postgres/index_builds.py has the rules and the statements. Indexes of constraints are not built here.

**Failure cases.**

- Keeper killed while an index is built: the index is built in the transaction that marks its table as complete, so the
  table is still incomplete although all its parts exist. The next keeper builds the missing indexes, if it has the
  option. A target since 14 notices that the keeper is gone and stops building. An older one builds the index to its
  end, and until then the next keeper finds the table locked.
- Index cannot be built: its table is marked as complete without the index, and the error is reported.
"""

from __future__ import annotations

from collections.abc import Sequence

import asyncpg

from subscriber.apply.table_states import TableState
from subscriber.catalog.connection import Connection, translate
from subscriber.catalog.store.subscription_rel import set_relation_state
from subscriber.connection.connect import open_session
from subscriber.errors import ProtocolError, SubscriberError
from subscriber.publisher.published_indexes import PublishedIndex, published_indexes
from subscriber.spark.copy.executor import APPLICATION_NAME, SOURCE_SETTINGS, Failure
from subscriber.subscription import Subscription
from subscriber.targets.postgres.index_builds import find_missing, run_as_owner


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
            found: SubscriberError
            try:
                published = [one for one in await published_indexes(source, schema, name) if not one.constraint]
                await _complete(connection, subscription, (relid, schema, name), published)
                continue
            except ProtocolError as error:
                found = error
            except asyncpg.PostgresError as error:
                if connection.is_closed():
                    raise
                found = translate(error)
            what = f'an index of table "{schema}.{name}" was not built: {found.message}'
            failures.append(Failure(0, what, found.hint, found.sqlstate))  # the table itself has been copied
            await _complete(connection, subscription, (relid, schema, name), [])
    finally:
        source.abort()
    return failures


async def _complete(
    connection: Connection, subscription: Subscription, table: tuple[int, str, str], published: Sequence[PublishedIndex]
) -> None:
    relid, schema, name = table
    missing = await find_missing(connection, relid, schema, name, published)
    async with connection.transaction():
        if statements := [index.create(schema, name) for index in missing.indexes]:
            await run_as_owner(connection, missing.owner, statements, trusted_owners=subscription.trusted_owners)
        await set_relation_state(connection, subscription.oid, relid, TableState.FINISHEDCOPY, None)
