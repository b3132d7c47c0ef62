"""`subscriber uninstall`: remove everything that this package has created in a target database.

That is schema "subscriber" with its tables, views and functions, the large objects of its rows, and with
`drop_subscriptions` the subscriptions with their origins and slots. Roles are not removed: an administrator has created
them.

Failure cases.

- Subscriptions are dropped one by one, as by DROP SUBSCRIPTION. If one cannot be dropped, the earlier ones stay
  dropped, and the schema stays. The command can be repeated.
- Schema and large objects are removed in one transaction. Killed before its commit: nothing is removed.
- A launcher would lose its tables. So the command refuses while a launcher leads. One that starts meanwhile waits for
  the locks of the transaction, and creates an empty schema afterwards.
- A subscription that is created meanwhile is found after the locks, and the schema stays.
- Objects of other schemas that depend on the schema, such as a view, would be dropped too. The command refuses. The
  same is true of objects in the schema that migrations/schema.sql does not create: they belong to an application.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import asyncpg

from subscriber.catalog import schema, worker_sessions
from subscriber.catalog.commands.execute import execute_parsed
from subscriber.catalog.commands.publisher_connection import Notice
from subscriber.catalog.grammar.parser import DropSubscription
from subscriber.catalog.own_large_objects import IS_OWN
from subscriber.catalog.store import migrations
from subscriber.catalog.store.subscriptions import load_subscriptions
from subscriber.display import shell_word
from subscriber.errors import StatementError
from subscriber.publisher.own_schema import IS_OWN_NAME
from subscriber.remedy import Remedy
from subscriber.settings import DEFAULTS, Settings
from subscriber.sqlstate import (
    DEPENDENT_OBJECTS_STILL_EXIST,
    INSUFFICIENT_PRIVILEGE,
    OBJECT_IN_USE,
    OBJECT_NOT_IN_PREREQUISITE_STATE,
)

OTHER_OWNER = """
SELECT r.rolname::text FROM pg_catalog.pg_namespace n JOIN pg_catalog.pg_roles r ON r.oid = n.nspowner
 WHERE n.nspname = 'subscriber' AND NOT pg_catalog.pg_has_role(r.oid, 'USAGE')
"""
# Views, triggers, defaults and functions of other schemas.
DEPENDENTS = """
WITH schema AS (SELECT n.oid FROM pg_catalog.pg_namespace n WHERE n.nspname = 'subscriber'), ours (classid, objid) AS (
    SELECT 'pg_catalog.pg_class'::pg_catalog.regclass, c.oid FROM pg_catalog.pg_class c, schema s
     WHERE c.relnamespace = s.oid
     UNION ALL
    SELECT 'pg_catalog.pg_proc'::pg_catalog.regclass, p.oid FROM pg_catalog.pg_proc p, schema s
     WHERE p.pronamespace = s.oid
     UNION ALL
    SELECT 'pg_catalog.pg_type'::pg_catalog.regclass, t.oid FROM pg_catalog.pg_type t, schema s
     WHERE t.typnamespace = s.oid
)
SELECT DISTINCT CASE WHEN w.oid IS NULL THEN pg_catalog.pg_describe_object(d.classid, d.objid, d.objsubid)
                ELSE pg_catalog.pg_describe_object('pg_catalog.pg_class'::pg_catalog.regclass, w.ev_class, 0)
                END AS description
  FROM ours o CROSS JOIN schema s
  JOIN pg_catalog.pg_depend d ON d.refclassid = o.classid AND d.refobjid = o.objid AND d.deptype IN ('n', 'a')
  LEFT JOIN pg_catalog.pg_rewrite w ON w.oid = d.objid AND d.classid = 'pg_catalog.pg_rewrite'::pg_catalog.regclass
  LEFT JOIN pg_catalog.pg_trigger t ON t.oid = d.objid AND d.classid = 'pg_catalog.pg_trigger'::pg_catalog.regclass
  LEFT JOIN pg_catalog.pg_attrdef f ON f.oid = d.objid AND d.classid = 'pg_catalog.pg_attrdef'::pg_catalog.regclass
  LEFT JOIN pg_catalog.pg_proc p ON p.oid = d.objid AND d.classid = 'pg_catalog.pg_proc'::pg_catalog.regclass
  LEFT JOIN pg_catalog.pg_class c ON c.oid = coalesce(w.ev_class, t.tgrelid, f.adrelid,
            CASE d.classid WHEN 'pg_catalog.pg_class'::pg_catalog.regclass THEN d.objid END)
 WHERE coalesce(c.relnamespace, p.pronamespace) <> s.oid
 ORDER BY 1
"""
# Objects of the schema that are not the program's own. $1: names of its functions and types.
FOREIGN = f"""
SELECT pg_catalog.pg_describe_object(o.classid, o.objid, 0) FROM (
    SELECT 'pg_catalog.pg_class'::pg_catalog.regclass::oid AS classid, c.oid AS objid
      FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
     WHERE n.nspname = 'subscriber' AND c.relkind IN ('r', 'p', 'v', 'm', 'f', 'S', 'c') AND NOT {IS_OWN_NAME}
     UNION ALL
    SELECT 'pg_catalog.pg_proc'::pg_catalog.regclass, p.oid
      FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
     WHERE n.nspname = 'subscriber' AND p.proname <> ALL ($1::text[]) AND p.proname !~ '^deleted_[0-9]+$'
     UNION ALL
    SELECT 'pg_catalog.pg_type'::pg_catalog.regclass, t.oid
      FROM pg_catalog.pg_type t JOIN pg_catalog.pg_namespace n ON n.oid = t.typnamespace
     WHERE n.nspname = 'subscriber' AND t.typtype IN ('b', 'd', 'e', 'r') AND t.typelem = 0
       AND t.typname <> ALL ($1::text[])
) o ORDER BY 1
"""
_OWN_NAME = re.compile(r"\b(?:FUNCTION|TYPE|DOMAIN)\s+subscriber\.(\w+)")
LOCK = """
SET LOCAL lock_timeout = '30s';
LOCK TABLE subscriber.subscription, subscriber.launcher, subscriber.migration IN SHARE MODE
"""
COUNTS = """
SELECT (SELECT count(*) FROM pg_catalog.pg_class c WHERE c.relnamespace = n.oid AND c.relkind = 'r') AS tables,
       (SELECT count(*) FROM pg_catalog.pg_class c WHERE c.relnamespace = n.oid AND c.relkind = 'v') AS views,
       (SELECT count(*) FROM pg_catalog.pg_proc p WHERE p.pronamespace = n.oid) AS functions
  FROM pg_catalog.pg_namespace n WHERE n.nspname = 'subscriber'
"""
_RECORDS = f" FROM pg_catalog.pg_largeobject_metadata m WHERE {IS_OWN}"
COUNT_RECORDS = f"SELECT count(*) {_RECORDS}"
REMOVE_RECORDS = f"SELECT count(pg_catalog.lo_unlink(m.oid)) {_RECORDS}"
DROP_SCHEMA = f"DROP SCHEMA {schema.SCHEMA} CASCADE"


@dataclass(frozen=True, slots=True)
class Removed:
    """The objects that an uninstallation has removed, or would remove.

    Attributes:
        subscriptions: their names.
        tables: number of tables in schema "subscriber".
        views: number of its views.
        functions: number of its functions.
        records: number of large objects with rows of its tables.
    """

    subscriptions: tuple[str, ...]
    tables: int
    views: int
    functions: int
    records: int


async def uninstall(
    connection: asyncpg.Connection,
    notice: Notice,
    *,
    drop_subscriptions: bool = False,
    dry_run: bool = False,
    settings: Settings = DEFAULTS,
) -> Removed | None:
    """Remove schema "subscriber" and all that belongs to it.

    Args:
        connection: to a server that takes writes, not in a transaction.
        notice: receives the notices of the dropped subscriptions.
        drop_subscriptions: drop the subscriptions first. False: refuse if there are any.
        dry_run: change nothing.
        settings: the time for workers to end.

    Returns:
        What was removed. None: there is no schema.

    Raises:
        StatementError: the schema cannot be removed now, or by this role.
        PublisherError: a publisher refuses to drop a slot.
        ServerError: an error of the publisher or the target.
        ConnectionLost: a connection broke.
    """
    revision = await schema.current_revision(connection)
    if revision is None:
        return None
    await _refuse_other_roles(connection)
    if dry_run and not await schema.is_current(connection):
        raise StatementError(
            f'schema "subscriber" is at revision {revision}, not {schema.newest_revision()}',
            detail="A dry run does not upgrade it.",
            hint=Remedy("upgrade it", "subscriber exec ''"),
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )
    await schema.ensure_schema(connection)
    names = await _refuse_obstacles(connection, drop_subscriptions=drop_subscriptions)
    if not dry_run:
        drops = [DropSubscription(name, if_exists=True) for name in names]
        await execute_parsed(connection, drops, notice=notice, settings=settings)
    async with connection.transaction():
        await connection.execute(LOCK)
        if not dry_run:  # one may have started, or been created, before the lock
            await _refuse_obstacles(connection, drop_subscriptions=False)
        counts = await connection.fetchrow(COUNTS)
        assert counts is not None
        tables, views, functions = counts
        records = await connection.fetchval(COUNT_RECORDS if dry_run else REMOVE_RECORDS)
        if not dry_run:
            await connection.execute(DROP_SCHEMA)
    return Removed(names, tables, views, functions, records)


async def _refuse_other_roles(connection: asyncpg.Connection) -> None:
    owner = await connection.fetchval(OTHER_OWNER)
    if owner is not None:
        raise StatementError(
            'must be owner of schema "subscriber"',
            hint=f'Connect as role "{owner}", or as a superuser.',
            sqlstate=INSUFFICIENT_PRIVILEGE,
        )


async def _refuse_obstacles(connection: asyncpg.Connection, *, drop_subscriptions: bool) -> tuple[str, ...]:
    """Return the names of all subscriptions.

    Raises:
        StatementError: something still needs the schema.
    """
    names = tuple(subscription.name for subscription in await load_subscriptions(connection))
    if names and not drop_subscriptions:
        raise StatementError(
            'cannot remove schema "subscriber" because subscriptions exist',
            detail=f"They are: {', '.join(names)}.",
            hint=Remedy("remove them and their slots as well", "subscriber uninstall --drop-subscriptions"),
            sqlstate=DEPENDENT_OBJECTS_STILL_EXIST,
        )
    moves = await migrations.unfinished_moves(connection, "finished")
    if moves:
        raise StatementError(
            f'the move "{moves[0]}" of this database is not finished',
            hint=Remedy(
                "finish it, or undo it. See its next command", f"subscriber migrate status {shell_word(moves[0])}"
            ),
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )
    leader = await worker_sessions.leader(connection)
    if leader is not None:
        raise StatementError(
            "a launcher is running on this database",
            detail=f"Its session on the target has process ID {leader.pid}.",
            hint="End subscriber run, or the program with Database.running(), and run this command again.",
            sqlstate=OBJECT_IN_USE,
        )
    foreign = [row[0] for row in await connection.fetch(FOREIGN, sorted(_own_names()))]
    if foreign:
        raise StatementError(
            'cannot remove schema "subscriber" because it has objects of an application',
            detail=f"They are: {', '.join(foreign)}.",
            hint="Move them to another schema first, on the target: ALTER TABLE … SET SCHEMA public;",
            sqlstate=DEPENDENT_OBJECTS_STILL_EXIST,
        )
    dependents = [row["description"] for row in await connection.fetch(DEPENDENTS)]
    if dependents:
        raise StatementError(
            'cannot remove schema "subscriber" because other objects depend on it',
            detail=f"They are: {', '.join(dependents)}.",
            hint="Drop them first, on the target.",
            sqlstate=DEPENDENT_OBJECTS_STILL_EXIST,
        )
    return names


def _own_names() -> set[str]:
    """Return the names of all functions and types that the migrations create, and of the function of a fence."""
    return {"fence", *_OWN_NAME.findall(schema.upgrade_script(None))}
