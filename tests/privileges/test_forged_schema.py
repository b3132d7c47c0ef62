"""A role with CREATE on the database makes schema "subscriber" with the program's mark, before the program does.

Its views and functions would have the rights of the session that reads the schema.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Sequence

import pytest

from subscriber.catalog import schema
from subscriber.demo.servers import Server
from subscriber.errors import ServerError
from subscriber.publisher.own_schema import OWN_RELATIONS
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Subscriptions

FORGER = "forger"
# What the program reads first of all, beside the views.
FUNCTIONS = ("present_identity() RETURNS TABLE (system_identifier text)", "own_sessions() RETURNS TABLE (pid int)")
FORGED = (
    "CREATE SCHEMA subscriber",
    f"COMMENT ON SCHEMA subscriber IS '{schema.COMMENT}{schema.newest_revision()}'",
    "GRANT USAGE ON SCHEMA subscriber TO PUBLIC",
    "CREATE SEQUENCE subscriber.escapes",  # which no rollback undoes
    """
    CREATE FUNCTION subscriber.attack() RETURNS text LANGUAGE plpgsql AS $$
    BEGIN
        IF current_setting('is_superuser')::bool THEN PERFORM nextval('subscriber.escapes'); END IF;
        RETURN 's';
    END $$
    """,
    *(
        f"CREATE VIEW subscriber.{name} AS SELECT a AS subname, a AS version_num, 1::oid AS subid, 1::oid AS subowner,"
        " 1::oid AS srsubid, 1::oid AS srrelid, a AS name, a AS phase, a AS serving, '{}'::jsonb AS facts,"
        " now() AS changed FROM subscriber.attack() a"
        for name in sorted(OWN_RELATIONS)
    ),
    *(
        f"CREATE FUNCTION subscriber.{function} LANGUAGE plpgsql"
        " AS $$ BEGIN PERFORM subscriber.attack(); RETURN; END $$"
        for function in FUNCTIONS
    ),
)
COMMANDS = (
    "status",
    "status --json",
    "check s",
    "check --fix s",
    "verify s",
    "exec DROP_SUBSCRIPTION",
    "uninstall --dry-run",
    "adopt s",
)
MOVES = (
    "migrate preflight",
    "migrate diff",
    "migrate status m",
    "migrate report m",
    "migrate start m --dry-run",
    "migrate start m",
)
REFUSED = f'schema "subscriber" belongs to role "{FORGER}", which is no superuser'


@pytest.fixture(params=[18])
def target(publisher: Server) -> Server:
    """The server of the source has room for both databases."""
    return publisher


@pytest.fixture
async def forged(source_db: Database, target_db: Database) -> AsyncIterator[Sequence[Database]]:
    """Both databases, each with a forged schema."""
    await source_db.execute(f"CREATE ROLE {FORGER}")
    try:
        for database in (source_db, target_db):
            await database.execute(f"GRANT CREATE ON DATABASE {database.name} TO {FORGER}")
            await database.execute(f"SET SESSION AUTHORIZATION {FORGER}", *FORGED)
        yield source_db, target_db
    finally:
        for database in (source_db, target_db):
            await database.execute(f"DROP OWNED BY {FORGER} CASCADE")
        await source_db.execute(f"DROP ROLE {FORGER}")


@pytest.mark.parametrize("command", [*COMMANDS, *MOVES])
async def test_no_command_of_a_superuser_reads_a_forged_schema(forged: Sequence[Database], command: str) -> None:
    source, target = forged
    arguments = [word.replace("DROP_SUBSCRIPTION", "DROP SUBSCRIPTION s") for word in command.split()]
    arguments += ["--target", target.dsn(), *(["--source", source.dsn()] if command in MOVES else [])]
    done = subprocess.run(
        [sys.executable, "-m", "subscriber", *arguments], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    assert REFUSED in done.stdout + done.stderr
    for database in forged:
        assert await database.value("SELECT is_called FROM subscriber.escapes") is False


async def test_a_forged_schema_on_the_publisher_is_not_read(forged: Sequence[Database], target_db: Database) -> None:
    """CREATE SUBSCRIPTION with origin = none asks the publisher for subscriptions of its own."""
    source, target = forged
    await source.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION p FOR TABLE t")
    await target.execute("CREATE TABLE t (id int PRIMARY KEY)", f"DROP OWNED BY {FORGER} CASCADE")
    subscriptions = Subscriptions(target)
    await subscriptions.create(source, "p", origin="none", enabled=False, create_slot=False, slot_name="NONE")
    await subscriptions.execute("DROP SUBSCRIPTION s")
    assert await source.value("SELECT is_called FROM subscriber.escapes") is False


async def test_a_schema_forged_during_the_command_is_refused(source_db: Database) -> None:
    """The schema is made while a command prepares the statements for its own."""
    await source_db.execute(f"CREATE ROLE {FORGER}")
    try:
        await source_db.execute(f"CREATE SCHEMA subscriber AUTHORIZATION {FORGER}")
        with pytest.raises(ServerError, match='schema "subscriber" belongs to another role'):
            await schema._upgrade(await source_db.connect())
    finally:
        await source_db.execute("DROP SCHEMA subscriber", f"DROP ROLE {FORGER}")
