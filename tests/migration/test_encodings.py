"""Steps of a move are stored in databases of every encoding."""

from __future__ import annotations

import pytest

from subscriber.catalog.schema import ensure_schema
from subscriber.catalog.store import migrations
from subscriber.demo.servers import Server
from tests.plugins.fix_cluster import fresh_database


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
async def test_the_end_of_a_step_is_stored(target: Server, encoding: str) -> None:
    """Statements of a step have an ellipsis in place of a password, which these encodings lack."""
    async with fresh_database(target, encoding) as database, database.connection() as connection:
        await ensure_schema(connection)
        stepid = await migrations.begin_step(connection, "s", "start", "subscribe")
        await migrations.end_step(connection, stepid, None, {"statements": ["CONNECTION '\N{HORIZONTAL ELLIPSIS}'"]})
        (step,) = await migrations.load_steps(connection, "s")
        assert (step.ended is not None, step.detail["statements"]) == (True, ["CONNECTION '...'"])
