"""Alembic's environment for a developer's `alembic check` or `alembic upgrade`, in the database SUBSCRIBER_TARGET_DSN.

The program itself does not use Alembic: it runs the scripts as one text, see upgrade_script() in catalog/schema.py.
"""

from __future__ import annotations

import asyncio
import os

from alembic import context
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import create_async_engine

from subscriber.catalog.schema import AFTER, BEFORE, FIND_VERSION, REVISION
from subscriber.catalog.tables import SCHEMA, metadata


def only_ours(name: str | None, kind: str, parents: object) -> bool:
    """Exclude all schemas but ours from comparisons, because the target database has other tables as well."""
    return kind != "schema" or name == SCHEMA


def migrate(connection: Connection) -> None:
    """Run the scripts in one transaction. It creates the schema first if it does not exist."""
    context.configure(
        connection=connection,
        target_metadata=metadata,
        version_table_schema=SCHEMA,
        include_schemas=True,
        include_name=only_ours,
        compare_server_default=True,
    )
    with context.begin_transaction():
        for statement in BEFORE:
            connection.execute(text(statement))
        if (revision := connection.execute(text(REVISION)).scalar()) is not None:
            connection.execute(text(FIND_VERSION.format(revision=revision)))
        context.run_migrations()
        for statement in AFTER:
            connection.execute(text(statement))


async def connect_and_migrate(dsn: str) -> None:
    """Connect and run the migrations, for the alembic command."""
    engine = create_async_engine(f"postgresql+asyncpg://{dsn.split('://', 1)[1]}")
    async with engine.connect() as connection:
        await connection.run_sync(migrate)
        await connection.commit()
    await engine.dispose()


asyncio.run(connect_and_migrate(os.environ["SUBSCRIBER_TARGET_DSN"]))
