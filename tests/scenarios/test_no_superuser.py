"""A target without superusers, as a managed service: one role that owns the tables performs all operations."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from subscriber.catalog.schema import ensure_schema
from subscriber.errors import PublisherError, StatementError
from subscriber.targets.postgres.session.capabilities import WITHOUT_ORIGINS, WITHOUT_REPLICA_ROLE
from tests.passwords import MARK
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import running_subscriber
from tests.scenarios.conftest import Pair
from tests.scenarios.test_outages import status_of

ROLE = "app_plain"
BOTH = (
    "CREATE TABLE parent (id int PRIMARY KEY)",
    "CREATE TABLE child (id int PRIMARY KEY, parent int REFERENCES parent ON DELETE CASCADE)",
    "INSERT INTO parent VALUES (1), (2); INSERT INTO child VALUES (10, 1), (20, 2)",
)


@dataclass
class AsRole(Database):
    """The same database for the plain role."""

    def dsn(self, **parameters: str) -> str:
        return self.server.dsn(self.name, user=ROLE, **parameters)


@pytest.fixture
async def plain(source_db: Database, target_db: Database) -> AsyncIterator[Pair]:
    """Create a `pair` whose target role owns the schema public and may create subscriptions, without other rights."""
    publisher = source_db.server
    hba = publisher.data / "pg_hba.conf"
    before = hba.read_text()
    hba.write_text(f"host all {ROLE} 127.0.0.1/32 scram-sha-256\n{before}")
    await publisher.reload()
    await source_db.execute(
        f"CREATE ROLE {ROLE} LOGIN REPLICATION PASSWORD '{MARK}'",
        *BOTH,
        f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {ROLE}",
        "CREATE PUBLICATION p FOR ALL TABLES",
    )
    await target_db.execute(
        f"CREATE ROLE {ROLE} LOGIN",
        f"GRANT CREATE ON DATABASE {target_db.name} TO {ROLE}",
        f"ALTER SCHEMA public OWNER TO {ROLE}",
    )
    if await target_db.value("SELECT current_setting('server_version_num')::int") >= 160000:
        await target_db.execute(f"GRANT pg_create_subscription TO {ROLE}")
    target = AsRole(target_db.server, target_db.name)
    await target.execute(*BOTH[:2])
    try:
        async with running_subscriber(target) as subscriber:
            yield Pair(source_db, target, subscriber)
            await subscriber.execute("DROP SUBSCRIPTION IF EXISTS s")
    finally:
        await target_db.execute(f"DROP OWNED BY {ROLE} CASCADE", f"DROP ROLE {ROLE}")
        hba.write_text(before)
        await publisher.reload()
        await source_db.execute(f"DROP OWNED BY {ROLE}", f"DROP ROLE {ROLE}")


def conninfo(source: Database, *, password: bool = True) -> str:
    dsn = source.dsn() if password else source.server.dsn(source.name)
    return dsn.replace("postgres@", f"{ROLE}@")


async def test_a_role_without_superuser_copies_and_applies_every_kind_of_change(plain: Pair) -> None:
    await plain.subscriber.create(conninfo(plain.source), "p")
    await plain.caught_up()  # also where child was copied first, which its foreign key refuses until parent is there
    await plain.change("INSERT INTO child VALUES (11, 1)", "UPDATE child SET id = 21 WHERE id = 20")
    await plain.change("DELETE FROM parent WHERE id = 1")  # and with it, on both sides, its children
    await plain.subscriber.restart()
    await plain.change("INSERT INTO parent VALUES (4)", "INSERT INTO child VALUES (40, 4)")
    await plain.assert_same("SELECT p.id, c.id FROM parent p LEFT JOIN child c ON c.parent = p.id ORDER BY 1, 2")
    await plain.source.wait_for_catchup("s")
    assert await plain.rows("SELECT roname FROM pg_replication_origin") == []
    assert await plain.target.value("SELECT remote_lsn > '0/0' FROM subscriber.progress WHERE relid = 0")


async def conflicts_are_recorded(plain: Pair) -> None:
    await plain.target.execute("INSERT INTO parent VALUES (50)")
    await plain.source.execute("INSERT INTO parent VALUES (50)")
    await plain.target.wait_for("SELECT occurrences >= 2 FROM subscriber.conflict_history")
    await plain.subscriber.execute("ALTER SUBSCRIPTION s SET (conflict_policy = keep_local)")
    await plain.source.wait_for_catchup("s")
    assert await plain.rows("SELECT policy, resolution FROM subscriber.conflict_history ORDER BY id") == [
        ("default", "error"),
        ("keep_local", "skipped"),
    ]
    await plain.subscriber.execute("ALTER SUBSCRIPTION s SET (conflict_policy = '')")


async def test_conflicts_are_recorded_without_a_superuser(plain: Pair) -> None:
    await plain.subscriber.create(conninfo(plain.source), "p")
    await plain.caught_up()
    await conflicts_are_recorded(plain)


async def test_missing_privileges_are_named_as_limits(plain: Pair) -> None:
    await plain.subscriber.create(conninfo(plain.source), "p")
    await plain.caught_up()
    expected = {WITHOUT_REPLICA_ROLE, WITHOUT_ORIGINS}
    assert set((await plain.subscriber.wait_for_state("streaming"))["limits"]) == expected
    assert set((await status_of(plain.target)).limits) == expected
    await plain.target.execute("SELECT pg_terminate_backend(pid) FROM subscriber.worker WHERE relid = 0")
    await plain.change("INSERT INTO parent VALUES (5)")
    for limit in expected:
        assert plain.subscriber.log.text().count(f"WARNING:  {limit}") == 1


async def test_triggers_run_for_replicated_changes(plain: Pair) -> None:
    await plain.target.execute(
        "CREATE TABLE seen (id int)",
        "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql"
        " AS $$ BEGIN INSERT INTO public.seen VALUES (NEW.id); RETURN NULL; END $$",
        "CREATE TRIGGER note AFTER INSERT ON parent FOR EACH ROW EXECUTE FUNCTION note()",
    )
    await plain.subscriber.create(conninfo(plain.source), "p", copy_data=False)
    await plain.change("INSERT INTO parent VALUES (7)")
    assert await plain.rows("SELECT id FROM seen") == [(7,)]


async def test_the_connection_must_have_a_password(plain: Pair) -> None:
    with pytest.raises(PublisherError, match="password is required"):
        await plain.subscriber.create(conninfo(plain.source, password=False), "p")
    with pytest.raises(StatementError, match="password_required=false is superuser-only"):
        await plain.subscriber.create(conninfo(plain.source), "p", password_required=False)


async def test_a_superuser_does_not_run_code_of_others(plain: Pair, target_db: Database) -> None:
    await plain.subscriber.create(conninfo(plain.source), "p", copy_data=False)
    connection = await target_db.connect()
    with pytest.raises(StatementError, match="belongs to role") as caught:
        await ensure_schema(connection)
    assert caught.value.hint == f'Connect as "{ROLE}".'


async def test_a_role_with_the_granted_privileges_has_no_limits(
    source_db: Database, target_db: Database, plain: Pair
) -> None:
    await target_db.needs(16, "roles that do not own schema subscriber may create subscriptions")
    await plain.subscriber.stop()
    await target_db.execute("DROP SCHEMA IF EXISTS subscriber CASCADE")
    await ensure_schema(await target_db.connect())
    await target_db.execute(f"SELECT subscriber.admit('{ROLE}', 'launcher')")
    await target_db.execute(f"GRANT SET ON PARAMETER session_replication_role TO {ROLE}")
    for name in ("progress", "advance", "session_setup", "session_reset", "xact_setup"):
        function = await target_db.value(f"SELECT 'pg_replication_origin_{name}'::regproc::regprocedure::text")
        await target_db.execute(f"GRANT EXECUTE ON FUNCTION {function} TO {ROLE}")
    plain.subscriber.start()
    await plain.subscriber.create(conninfo(plain.source), "p")
    await plain.caught_up()
    await plain.change("INSERT INTO parent VALUES (8)")
    assert (await plain.subscriber.wait_for_state("streaming"))["limits"] is None
    assert await target_db.value(
        "SELECT remote_lsn > '0/0' FROM pg_replication_origin_status WHERE external_id ~ '_[0-9]+$'"
    )
    await conflicts_are_recorded(plain)
    await plain.source.execute("CREATE TABLE guarded (id int PRIMARY KEY)", f"GRANT SELECT ON guarded TO {ROLE}")
    await plain.target.execute("CREATE TABLE guarded (id int PRIMARY KEY)")
    await plain.target.execute("ALTER TABLE guarded ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY")
    await plain.subscriber.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION WITH (copy_data = false)")
    await plain.source.execute("INSERT INTO guarded VALUES (1)")
    await plain.fails(f'user "{ROLE}" cannot replicate into relation with row-level security enabled: "guarded"')
