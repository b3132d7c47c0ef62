"""Databases for the catalog's tests, on one shared server."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator

import asyncpg
import pytest

from subscriber.catalog.schema import ensure_schema
from tests.plugins.fix_cluster import Database

CREATE_SUBSCRIPTION = """
INSERT INTO subscriber.subscription (subname, subowner, subenabled, subconninfo, subslotname, subsynccommit,
       subpublications, subbinary, substream, subtwophasestate, subdisableonerr, subpasswordrequired,
       subrunasowner, suborigin, subfailover)
VALUES ('s', current_user::regrole, true, 'dbname=x', 's', 'off', '{p,Q}', false, 'p', 'd', false, true,
        false, 'any', false)
RETURNING subid
"""


@pytest.fixture
def dsn(target_db: Database) -> str:
    """Return the connection string of an empty database."""
    return target_db.dsn()


@pytest.fixture
async def role(target_db: Database) -> AsyncIterator[str]:
    """Create a role without any privilege."""
    name = f"role_{secrets.token_hex(4)}"
    await target_db.execute(f"CREATE ROLE {name} LOGIN")
    yield name
    await target_db.execute(f"DROP OWNED BY {name}", f"DROP ROLE {name}")


@pytest.fixture
async def database(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    """Connect to a database with schema "subscriber" and nothing else in it."""
    connection = await asyncpg.connect(dsn)
    await ensure_schema(connection)
    yield connection
    await connection.close()


@pytest.fixture
async def subid(database: asyncpg.Connection) -> int:
    """Create a subscription "s" with every option at its default."""
    subid: int = await database.fetchval(CREATE_SUBSCRIPTION)
    return subid
