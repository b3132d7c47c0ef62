"""Alembic's environment for `alembic upgrade head` and `alembic current`, in the database SUBSCRIBER_TARGET_DSN.

The program itself needs no Alembic: catalog/schema.py runs the same SQL. Alembic knows one revision, the newest one of
the schema. A schema that exists is brought to it by the program's files before Alembic reads its revision.
"""

from __future__ import annotations

import asyncio
import os

from alembic import context
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import create_async_engine

from subscriber.catalog import schema


def migrate(connection: Connection) -> None:
    """Run Alembic's command in one transaction."""
    context.configure(connection=connection, version_table_schema=schema.SCHEMA)
    with context.begin_transaction():
        for statement in schema.BEFORE:
            connection.execute(text(statement))
        if (revision := connection.execute(text(schema.REVISION)).scalar()) is not None:
            # Several statements in one message, which SQLAlchemy itself does not send.
            session = connection.connection.dbapi_connection
            assert session is not None
            session.run_async(lambda driver: driver.execute(schema.upgrade_script(revision)))
        context.run_migrations()
        for statement in (schema.AFTER, *schema.stamp()):
            connection.execute(text(statement))


async def connect_and_migrate(dsn: str) -> None:
    """Connect, for the alembic command."""
    engine = create_async_engine(f"postgresql+asyncpg://{dsn.split('://', 1)[1]}")
    async with engine.connect() as connection:
        await connection.run_sync(migrate)
        await connection.commit()
    await engine.dispose()


asyncio.run(connect_and_migrate(os.environ["SUBSCRIBER_TARGET_DSN"]))
