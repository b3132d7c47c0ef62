"""The rights of a role with only pg_create_subscription, compared with PostgreSQL's own subscriptions."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from dataclasses import dataclass

import asyncpg
import pytest

from subscriber.cli.commands.exec import execute_statements
from subscriber.demo.servers import Server
from subscriber.errors import SubscriberError
from tests.passwords import MARK
from tests.plugins.fix_cluster import Database
from tests.privileges.conftest import APPLY, OTHER, OWNER, SINCE_16, Attacked

pytestmark = pytest.mark.parametrize("target", SINCE_16, indirect=True, scope="session")  # the first with the role

READER = "app_reader"
HOSTILE = """
CREATE FUNCTION app.fire() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN PERFORM app.attack(); RETURN NEW; END $$;
CREATE TRIGGER x BEFORE INSERT ON app.mine FOR EACH ROW EXECUTE FUNCTION app.fire();
ALTER TABLE app.mine ENABLE ALWAYS TRIGGER x
"""


@dataclass
class Creator:
    """Role OWNER, which has been granted pg_create_subscription and CREATE on the database."""

    attacked: Attacked
    conninfo: str  # with a password that the publisher asks for

    async def ours(self, statement: str, role: str = OWNER) -> str:
        """Run a statement of ours as a role; the error's message, or nothing."""
        try:
            await execute_statements(self.attacked.target.dsn(user=role), statement, io.StringIO())
        except SubscriberError as error:
            return error.message
        return ""

    async def native(self, statement: str, role: str = OWNER) -> str:
        """Execute the statement for PostgreSQL's own subscriptions."""
        connection = await asyncpg.connect(self.attacked.target.dsn(user=role))
        try:
            await connection.execute(statement)
        except asyncpg.PostgresError as error:
            return str(error.as_dict()["message"])
        finally:
            await connection.close()
        return ""

    def create(self, name: str, publication: str = "p", **options: str) -> str:
        given = ", ".join(f"{option} = {value}" for option, value in options.items())
        conninfo = self.conninfo.replace("'", "''")
        return f"CREATE SUBSCRIPTION {name} CONNECTION '{conninfo}' PUBLICATION {publication}" + (
            f" WITH ({given})" if given else ""
        )


@pytest.fixture
async def creator(attacked: Attacked, source_db: Database, publisher: Server) -> AsyncIterator[Creator]:
    hba = publisher.data / "pg_hba.conf"
    before = hba.read_text()
    hba.write_text(f"host all {READER} 127.0.0.1/32 scram-sha-256\n{before}")
    await publisher.reload()
    await source_db.execute(
        f"CREATE ROLE {READER} LOGIN REPLICATION PASSWORD '{MARK}'",
        "CREATE SCHEMA app",
        f"GRANT USAGE ON SCHEMA app TO {READER}",
        *(f"CREATE TABLE app.{table} (id int PRIMARY KEY)" for table in ("mine", "others")),
        f"GRANT SELECT ON ALL TABLES IN SCHEMA app TO {READER}",
        "INSERT INTO app.mine VALUES (1)",
        "CREATE PUBLICATION p FOR TABLE app.mine",
        "CREATE PUBLICATION q FOR TABLE app.others",
    )
    await attacked.target.execute(
        f"GRANT pg_create_subscription TO {OWNER}",
        f"GRANT CREATE ON DATABASE {attacked.target.name} TO {OWNER}",
        "CREATE TABLE app.others (id int PRIMARY KEY)",
        f"ALTER TABLE app.others OWNER TO {OTHER}",
    )
    await attacked.as_owner("CREATE TABLE app.mine (id int PRIMARY KEY)")
    port, name = publisher.port, source_db.name
    creator = Creator(attacked, f"host=127.0.0.1 port={port} dbname={name} user={READER} password={MARK}")
    try:
        yield creator
    finally:
        for (subscription,) in await attacked.target.rows(
            "SELECT subname FROM pg_subscription WHERE subdbid ="
            " (SELECT oid FROM pg_database WHERE datname = current_database())"
        ):
            await creator.native(f"DROP SUBSCRIPTION {subscription}", "postgres")
        for subscription in ("s", "t"):
            await attacked.subscriber.execute(f"DROP SUBSCRIPTION IF EXISTS {subscription}")
        await source_db.execute(f"DROP OWNED BY {READER}", f"DROP ROLE {READER}")
        hba.write_text(before)
        await publisher.reload()


async def test_tables_of_the_creator_are_replicated(creator: Creator) -> None:
    """Both subscriptions fill the same table, one after the other; a hostile trigger gets no other role's rights."""
    attacked = creator.attacked
    await attacked.as_owner(HOSTILE)
    await attacked.apply_as(APPLY)
    assert await creator.ours(creator.create("s")) == ""
    await attacked.caught_up()
    await attacked.change("INSERT INTO app.mine VALUES (2)")
    await attacked.assert_same("SELECT * FROM app.mine ORDER BY id")
    assert await creator.ours("DROP SUBSCRIPTION s") == ""
    of_ours = await attacked.loot()
    assert of_ours
    assert of_ours <= {(APPLY, "off"), (OWNER, "off")}

    await attacked.as_owner("TRUNCATE app.mine, app.loot")
    assert await creator.native(creator.create("n")) == ""
    await attacked.target.wait_for("SELECT count(*) FROM app.mine", 2)
    await attacked.source.execute("INSERT INTO app.mine VALUES (3)")
    await attacked.target.wait_for("SELECT count(*) FROM app.mine", 3)
    assert await attacked.loot() == {(OWNER, "off")}


async def test_a_superusers_session_does_not_run_code_of_the_creator(creator: Creator) -> None:
    """For every setting of the role that applies changes."""
    attacked = creator.attacked
    await attacked.as_owner(HOSTILE)
    for run_as_owner in ("false", "true"):
        attacked.subscriber.log.clear()
        assert await creator.ours(creator.create("s", run_as_owner=run_as_owner)) == ""
        await attacked.fails(f'changes of table "app.mine" run code of role "{OWNER}"')
        assert await attacked.rows("SELECT * FROM app.mine") == []
        assert await creator.ours("DROP SUBSCRIPTION s") == ""
    assert await attacked.loot() == set()


async def test_tables_of_other_roles_are_refused(creator: Creator) -> None:
    """With the words of the server's own worker, which are in its log."""
    attacked = creator.attacked
    assert await creator.ours(creator.create("s", "q", copy_data="false")) == ""
    assert await creator.native(creator.create("n", "q", copy_data="false")) == ""
    await attacked.source.execute("INSERT INTO app.others VALUES (1)")
    refused = f'role "{OWNER}" cannot SET ROLE to "{OTHER}"'
    await attacked.fails(refused)
    log = attacked.target.server.log
    await attacked.target.wait_for("SELECT count(*) > 0 FROM pg_stat_subscription_stats WHERE apply_error_count > 0")
    assert refused in log.read_text()
    assert await attacked.rows("SELECT * FROM app.others") == []


async def test_a_role_with_pg_create_subscription_is_refused_rights_beyond_its_own(creator: Creator) -> None:
    attacked = creator.attacked
    connect = {"connect": "false", "slot_name": "NONE"}
    for run in (creator.ours, creator.native):  # of a superuser
        assert await run(creator.create("t", **connect), "postgres") == ""
    forbidden = [
        "ALTER SUBSCRIPTION t CONNECTION 'password=x dbname=y'",
        "ALTER SUBSCRIPTION t SET (run_as_owner)",
        "ALTER SUBSCRIPTION t OWNER TO CURRENT_USER",
        "ALTER SUBSCRIPTION t RENAME TO u",
        "DROP SUBSCRIPTION t",
        creator.create("u", password_required="false", **connect),
        "CREATE SUBSCRIPTION u CONNECTION 'dbname=x' PUBLICATION p WITH (connect = false, slot_name = NONE)",
    ]
    for statement in forbidden:
        said = await creator.native(statement)
        assert said, statement
        assert await creator.ours(statement) == said
    for run in (creator.ours, creator.native):
        assert await run(creator.create("s", **connect)) == ""
        assert await run("ALTER SUBSCRIPTION s SET (password_required = false)") == (
            "password_required=false is superuser-only"
        )
        assert await run(f"ALTER SUBSCRIPTION s OWNER TO {OTHER}") == f'must be able to SET ROLE "{OTHER}"'
    assert await creator.ours("ALTER SUBSCRIPTION s SET (trusted_owners = 'postgres')") == (
        "trusted_owners is superuser-only"
    )
    async with attacked.target.connection() as connection:
        await connection.execute(f"SET SESSION AUTHORIZATION {OWNER}")
        for view in ("subscriber.pg_subscription", "subscriber.subscription"):
            shown = await connection.fetch(f"SELECT subname FROM {view} WHERE subconninfo IS NOT NULL")
            assert [row["subname"] for row in shown] == ["s"]
        for hostile in (
            "SELECT subscriber.admit(current_user, 'launcher')",
            "UPDATE subscriber.subscription SET subtrustedowners = '{postgres}'",
            "UPDATE subscriber.subscription SET subpasswordrequired = false",
            "UPDATE subscriber.subscription SET subowner = 10",
            "SELECT subscriber.claim_progress(subid, 0) FROM subscriber.subscription",
        ):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await connection.execute(hostile)
        other = await connection.fetchval("SELECT oid FROM subscriber.pg_subscription WHERE subname = 't'")
        for function in (f"terminate_workers({other}, NULL)", f"set_progress({other}, 0, '0/1')",
                         f"set_owner({other}, {other})", f"drop_origin('pg_{other}')"):  # fmt: skip
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await connection.execute(f"SELECT subscriber.{function}")
