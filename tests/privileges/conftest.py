"""The target is each major version in turn. An unavailable version is skipped, with the reason."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import pytest
from anyio.from_thread import BlockingPortal

from subscriber.catalog.schema import ensure_schema
from subscriber.demo.servers import Server, Servers
from tests.matrix.programs import NotAvailable, programs
from tests.plugins.fix_cluster import SETTINGS, Database
from tests.plugins.fix_subscriber import Subscriber
from tests.scenarios.conftest import Pair

# The rights of roles changed in 15, 16 and 17. Each run has the oldest, the newest, and the first with SET options.
MAJORS = (14, *(pytest.param(major, marks=pytest.mark.soak) for major in (15, 16, 17)), 18)
NEWEST_MAJOR = (*(pytest.param(major, marks=pytest.mark.soak) for major in (14, 15, 16, 17)), 18)  # for long tests
SINCE_16 = (*(pytest.param(major, marks=pytest.mark.soak) for major in (16, 17)), 18)
OWNER, APPLY, OTHER = "app_owner", "app_apply", "app_other"


@pytest.fixture(scope="session", params=MAJORS)
def target(request: pytest.FixtureRequest, portal: BlockingPortal, session_servers: Servers) -> Iterator[Server]:
    major = request.param
    try:
        bin = programs(major)
    except NotAvailable as reason:
        pytest.skip(f"no PostgreSQL {major}: {reason}")

    async def start() -> Server:
        server = await session_servers.create(f"target of {major}", SETTINGS, bin=bin)
        await server.start()
        return server

    server = portal.call(start)
    yield server
    portal.call(session_servers.remove, server)


@dataclass
class Attacked(Pair):
    """Schema app of the target belongs to a role whose code attacks. Table app.loot records the rights that it had."""

    major: int

    async def as_owner(self, *statements: str) -> None:
        async with self.target.connection() as connection:
            await connection.execute(f"SET SESSION AUTHORIZATION {OWNER}")
            for statement in statements:
                await connection.execute(statement)

    async def loot(self) -> set[tuple[str, str]]:
        """Return the roles whose rights code of the owner has had so far, and whether each is a superuser."""
        return {(who, is_superuser) for who, is_superuser in await self.target.rows("SELECT * FROM app.loot")}

    async def apply_as(self, role: str) -> None:
        """Have the launcher's changes applied by this role from now on."""
        await self.subscriber.stop()
        self.subscriber.apply_target = self.target.dsn(user=role)
        self.subscriber.start()


# The recipe's statements for the role. The membership is without inheritance if the version supports that.
GRANT = {14: f"GRANT {OWNER} TO {APPLY}", 16: f"GRANT {OWNER} TO {APPLY} WITH INHERIT FALSE, SET TRUE"}
LOOT = f"""
CREATE SCHEMA app AUTHORIZATION {OWNER};
CREATE TABLE app.loot (who name, is_superuser text);
GRANT INSERT ON app.loot TO PUBLIC;
GRANT USAGE ON SCHEMA app TO PUBLIC;
ALTER TABLE app.loot OWNER TO {OWNER};
CREATE FUNCTION app.attack() RETURNS integer LANGUAGE plpgsql AS $$
BEGIN
    BEGIN
        PERFORM set_config('role', 'none', false);
    EXCEPTION WHEN OTHERS THEN NULL;  -- in a deferred trigger, since 18
    END;
    INSERT INTO app.loot VALUES (current_user, current_setting('is_superuser'));
    RETURN 1;
END $$;
ALTER FUNCTION app.attack() OWNER TO {OWNER};
"""


@pytest.fixture
async def attacked(source_db: Database, target_db: Database, subscriber: Subscriber) -> AsyncIterator[Attacked]:
    major = await target_db.value("SELECT current_setting('server_version_num')::int / 10000")
    inherit = "NOINHERIT" if major < 16 else ""
    try:
        await target_db.execute(
            f"CREATE ROLE {OWNER} LOGIN",
            f"CREATE ROLE {OTHER} LOGIN",
            f"CREATE ROLE {APPLY} LOGIN {inherit}",
            GRANT[14 if major < 16 else 16],
            LOOT,
        )
        async with target_db.connection() as connection:
            await ensure_schema(connection)
            await connection.execute(f"SELECT subscriber.admit('{APPLY}', 'apply')")
        yield Attacked(source_db, target_db, subscriber, major)
        await subscriber.execute("DROP SUBSCRIPTION IF EXISTS s")
    finally:
        await subscriber.stop()
        await target_db.execute(f"DROP OWNED BY {OWNER}, {OTHER}, {APPLY} CASCADE")
        await target_db.execute(f"DROP ROLE {OWNER}, {OTHER}, {APPLY}")
