"""A published database with a slot `s`, and recordings of real streams."""

from __future__ import annotations

import pytest

from tests.plugins.fix_cluster import Database

TABLES = """
CREATE TABLE t (id int PRIMARY KEY, n int, text text);
CREATE TABLE large (id int PRIMARY KEY, text text);
"""


@pytest.fixture
async def db(source_db: Database) -> Database:
    """Tables `t` and `large` in publication `p`."""
    await source_db.execute(TABLES, "CREATE PUBLICATION p FOR ALL TABLES")
    return source_db


@pytest.fixture
async def slot(db: Database) -> str:
    """Create an unused slot in the database."""
    await db.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
    return "s"
