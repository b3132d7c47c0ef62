"""Situations of an operator: within 30 s status, /health, metrics and console say it, and the command they name works.

No state is shown from memory or from one side only. Each test makes one cause, reads all places, and pastes the
commands of the remedy.
"""

from __future__ import annotations

import pytest

from tests.scenarios.conftest import Pair
from tests.scenarios.truth import truth

TABLES = ("CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE TABLE u (id int PRIMARY KEY, v text)")
SAME = "SELECT id, v FROM t ORDER BY id"


async def subscribed(pair: Pair, publication: str = "FOR TABLE t, u", **options: object) -> None:
    await pair.both(*TABLES)
    await pair.source.execute("INSERT INTO t VALUES (1, 'a')", "INSERT INTO u VALUES (1, 'a')")
    await pair.subscribe(publication, **options)
    await pair.subscriber.wait_for_ready(pair.source)
    # The launcher has seen what publishes the tables.
    await pair.target.wait_for("SELECT bool_and(srmemberships IS NOT NULL) FROM subscriber.subscription_rel")


# --- publications ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cause",
    [
        "DROP PUBLICATION p",
        "ALTER PUBLICATION p DROP TABLE t",
        "ALTER PUBLICATION p SET TABLE u",
        "ALTER PUBLICATION p DROP TABLE t, u",
    ],
)
async def test_a_table_that_is_not_published_any_more(pair: Pair, cause: str) -> None:
    await subscribed(pair)
    async with truth(pair) as places:
        await places.ends()
        await pair.source.execute(cause, "INSERT INTO t VALUES (2, 'b')", "UPDATE t SET v = 'c' WHERE id = 1")
        if cause.startswith("DROP"):
            await places.says("publication", 'publication "p" does not exist on the publisher')
        since = r"not published: changes since [0-9A-F]+/[0-9A-F]+ \(noticed 20.* UTC\) are not replicated"
        publish, resync, *_ = await places.says("publication", since)
        status, output = await places.run("check", "s")
        assert status == 1
        assert "not published" in output
        await places.paste(publish)
        await places.says("publication", "not published for a time: changes since .* and before .* may be missing")
        assert "repaired" in await places.paste(resync)
        await places.ends()
    await pair.assert_same(SAME)
    await pair.change("INSERT INTO t VALUES (3, 'd')")
    await pair.assert_same(SAME)


async def test_a_table_that_is_removed_and_added_while_nobody_looks(pair: Pair) -> None:
    await subscribed(pair)
    await pair.subscriber.stop()
    await pair.source.execute(
        "ALTER PUBLICATION p DROP TABLE t", "INSERT INTO t VALUES (2, 'b')", "ALTER PUBLICATION p ADD TABLE t"
    )
    pair.subscriber.start()
    async with truth(pair) as places:
        (resync,) = await places.says("publication", "table public.t was not published for a time: changes since .*")
        await pair.source.wait_for_catchup("s")
        assert await pair.rows(SAME) == [(1, "a")]
        await places.paste(resync)
        await places.ends()
    await pair.assert_same(SAME)


async def test_a_table_that_was_not_published_and_is_found_equal(pair: Pair) -> None:
    """The rows of the time in between are compared. A comparison since the last one reads them as well."""
    await subscribed(pair, track_ranges=True)
    async with truth(pair) as places:
        assert (await places.run("verify", "s"))[0] == 0
        await pair.source.execute("ALTER PUBLICATION p DROP TABLE t", "INSERT INTO t VALUES (2, 'b')")
        await places.says("publication", "table public.t is not published")
        await pair.source.execute("ALTER PUBLICATION p ADD TABLE t")
        await places.says("publication", "table public.t was not published for a time")
        assert (await places.run("verify", "s", "--since-last"))[0] != 0
        assert (await places.run("verify", "s"))[0] == 1
        await places.says("publication", "table public.t was not published for a time")
        await pair.target.execute("INSERT INTO t VALUES (2, 'b')")
        assert (await places.run("verify", "s"))[0] == 0
        await places.ends()


async def test_a_table_that_is_not_wanted_any_more(pair: Pair) -> None:
    await subscribed(pair)
    async with truth(pair) as places:
        await pair.source.execute("ALTER PUBLICATION p DROP TABLE t")
        *_, refresh = await places.says("publication", "table public.t is not published")
        await places.paste(refresh)
        await places.ends()
    assert await pair.rows("SELECT srrelname FROM subscriber.subscription_rel") == [("u",)]


async def test_a_table_that_was_dropped_on_the_publisher(pair: Pair) -> None:
    await subscribed(pair, "FOR ALL TABLES")
    async with truth(pair) as places:
        await pair.source.execute("DROP TABLE t")
        (refresh,) = await places.says("publication", "table public.t is not on the publisher any more")
        await places.paste(refresh)
        await places.ends()


async def test_a_disabled_subscription_whose_table_is_not_published(pair: Pair) -> None:
    await subscribed(pair)
    await pair.subscriber.execute("ALTER SUBSCRIPTION s DISABLE")
    async with truth(pair) as places:
        await pair.source.execute("ALTER PUBLICATION p DROP TABLE t")
        await places.says("publication", "table public.t is not published")


async def test_a_partition_whose_root_is_published_instead(pair: Pair) -> None:
    await pair.both(
        "CREATE TABLE p (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (10)",
    )
    await pair.subscribe("FOR TABLE p")
    async with truth(pair) as places:
        await pair.source.execute("ALTER PUBLICATION p SET (publish_via_partition_root)")
        *_, refresh = await places.says("publication", r"table public.p1 is not published")
        await places.paste(refresh)
        await places.ends()
    await pair.change("INSERT INTO p VALUES (1)")
    await pair.assert_same("SELECT id FROM p")
