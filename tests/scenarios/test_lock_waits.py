"""A session of the launcher, or of a table's copy, waits for a lock: the log reports it, and `status` does not hang."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from subscriber.cli.commands.status import status as show_status
from subscriber.errors import ServerError
from subscriber.settings import Settings
from tests.plugins.fix_subscriber import QUICK
from tests.scenarios.conftest import Pair
from tests.synchronous import block_commits, release_commits

TABLE = "CREATE TABLE t (id int PRIMARY KEY)"
AGAIN = r"LOG:  the target answers again, after \d+ s"


@pytest.fixture
def settings() -> Settings:
    return replace(QUICK, session_wait_interval=0.2, lock_wait_log_delay=0.5, status_lock_timeout=0.3)


def told(who: str, of: str) -> str:
    process = r"Process \d+ of the target"
    return rf"WARNING:  no answer from the target for \d+ s\n.*DETAIL:  {process}, for {who}, waits for {of}"


async def test_a_table_to_be_copied_is_locked(pair: Pair) -> None:
    await pair.both(TABLE)
    await pair.source.execute("INSERT INTO t VALUES (1)", "CREATE PUBLICATION p FOR TABLE t")
    stranger = await pair.target.connect(application_name="night report")
    pid = stranger.get_server_pid()
    async with stranger.transaction():
        await stranger.execute("LOCK TABLE t")
        await pair.subscriber.create(pair.source, "p")
        holder = rf'process {pid} \("night report"\), which has a lock of relation (public\.)?t\.'
        await pair.subscriber.log.wait_for(told("a table synchronization worker", holder))
    await pair.subscriber.log.wait_for(AGAIN)
    await pair.caught_up()
    assert len(re.findall("no answer from the target", pair.subscriber.log.text())) == 1


async def test_a_row_to_be_copied_is_the_same_as_one_that_is_not_committed(pair: Pair) -> None:
    """The wait is that of the COPY."""
    await pair.both(TABLE)
    await pair.source.execute("INSERT INTO t VALUES (1)", "CREATE PUBLICATION p FOR TABLE t")
    stranger = await pair.target.connect(application_name="night report")
    transaction = stranger.transaction()
    await transaction.start()
    await stranger.execute("INSERT INTO t VALUES (1)")
    await pair.subscriber.create(pair.source, "p")
    await pair.subscriber.log.wait_for(told("a table synchronization worker", r'process \d+ \("night report"\)'))
    await transaction.rollback()
    await pair.caught_up()


async def test_the_catalog_is_locked(pair: Pair) -> None:
    await pair.both(TABLE)
    await pair.subscribe("FOR TABLE t")
    await pair.subscriber.wait_for_ready(pair.source)
    stranger = await pair.target.connect(application_name="night report")
    async with stranger.transaction():
        await stranger.execute("LOCK TABLE subscriber.subscription")
        await pair.target.execute("NOTIFY subscriber, 'subscription'")
        await pair.subscriber.log.wait_for(told("the launcher", r'process \d+ \("night report"\), which has a lock of'))
        with pytest.raises(ServerError, match='a lock on the tables of schema "subscriber" is not to be had') as raised:
            await show_status(pair.target.dsn(), setting=["status_lock_timeout=300ms"])
        pid = stranger.get_server_pid()
        assert raised.value.detail == f'It is held by process {pid} ("night report").'
        assert raised.value.hint == f"To end that session: SELECT pg_terminate_backend({pid});"
    await pair.subscriber.log.wait_for(AGAIN)
    await pair.change("INSERT INTO t VALUES (1)")
    assert not pair.subscriber.log.has("ERROR")


async def test_a_synchronous_standby_of_the_target_is_gone(target_of_its_own: Pair) -> None:
    pair = target_of_its_own
    await pair.both(TABLE)
    await pair.subscribe("FOR TABLE t")
    await pair.subscriber.wait_for_ready(pair.source)
    async with pair.target.connection() as connection:
        await block_commits(connection)
        await connection.execute("SET synchronous_commit = local")
        await pair.source.execute("INSERT INTO t VALUES (1)")
        who = "(the launcher|what makes commits durable)"
        await pair.subscriber.log.wait_for(told(who, r"a synchronous standby of the target\."))
        await release_commits(connection)
    await pair.subscriber.log.wait_for(AGAIN)
    await pair.caught_up()
