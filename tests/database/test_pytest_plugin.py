"""The fixture subscriber_pair, in a test run of its own, as a program's tests use it."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]

TEST = """
import pytest, subscriber

NAMES = []

@pytest.mark.parametrize("run", [1, 2])
@pytest.mark.asyncio
async def test_my_shop(subscriber_pair, run):
    source, target = subscriber_pair.source, subscriber_pair.target
    NAMES.append(source.dsn)
    await source.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION p FOR TABLE t")
    await source.execute("INSERT INTO t VALUES (5)")
    await target.execute("CREATE TABLE t (id int PRIMARY KEY)")
    async with subscriber.connect(target.dsn) as db:
        await db.create_subscription("s", source=source.dsn, publications=["p"])
        async with db.running():
            await db.wait_for_sync("s", timeout=60)
    assert await target.fetch("SELECT id FROM t WHERE id = $1", 5) == [(5,)]
    with pytest.raises(subscriber.ServerError, match='relation "no" does not exist'):
        await target.fetch("TABLE no")

def test_nothing_is_left(subscriber_servers):
    assert len(set(NAMES)) == 2
    left = "(SELECT count(*) FROM pg_replication_slots) + (SELECT count(*) FROM pg_replication_origin)"
    query = f"SELECT {left}, count(*) FROM pg_database"
    from subscriber.pytest_plugin import PairDatabase
    for server in (subscriber_servers.publisher, subscriber_servers.target):
        assert subscriber_servers.portal.call(PairDatabase(server.dsn()).fetch, query) == [(0, 3)]
"""


@pytest.mark.soak  # starts servers of its own
def test_a_program_tests_with_two_servers(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TEST)
    result = pytester.runpytest_subprocess("-q", timeout=240)
    result.assert_outcomes(passed=3)
