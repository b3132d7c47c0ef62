"""A publisher's database that servers since 13 support, and a walsender session on it."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator

import asyncpg
import pytest

from subscriber.demo.servers import Server
from subscriber.publisher.connection import Publisher
from tests.plugins.fix_cluster import Database

numbers = itertools.count(1)


@pytest.fixture
async def db(publisher: Server) -> AsyncIterator[Database]:
    """Create an empty database on the publisher. Its slots are dropped with it."""
    database = Database(publisher, f"source_{next(numbers)}")
    root: asyncpg.Connection[asyncpg.Record] = await asyncpg.connect(publisher.dsn())
    try:
        await root.execute(f"CREATE DATABASE {database.name} TEMPLATE template0")
        yield database
        await root.execute(
            f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{database.name}';"
            " SELECT pg_sleep(0.05)"
        )
        await root.execute(
            f"SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = '{database.name}'"
        )
        await root.execute(f"DROP DATABASE {database.name} WITH (FORCE)")
    finally:
        await root.close()


@pytest.fixture
async def walsender(db: Database) -> AsyncIterator[Publisher]:
    publisher = await Publisher.connect(db.dsn(), application_name="test")
    yield publisher
    await publisher.close()
