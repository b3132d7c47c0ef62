"""Alembic's environment for schema "subscriber".

catalog/schema.py hands in the connection to migrate on, as attribute "connection". Started by the alembic command
itself (a developer's `alembic upgrade head` or `alembic check`), it connects to SUBSCRIBER_TARGET_DSN, a URI.
"""

from __future__ import annotations

import asyncio
import os

from alembic import context
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import create_async_engine

from subscriber.catalog.schema import COMMENT, REVISION
from subscriber.catalog.tables import SCHEMA, metadata

AS_BOOTSTRAP_SUPERUSER = """
SELECT pg_catalog.set_config('role', (SELECT rolname FROM pg_catalog.pg_roles WHERE oid = 10), true)
 WHERE pg_catalog.current_setting('is_superuser')::bool
"""

# Alembic writes its table after each script. FOR ALL TABLES publishes a permanent table, and a downstream server
# without such a table would stop.
UNPUBLISHED_VERSION = [
    f"""
    CREATE UNLOGGED TABLE IF NOT EXISTS {SCHEMA}.alembic_version (
        version_num pg_catalog.varchar(32) NOT NULL,
        CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
    )
    """,
    "SET LOCAL lock_timeout = '30s'",
    f"ALTER TABLE {SCHEMA}.alembic_version SET UNLOGGED",
]


def only_ours(name: str | None, kind: str, parents: object) -> bool:
    """Leave every schema but ours out of comparisons: the target database belongs to somebody else."""
    return kind != "schema" or name == SCHEMA


def migrate(connection: Connection) -> None:
    """Run the scripts in one transaction, which creates the schema first if need be."""
    context.configure(
        connection=connection,
        target_metadata=metadata,
        version_table_schema=SCHEMA,
        include_schemas=True,
        include_name=only_ours,
        compare_server_default=True,
    )
    with context.begin_transaction():
        # Like the system catalogs, it belongs to the bootstrap superuser, who can never lose that attribute: some
        # functions run with their owner's rights, and whoever migrates may be an ordinary role some day. Without a
        # superuser it belongs to whoever migrates.
        connection.execute(text(AS_BOOTSTRAP_SUPERUSER))
        connection.execute(text("SET LOCAL search_path = pg_catalog, pg_temp"))
        connection.execute(text(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}"))
        for statement in UNPUBLISHED_VERSION:
            connection.execute(text(statement))
        _find_version(connection)
        context.run_migrations()
        _store_version(connection)


def _find_version(connection: Connection) -> None:
    """Bring back the row of alembic's table, which is UNLOGGED and empty after a crash."""
    revision = connection.execute(text(REVISION)).scalar()
    if revision is not None:
        missing = f"NOT EXISTS (SELECT FROM {SCHEMA}.alembic_version)"
        connection.execute(
            text(f"INSERT INTO {SCHEMA}.alembic_version SELECT CAST(:revision AS text) WHERE {missing}"),
            {"revision": revision},
        )


def _store_version(connection: Connection) -> None:
    """Store the revision where a crash leaves it. No function of the schema is for PUBLIC."""
    revision = connection.execute(text(f"SELECT version_num FROM {SCHEMA}.alembic_version")).scalar()
    connection.execute(text(f"COMMENT ON SCHEMA {SCHEMA} IS '{COMMENT}{revision}'"))
    connection.execute(text(f"REVOKE ALL ON ALL FUNCTIONS IN SCHEMA {SCHEMA} FROM PUBLIC"))


async def connect_and_migrate(dsn: str) -> None:
    """For the alembic command."""
    engine = create_async_engine(f"postgresql+asyncpg://{dsn.split('://', 1)[1]}")
    async with engine.connect() as connection:
        await connection.run_sync(migrate)
        await connection.commit()
    await engine.dispose()


if (given := context.config.attributes.get("connection")) is not None:
    migrate(given)
else:
    asyncio.run(connect_and_migrate(os.environ["SUBSCRIBER_TARGET_DSN"]))
