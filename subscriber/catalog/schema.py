"""Schema "subscriber" in the target: create it or upgrade it if necessary.

Every command checks this first, so a check without work costs two round trips. A new database gets schema.sql. The
schema of an earlier release gets the files of migrations/changes that it lacks. Either is one transaction, under an
advisory lock: two commands often start on a new database at the same time, and the second finds the work done.

A schema that a program between two releases has made is refused, unless its schema.sql was the same.

A schema of that name without the program's mark (publisher/own_schema.py) belongs to an application. It is left alone,
and the program does not work in that database before the schema has another name.

**Invariant.** A superuser's session reads and calls nothing of the schema before current_revision() or ensure_schema()
has found that the schema belongs to a superuser. Any role with CREATE on the database can make a schema with the mark,
whose views and functions would run with the superuser's rights.
"""

from __future__ import annotations

from pathlib import Path
from zlib import crc32

import asyncpg

from subscriber import server_features as features
from subscriber.catalog import locks
from subscriber.catalog.connection import translate
from subscriber.connection.errors import ASYNCPG_ERRORS
from subscriber.errors import ServerError, StatementError
from subscriber.limited_wait import LimitedWait
from subscriber.publisher import own_schema
from subscriber.remedy import Remedy
from subscriber.sqlstate import (
    DUPLICATE_SCHEMA,
    INSUFFICIENT_PRIVILEGE,
    OBJECT_NOT_IN_PREREQUISITE_STATE,
    UNDEFINED_FILE,
)

UPGRADE_PATIENCE = 60.0  # seconds to wait for another command's upgrade before trying one


def migrations() -> Path:
    """Return the folder of schema.sql: inside the package once installed, beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "_migrations", package.parent / "migrations"):
        if (folder / "schema.sql").is_file():
            return folder
    raise StatementError('the migrations of schema "subscriber" are not installed', sqlstate=UNDEFINED_FILE)


def schema_text() -> str:
    """Return the present schema, as SQL."""
    return (migrations() / "schema.sql").read_text("utf-8")


def changes() -> dict[str, Path]:
    """Return the files of changes/ by the revision that each one leads to, in order. Empty before the first release."""
    files = sorted((migrations() / "changes").glob("[0-9]*_*.sql"))
    return {file.name.partition("_")[0]: file for file in files}


def newest_revision() -> str:
    """Return the revision that this program needs. Before the first release, it is a checksum of schema.sql.

    Returns:
        Empty if no migrations are installed.
    """
    try:
        return max(changes(), default=None) or f"0_{crc32(schema_text().encode()):08x}"
    except StatementError:
        return ""


# The schema's revision is in its comment, which survives a crash. Table alembic_version is UNLOGGED. The query does not
# call to_regnamespace(), whose result "no such schema" is cached in the session. A commit makes its rows visible before
# it invalidates the caches of other sessions.
COMMENT = own_schema.COMMENT
REVISION = f"""
SELECT pg_catalog.substr(d.description, {len(COMMENT) + 1})
  FROM pg_catalog.pg_namespace n
  JOIN pg_catalog.pg_description d ON d.objoid = n.oid AND d.classoid = 'pg_catalog.pg_namespace'::pg_catalog.regclass
 WHERE n.nspname = 'subscriber' AND pg_catalog.starts_with(d.description, '{COMMENT}')
"""
SCHEMA = "subscriber"
RENAME_FOREIGN = f"ALTER SCHEMA {SCHEMA} RENAME TO {SCHEMA}_application;"
VERSION_TABLE = f"{SCHEMA}.alembic_version"
# What runs before schema.sql, and before changes.
BEFORE = (
    # Like the system catalogs, the schema belongs to the bootstrap superuser, who can never lose that attribute: some
    # functions run with their owner's rights, and the migrating role may be an ordinary role later. Without a
    # superuser it belongs to the migrating role.
    """
    SELECT pg_catalog.set_config('role', (SELECT rolname FROM pg_catalog.pg_roles WHERE oid = 10), true)
     WHERE pg_catalog.current_setting('is_superuser')::bool
    """,
    "SET LOCAL search_path = pg_catalog, pg_temp",
    "SET LOCAL lock_timeout = '30s'",
    # Tables are made as the functions of the schema expect them.
    "SET LOCAL default_tablespace = ''",
    "SET LOCAL default_table_access_method = 'heap'",
    f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}",
    # Another role can have made it since the command has looked.
    f"""
    DO $$ BEGIN
        IF NOT EXISTS (SELECT FROM pg_catalog.pg_namespace n JOIN pg_catalog.pg_roles r ON r.oid = n.nspowner
                        WHERE n.nspname = '{SCHEMA}' AND pg_catalog.pg_has_role(n.nspowner, 'USAGE')
                          AND (r.rolsuper OR NOT pg_catalog.current_setting('is_superuser')::pg_catalog.bool)) THEN
            RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
                MESSAGE = 'schema "{SCHEMA}" belongs to another role';
        END IF;
    END $$
    """,
    # Alembic needs its table before it runs a revision, and would create a permanent one, which FOR ALL TABLES
    # publishes.
    f"""
    CREATE UNLOGGED TABLE IF NOT EXISTS {VERSION_TABLE} (
        version_num pg_catalog.varchar(32) NOT NULL,
        CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
    )
    """,
)
AFTER = f"REVOKE ALL ON ALL FUNCTIONS IN SCHEMA {SCHEMA} FROM PUBLIC"  # a function is for PUBLIC by default
# An empty schema has no owner who would miss it.
FOREIGN = f"""
SELECT r.rolname::text AS owner,
       (SELECT count(*) FROM pg_catalog.pg_class c WHERE c.relnamespace = n.oid AND c.relkind IN ('r', 'p')) AS tables
  FROM pg_catalog.pg_namespace n JOIN pg_catalog.pg_roles r ON r.oid = n.nspowner
 WHERE n.nspname = 'subscriber' AND NOT {own_schema.IS_OURS}
   AND (EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.relnamespace = n.oid)
        OR EXISTS (SELECT FROM pg_catalog.pg_proc p WHERE p.pronamespace = n.oid)
        OR EXISTS (SELECT FROM pg_catalog.pg_type t WHERE t.typnamespace = n.oid))
"""
_OTHER_VIEWS = features.PUBLISHED_SEQUENCES.since * 10_000  # the version whose own views have more columns
# Whether the tables have their rows, and the views the columns of the server's own views, which differ by version.
CONDITION = f"""
SELECT EXISTS (SELECT FROM subscriber.complete) AS is_complete,
       EXISTS (SELECT FROM pg_catalog.pg_attribute a
                WHERE a.attrelid = 'subscriber.pg_subscription'::pg_catalog.regclass AND a.attname = 'subserver')
       = (pg_catalog.current_setting('server_version_num')::int >= {_OTHER_VIEWS}) AS views_fit
"""
RESTORE = "SELECT subscriber.restore()"
MAKE_VIEWS = "SELECT subscriber.make_views()"
IN_RECOVERY = "SELECT pg_catalog.pg_is_in_recovery()"
MAY_UPGRADE = """
SELECT coalesce((SELECT pg_catalog.pg_has_role(n.nspowner, 'USAGE') FROM pg_catalog.pg_namespace n
                  WHERE n.nspname = 'subscriber'),
                pg_catalog.has_database_privilege(pg_catalog.current_database(), 'CREATE'))
"""
# A superuser must not run what an ordinary role could have written: functions, triggers, defaults.
STRANGER = """
SELECT r.rolname::text FROM pg_catalog.pg_namespace n JOIN pg_catalog.pg_roles r ON r.oid = n.nspowner
 WHERE n.nspname = 'subscriber' AND NOT r.rolsuper AND pg_catalog.current_setting('is_superuser')::bool
"""


async def current_revision(connection: asyncpg.Connection) -> str | None:
    """Return the revision of the schema. None: there is no schema, or it belongs to an application.

    Raises:
        StatementError: the session is a superuser's, and the schema belongs to a role that is no superuser.
    """
    revision: str | None = await connection.fetchval(REVISION)
    if revision is not None:
        await _refuse_a_strangers(connection)
    return revision


async def is_current(connection: asyncpg.Connection) -> bool:
    """Return True if the schema exists and ensure_schema() would change nothing."""
    return await current_revision(connection) == newest_revision()


async def ensure_schema(connection: asyncpg.Connection) -> None:
    """Bring schema "subscriber" to the newest revision if it is not there already.

    `connection` must not be in a transaction. A schema made by a superuser has replication origins, whose functions run
    with their owner's rights. One made by another role that may create schemas, as on a managed service, does
    without. Raises StatementError if the role may not create or upgrade it, or as a superuser must not use it (42501),
    if the schema is newer than this program (55000), or if a schema of that name belongs to an application (42P06).
    """
    await refuse_foreign_schema(connection)
    await _refuse_a_strangers(connection)
    if not await is_current(connection):
        await _refuse_what_cannot_work(connection)
        await _upgrade_alone(connection)
    await restore(connection)


async def restore(connection: asyncpg.Connection) -> None:
    """Fill the tables of the schema again if a crash of the server has emptied them, and make views that fit it.

    A standby has no UNLOGGED tables; nothing happens there.
    """
    if await connection.fetchval(IN_RECOVERY):
        return
    condition = await connection.fetchrow(CONDITION)
    if condition is None or not condition["is_complete"]:
        await connection.execute(RESTORE)
    if condition is None or not condition["views_fit"]:
        await connection.execute(MAKE_VIEWS)


async def _upgrade_alone(connection: asyncpg.Connection) -> None:
    """Upgrade while no other command does. Any role can hold an advisory lock, so nothing depends on it."""
    wait = LimitedWait("the upgrade of schema subscriber by another command", UPGRADE_PATIENCE)
    locked = False
    while not locked and not wait.is_over:
        locked = await locks.try_lock(connection, locks.SCHEMA_UPGRADE)
        if await is_current(connection):
            break
        if not locked:
            await wait.pause()
    try:
        if not await is_current(connection):
            await _upgrade(connection)
    except ServerError:
        if not await is_current(connection):  # else another command has been faster
            raise
    finally:
        if locked and not connection.is_closed():  # an error of the unlock would hide that of the upgrade
            await locks.unlock(connection, locks.SCHEMA_UPGRADE)


async def refuse_foreign_schema(connection: asyncpg.Connection) -> None:
    """Refuse a database in which a schema of the program's name belongs to an application.

    Raises:
        StatementError: there is such a schema, and it is not empty.
    """
    if schema := await connection.fetchrow(FOREIGN):
        raise StatementError(
            'schema "subscriber" of this database belongs to another program',
            detail=f'It belongs to role "{schema["owner"]}" and has {schema["tables"]} tables, none of which subscriber'
            " has created.",
            hint=Remedy(
                "subscriber stores subscriptions in a schema of this name. Give the other one another name",
                RENAME_FOREIGN,
            ),
            sqlstate=DUPLICATE_SCHEMA,
        )


async def _refuse_a_strangers(connection: asyncpg.Connection) -> None:
    if owner := await connection.fetchval(STRANGER):
        raise StatementError(
            f'schema "subscriber" belongs to role "{owner}", which is no superuser',
            detail="Code of its owner would run with superuser's rights.",
            hint=f'Connect as "{owner}".',
            sqlstate=INSUFFICIENT_PRIVILEGE,
        )


async def _refuse_what_cannot_work(connection: asyncpg.Connection) -> None:
    revision = await current_revision(connection)
    if revision is not None and revision not in changes():
        raise StatementError(
            f'schema "subscriber" is at revision {revision}, but this program knows only {newest_revision()}',
            detail="A newer release has made the schema, or a version between two releases.",
            hint="Use the version of the program that has made it. No other version can upgrade the schema of a version"
            " between two releases: remove it with `subscriber uninstall --drop-subscriptions` of that version.",
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )
    if not await connection.fetchval(MAY_UPGRADE):
        raise StatementError(
            'permission denied to create or upgrade schema "subscriber"',
            detail="Only superusers, its owner, or to create it roles with CREATE on the database may do so.",
            hint="Run any subscriber command once on this database as a superuser, or as the schema's owner.",
            sqlstate=INSUFFICIENT_PRIVILEGE,
        )


async def _upgrade(connection: asyncpg.Connection) -> None:
    """Upgrade in one transaction and one message: a round trip for each statement takes long."""
    statements = upgrade_script(await current_revision(connection))
    try:
        async with connection.transaction():
            await connection.execute(statements)
    except ASYNCPG_ERRORS as error:
        raise translate(error) from error


def stamp() -> tuple[str, ...]:
    """Return the statements that store the newest revision: as the comment of the schema, and in Alembic's table."""
    revision = newest_revision()
    return (
        f"COMMENT ON SCHEMA {SCHEMA} IS '{COMMENT}{revision}'",
        f"DELETE FROM {VERSION_TABLE}",
        f"INSERT INTO {VERSION_TABLE} (version_num) VALUES ('{revision}')",
    )


def upgrade_script(revision: str | None) -> str:
    """Return the statements that bring the schema from a revision to the newest one; None: there is no schema yet."""
    if revision is None:
        texts = [schema_text()]
    else:
        texts = [file.read_text("utf-8") for number, file in changes().items() if number > revision]
    return ";\n".join((*BEFORE, *texts, AFTER, *stamp()))
