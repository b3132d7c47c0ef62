"""two_phase switched on and off while the publisher prepares transactions: nothing is lost or applied twice."""

from __future__ import annotations

import pytest

from subscriber.errors import StatementError
from tests.scenarios.conftest import Pair

STATE = "SELECT subtwophasestate::text FROM subscriber.pg_subscription WHERE subname = 's'"
WAITING = "SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database() AND gid LIKE 'pg\\_gid\\_%'"
WORKERS = "SELECT count(*) FROM subscriber.pg_stat_subscription WHERE pid IS NOT NULL"


async def switch(pair: Pair, setting: str) -> None:
    """SET (two_phase), with the worker out of the way."""
    await pair.subscriber.execute("ALTER SUBSCRIPTION s DISABLE")
    await pair.source.wait_for("SELECT active FROM pg_replication_slots WHERE slot_name = 's'", False)
    await pair.target.wait_for(WORKERS, 0)
    try:
        await pair.subscriber.execute(f"ALTER SUBSCRIPTION s SET (two_phase = {setting})")
    finally:
        await pair.subscriber.execute("ALTER SUBSCRIPTION s ENABLE")


async def prepare(pair: Pair, number: int, table: str = "a") -> None:
    await pair.source.execute(f"BEGIN; INSERT INTO {table} VALUES ({number}); PREPARE TRANSACTION 'of {number}'")


async def test_two_phase_is_switched_off_for_a_copy_and_on_again(pair: Pair) -> None:
    if await pair.source.value("SELECT current_setting('server_version_num')::int") < 180000:
        pytest.skip("needs a publisher that can alter two_phase of a slot")
    await pair.both("CREATE TABLE a (id int PRIMARY KEY)", "CREATE TABLE b (id int PRIMARY KEY)")
    await pair.source.execute("INSERT INTO a VALUES (0)", "INSERT INTO b VALUES (0)")
    await pair.subscribe("FOR TABLE a", two_phase=True)
    await pair.subscriber.wait_for_ready(pair.source)
    await pair.target.wait_for(STATE, "e")
    await pair.subscriber.log.wait_for("will restart so that two_phase can be enabled")

    await prepare(pair, 1)
    await pair.target.wait_for(WAITING, 1)
    with pytest.raises(StatementError, match='cannot disable "two_phase" when prepared transactions exist'):
        await switch(pair, "false")
    await pair.change("COMMIT PREPARED 'of 1'")
    await switch(pair, "false")

    await pair.source.execute("ALTER PUBLICATION p ADD TABLE b")
    await pair.subscriber.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION")
    await pair.subscriber.wait_for_ready(pair.source)
    await prepare(pair, 2)  # not before the copy, whose slot would wait for its end
    await pair.change("INSERT INTO a VALUES (4)")
    assert await pair.target.value(WAITING) == 0
    await switch(pair, "true")
    await pair.target.wait_for(STATE, "e")
    await prepare(pair, 3, "b")
    await pair.target.wait_for(WAITING, 1)
    # The one of before the switch is sent whole, now that it is committed.
    await pair.change("COMMIT PREPARED 'of 2'", "COMMIT PREPARED 'of 3'")
    await pair.assert_same("SELECT 'a', id FROM a UNION ALL SELECT 'b', id FROM b ORDER BY 1, 2")
    assert await pair.target.value(WAITING) == 0
    assert await pair.target.value("SELECT count(*) FROM subscriber.prepared") == 0


async def test_a_subscription_is_dropped_while_a_transaction_is_prepared(pair: Pair) -> None:
    await pair.both("CREATE TABLE a (id int PRIMARY KEY)")
    await pair.subscribe("FOR TABLE a", two_phase=True, copy_data=False)
    assert await pair.target.value(STATE) == "e"
    await prepare(pair, 1)
    await pair.target.wait_for(WAITING, 1)
    await pair.subscriber.execute("DROP SUBSCRIPTION s")
    gid = await pair.target.value("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()")
    await pair.target.execute(f"COMMIT PREPARED '{gid}'")
    await pair.source.execute("COMMIT PREPARED 'of 1'")
    await pair.assert_same("SELECT id FROM a")
