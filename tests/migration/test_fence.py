"""The fence of a server: which sessions pass it."""

from __future__ import annotations

import secrets

import asyncpg
import pytest

from subscriber.migration import fence
from subscriber.migration.plan import Phase, Side, Standing
from tests.migration.scene import moving
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
