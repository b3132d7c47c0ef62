"""Sessions on the publisher of a change log, and a snapshot at a position of the log: rows that its changes follow."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from subscriber.changelog.reader import ChangeLog
from subscriber.display import sql_identifier, sql_name
from subscriber.errors import StatementError
from subscriber.lsn import Lsn
from subscriber.publisher.connection import Publisher, SystemIdentity
from subscriber.quoting import literal
from subscriber.sqlstate import OBJECT_NOT_IN_PREREQUISITE_STATE


@asynccontextmanager
async def publisher_session(source: str, name: str) -> AsyncIterator[Publisher]:
    """Open a session on the publisher whose values are those of a change log.

    Args:
        source: the connection string of the publisher.
        name: the reader, part of the name of the session.

    Raises:
        SubscriberError: the publisher cannot be reached, or refuses.

    Cancellation: the session ends.
    """
    async with await Publisher.connect(source, application_name=f"subscriber {name}", timezone="UTC") as publisher:
        await publisher.session.rows("SELECT pg_catalog.set_config('bytea_output', 'hex', false)")
        await publisher.restrict_views()
        yield publisher


async def check_publisher(publisher: Publisher, log: ChangeLog) -> SystemIdentity:
    """Return the identity of the publisher. Raises StatementError if the log is of another one."""
    identity = await publisher.identify_system()
    if identity.systemid != log.identity.system_id:
        raise StatementError(
            f'the change log in "{log.directory}" is of another publisher',
            hint="Check the connection string.",
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )
    return identity


@asynccontextmanager
async def publisher_snapshot(
    source: str, log: ChangeLog, name: str, *, hint: str
) -> AsyncIterator[tuple[Publisher, Lsn]]:
    """Open a session on the publisher in a transaction with a snapshot that the changes of the log follow.

    Args:
        source: the connection string of the publisher.
        log: the change log.
        name: the reader, part of the names of session and temporary slot.
        hint: the next step if the log begins later.

    Yields:
        The session, and the position of the snapshot. Bytes are in hexadecimal.

    Raises:
        StatementError: the log is of another publisher, or begins after the snapshot.
        SubscriberError: the publisher cannot be read.

    Cancellation: the session ends, and with it its slot.
    """
    async with publisher_session(source, name) as publisher:
        await check_publisher(publisher, log)
        await publisher.begin_snapshot()
        slot = await publisher.create_slot(f"subscriber_{name}_{secrets.token_hex(4)}", snapshot="use", temporary=True)
        position = slot.consistent_point
        if position < log.start():
            raise StatementError(
                "the change log begins after the rows that would be read",
                detail=f"It begins at {log.start()}; the rows are as of {position}.",
                hint=hint,
            )
        yield publisher, position


async def missing_grant(publisher: Publisher, schema: str, name: str) -> str | None:
    """Return the statements that let the role of the session read a table. None: it may read the whole table."""
    query = (
        "SELECT current_user, pg_catalog.has_schema_privilege(n.oid, 'USAGE'),"
        " pg_catalog.has_table_privilege(c.oid, 'SELECT') FROM pg_catalog.pg_class c"
        " JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
        f" WHERE n.nspname = {literal(schema)} AND c.relname = {literal(name)}"
    )
    for role, has_schema, has_table in await publisher.session.rows(query):
        to = f"TO {sql_identifier(role or '')};"
        usage = f"GRANT USAGE ON SCHEMA {sql_identifier(schema)} {to}" if has_schema == "f" else ""
        select = f"GRANT SELECT ON {sql_name(schema, name)} {to}" if has_table == "f" else ""
        return f"{usage} {select}".strip() or None
    return None
