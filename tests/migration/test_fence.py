"""The fence of a server: which sessions pass it."""

from __future__ import annotations

import secrets
from contextlib import suppress

import asyncpg
import pytest

from subscriber.connection.connect import open_session
from subscriber.errors import SubscriberError
from subscriber.migration import fence
from subscriber.migration.plan import Phase, Side, Standing
from tests.migration.scene import admits, following, moving
from tests.plugins.fix_cluster import Database

pytestmark = pytest.mark.usefixtures("with_schema")

# Without a subscription of this number.
REGISTER = """
SET session_replication_role = replica;
INSERT INTO subscriber.session
SELECT 1, {place}, a.pid, a.backend_start + '{shift}'::interval, {role} FROM pg_stat_activity a WHERE a.pid = {pid}
"""


async def test_only_the_session_of_a_worker_passes(source_db: Database, target_db: Database) -> None:
    """A session that has the process ID of an ended worker does not, and neither does one that claims to be one."""
    role = f"app_{secrets.token_hex(4)}"
    await target_db.execute(
        "CREATE TABLE account (id int)", f"CREATE ROLE {role} LOGIN; GRANT ALL ON account TO {role}"
    )
    try:
        async with moving(source_db, target_db) as move:
            server = move._servers[Side.TARGET]
            await server.create_fence([await target_db.value("SELECT 'account'::regclass::oid::bigint")])
            application = await asyncpg.connect(target_db.dsn(user=role))
            pid = application.get_server_pid()
            await application.execute("INSERT INTO account VALUES (0)")
            await server.close_fence(Standing(Side.SOURCE, Phase.FOLLOWING))
            own, other = f"'{role}'::regrole", "current_user::regrole"
            for place, (shift, of) in enumerate((("1 hour", own), ("0", other), ("-1 microsecond", own))):
                await target_db.execute(REGISTER.format(place=place, shift=shift, role=of, pid=pid))
                for statement in (
                    "INSERT INTO account VALUES (1)",
                    "SET subscriber.is_worker = on; UPDATE account SET id = 2",
                    "SET application_name = 'subscriber: s'; DELETE FROM account",
                    "TRUNCATE account",
                ):
                    with pytest.raises(asyncpg.ReadOnlySQLTransactionError, match="the database has another server"):
                        await application.execute(statement)
            for statement in ("SET session_replication_role = replica", "SELECT subscriber.is_worker()", fence.OPEN):
                with pytest.raises(asyncpg.InsufficientPrivilegeError):
                    await application.execute(statement)
            await target_db.execute(REGISTER.format(place=9, shift="0", role=own, pid=pid))
            await application.execute("INSERT INTO account VALUES (3)")
            application.terminate()
            assert await target_db.rows("SELECT id FROM account ORDER BY 1") == [(0,), (3,)]
    finally:
        await target_db.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


WRITE = "INSERT INTO public.item (token) VALUES ('acknowledged')"


@pytest.mark.parametrize(
    ("attributes", "name", "replication"),
    [
        ("", "subscriber management", False),
        ("", "subscriber launcher", False),
        ("SUPERUSER", "subscriber: s", False),
        ("REPLICATION", "s_back", True),
    ],
)
async def test_an_application_is_ended_whatever_it_calls_itself(
    source_db: Database, target_db: Database, attributes: str, name: str, replication: bool
) -> None:
    """A transaction that has written before the pause cannot be committed behind the marker of the move."""
    role = f"app_{secrets.token_hex(4)}"
    async with following(source_db, target_db):
        await source_db.execute(f"CREATE ROLE {role} LOGIN {attributes}; GRANT ALL ON item TO {role}")
        try:
            session = await open_session(source_db.dsn(user=role), application_name=name, replication=replication)
            async with moving(source_db, target_db) as move, move.running(move.cutover()) as cutover:
                async for event in cutover:
                    if (event.step, event.state) == ("gates", "begin"):
                        await session.rows("BEGIN")
                        await session.rows(WRITE)
            with suppress(SubscriberError):
                await session.rows("COMMIT")
            if not replication:
                assert not await admits(source_db, role)
            assert await source_db.rows("SELECT token FROM item") == await target_db.rows("SELECT token FROM item")
        finally:
            await source_db.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


async def test_sessions_of_the_launcher_pass(source_db: Database, target_db: Database) -> None:
    """Each session of a launcher and of its apply workers is registered, and lives after the move."""
    registered = "SELECT pid FROM subscriber.own_sessions() ORDER BY 1"
    async with following(source_db, target_db):
        launcher = await target_db.rows(registered)
        async with moving(source_db, target_db) as move:
            await move.cutover()
            moved = await target_db.rows(registered)
            await move.back()
        assert len(launcher) > len(moved) == 3  # the apply worker has ended, and the launcher has not
        assert set(moved) <= set(launcher) & set(await target_db.rows(registered))
