"""Execute the statements of an archive on the target, before the initial copy and after it.

The entries of an archive fall into these groups:

    definitions     the section pre-data, with primary keys and the indexes of replica identities, which the apply
                    worker needs; one transaction. Workers can build most primary keys themselves. Privileges on
                    objects of pg_catalog are part of the rest, because a managed service refuses them
    indexes         other indexes and constraints of tables, the largest table first, in parallel sessions
    attachments     indexes of partitions, which become parts of the index of their parent
    foreign keys    the largest table first, in parallel sessions
    the rest        triggers, rules, policies, publications, comments and so on, in the order of the archive

Each statement behind the definitions has a transaction of its own. It locks one table, or two for a foreign key. It
is repeated after a deadlock with an apply worker. An object that the target has is skipped. Statements
about no object of their own, such as comments, have the same result when they are repeated. Statements that run code
of a table's owner run as that role (code_owners.py).

With `copy_indexes = after`, workers have built most keys and indexes already. Their statements lack the mark of CLUSTER
and the statistics targets, which follow here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import anyio
import asyncpg

from subscriber import server_features as features
from subscriber import telemetry
from subscriber.catalog.connection import Connection, translate
from subscriber.connection.connect import connect
from subscriber.connection.settings import NO_TIMEOUTS
from subscriber.errors import StatementError
from subscriber.migration.schema.archive import ArchiveEntry, SchemaArchive, statements_of
from subscriber.migration.schema.code_owners import PG_CLASS, CodeOwners
from subscriber.migration.schema.roles import LeftOut
from subscriber.publisher.own_schema import OWN_SCHEMA
from subscriber.sqlstate import DUPLICATE_OBJECT
from subscriber.targets.postgres.restricted_operation import run_restricted

PG_NAMESPACE = 2615  # OID of the catalog, the same in all versions
ATTEMPTS = 10  # of a statement that ends in a deadlock, or waits too long for a lock
LOCK_TIMEOUT = "30s"
NAME = "subscriber migrate"

# Objects as both servers name them. A catalog that the version lacks is left out.
_IDENTITY = """
SELECT o.classid::bigint, o.objid::bigint, i.type, i.identity
  FROM ROWS FROM (pg_catalog.unnest($1::bigint[]), pg_catalog.unnest($2::bigint[])) o (classid, objid),
       pg_catalog.pg_identify_object(o.classid::oid, o.objid::oid, 0) i
 WHERE i.identity IS NOT NULL
"""
_CATALOGS = (
    "pg_class", "pg_constraint", "pg_trigger", "pg_rewrite", "pg_policy", "pg_publication", "pg_publication_rel",
    "pg_publication_namespace", "pg_event_trigger", "pg_statistic_ext",
)  # fmt: skip
# A database without relations is known by these. An extension may exist on the target before.
_DEFINED = ("pg_namespace", "pg_type", "pg_proc", "pg_operator", "pg_collation", "pg_conversion", "pg_foreign_server")
_OBJECTS = """
SELECT i.type, i.identity FROM pg_catalog.{catalog} o,
       pg_catalog.pg_identify_object('pg_catalog.{catalog}'::pg_catalog.regclass, o.oid, 0) i
 WHERE o.oid >= 16384
"""
# Schema public with the owner that initdb has given to it. The schema of the target keeps its own default owner: only a
# superuser makes the bootstrap superuser an owner.
_DEFAULT_PUBLIC = "SELECT oid::bigint FROM pg_catalog.pg_namespace WHERE nspname = 'public' AND nspowner = 10"
# The entries of indexes and constraints: which table they belong to, whether the apply worker needs them, and whether a
# worker can build them after the copy. It builds no index of a partitioned table, to which those of partitions belong.
_KEYS = """
SELECT 'pg_catalog.pg_class'::pg_catalog.regclass::oid::bigint, i.indexrelid::bigint, c.relkind::text, NULL,
       i.indisprimary OR i.indisreplident, false, pg_catalog.pg_table_size(c.oid)
  FROM pg_catalog.pg_index i JOIN pg_catalog.pg_class c ON c.oid = i.indrelid
UNION ALL
SELECT 'pg_catalog.pg_constraint'::pg_catalog.regclass::oid::bigint, k.oid::bigint, c.relkind::text, k.contype::text,
       k.contype = 'p' OR coalesce(i.indisreplident, false),
       k.contype = 'p' AND c.relkind = 'r' AND NOT c.relispartition AND c.relreplident <> 'i' AND NOT i.indisexclusion,
       pg_catalog.pg_table_size(c.oid)
  FROM pg_catalog.pg_constraint k JOIN pg_catalog.pg_class c ON c.oid = k.conrelid
  LEFT JOIN pg_catalog.pg_index i ON i.indexrelid = k.conindid AND k.contype IN ('p', 'u', 'x')
"""
# Partitions' indexes whose parent is a primary key or the index of a replica identity, as pg_restore lists them: with
# the owner of the parent, or without an owner before 14.
_ATTACHED_KEYS = """
SELECT pg_catalog.concat_ws(' ', 'INDEX ATTACH', n.nspname, c.relname, o.owner)
  FROM pg_catalog.pg_inherits h JOIN pg_catalog.pg_class c ON c.oid = h.inhrelid
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace JOIN pg_catalog.pg_index i ON i.indexrelid = h.inhparent
  JOIN pg_catalog.pg_class p ON p.oid = h.inhparent,
       LATERAL (VALUES (''::text), (pg_catalog.pg_get_userbyid(p.relowner)::text)) o (owner)
 WHERE c.relkind IN ('i', 'I') AND (i.indisprimary OR i.indisreplident)
"""
# Triggers that call functions of schema "subscriber", which is not copied.
_OWN_TRIGGERS = """
SELECT 'pg_catalog.{catalog}'::pg_catalog.regclass::oid::bigint, t.oid::bigint FROM pg_catalog.{catalog} t
  JOIN pg_catalog.pg_proc p ON p.oid = t.{function} JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
 WHERE n.nspname = $1
"""
# What pg_dump writes behind CREATE INDEX. A target of NULL (since 17) or -1 is the default.
_INDEX_MARKS = """
SELECT pg_catalog.format('ALTER TABLE %I.%I CLUSTER ON %I', n.nspname, c.relname, x.relname)
  FROM pg_catalog.pg_index i JOIN pg_catalog.pg_class x ON x.oid = i.indexrelid
  JOIN pg_catalog.pg_class c ON c.oid = i.indrelid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE i.indisclustered AND c.relkind = 'r' AND c.oid >= 16384
UNION ALL
SELECT pg_catalog.format('ALTER INDEX %I.%I ALTER COLUMN %s SET STATISTICS %s', n.nspname, x.relname, a.attnum,
                         a.attstattarget)
  FROM pg_catalog.pg_class x JOIN pg_catalog.pg_namespace n ON n.oid = x.relnamespace
  JOIN pg_catalog.pg_attribute a ON a.attrelid = x.oid AND a.attstattarget >= 0
 WHERE x.relkind IN ('i', 'I') AND x.oid >= 16384 AND n.nspname NOT IN ('pg_toast', 'subscriber')
"""
_TABLESPACES = "SELECT spcname::text FROM pg_catalog.pg_tablespace"
_TABLE, _CONSTRAINT_KINDS, _FOREIGN_KEY = ("r", "p"), ("p", "u", "x"), "f"


@dataclass(frozen=True, slots=True)
class RestoreProgress:
    """Objects that exist on the target, of those that restore_rest() creates."""

    done: int
    total: int
    about: str  # the object that was created last


class Restored(NamedTuple):
    """The result of restore_rest()."""

    done: int  # objects that were created
    left_out: tuple[LeftOut, ...]  # that the role may not create


@dataclass(slots=True)
class _Groups:
    keys: list[ArchiveEntry] = field(default_factory=list)
    deferrable: list[ArchiveEntry] = field(default_factory=list)  # keys that workers can build
    indexes: list[ArchiveEntry] = field(default_factory=list)
    attachments: list[ArchiveEntry] = field(default_factory=list)
    foreign_keys: list[ArchiveEntry] = field(default_factory=list)
    rest: list[ArchiveEntry] = field(default_factory=list)


async def restore_definitions(
    archive: SchemaArchive,
    source: Connection,
    target: Connection,
    *,
    defer_keys: bool = False,
    trusted_owners: Sequence[str] = (),
) -> bool:
    """Create the objects of the section pre-data and the keys, in one transaction.

    If the target has all tables of the archive, keys that it lacks are created. The session of `target` has other
    settings afterwards, such as an empty search_path.

    Args:
        defer_keys: leave out the keys that workers can build, with `copy_indexes = after`.
        trusted_owners: roles whose code may have all rights of the target's session.

    Returns:
        False if nothing was missing.

    Raises:
        StatementError: the target has some of the tables, or a definition runs code of an untrusted role.
        ServerError: a statement failed, and nothing was created.
    """
    relations = [entry for entry in archive.pre_data if entry.catalog == PG_CLASS]
    wanted = set((await _identities(source, relations or archive.pre_data)).values())
    existing = wanted & await _objects(target, ["pg_class"] if relations else _DEFINED)
    if not relations:
        wanted &= await _objects(source, _DEFINED)
    if existing and existing != wanted:
        names = ", ".join(sorted(identity for _, identity in existing)[:5])
        kind = "relations" if relations else "objects"
        raise StatementError(
            f"{len(existing)} of {len(wanted)} {kind} of the source already exist on the target",
            detail=f"Some of these are: {names}.",
            hint="Drop them, or use an empty database. subscriber migrate diff prints the differences.",
            sqlstate=DUPLICATE_OBJECT,
        )
    try:
        async with target.transaction():
            if existing:
                return not defer_keys and await _restore_keys(archive, source, target, trusted_owners)
            owners = CodeOwners(archive.code, trusted_owners)
            await owners.check_definitions(target, {entry.key: entry.about for entry in archive.pre_data})
            await target.execute(await definitions_script(archive, source, target, defer_keys=defer_keys))
    except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError) as error:
        raise translate(error) from error
    return True


async def _restore_keys(
    archive: SchemaArchive, source: Connection, target: Connection, trusted_owners: Sequence[str]
) -> bool:
    """Create keys which an earlier call has deferred, in the target's transaction. Returns False if none is missing."""
    groups = await _grouped(archive, source)
    existing = await _objects(target, ("pg_class", "pg_constraint"))
    missing = await _missing(source, groups.deferrable, existing)
    tablespaces = await _has_tablespaces(source, target)
    owners = CodeOwners(archive.code, trusted_owners)
    for entry in missing:
        await _execute(target, entry, await archive.script([entry], tablespaces=tablespaces), owners)
    return bool(missing)


async def definitions_script(
    archive: SchemaArchive, source: Connection, target: Connection, *, defer_keys: bool = False
) -> str:
    """Return the statements that restore_definitions() executes on a target without these objects."""
    tablespaces = await _has_tablespaces(source, target)
    groups = await _grouped(archive, source)
    # The owner of a table needs CREATE on its schema, unless a superuser makes it the owner. pg_restore grants it last.
    schemas = [entry for entry in archive.pre_data if entry.text.startswith(("SCHEMA ", "ACL - SCHEMA "))]
    others = [entry for entry in archive.pre_data if entry not in schemas and not _is_of_system(entry)]
    has_owner = features.PUBLIC_OWNER.is_in_major(source.get_server_version().major)
    default = None if has_owner else await source.fetchval(_DEFAULT_PUBLIC)
    schemas = [entry for entry in schemas if entry.catalog != PG_NAMESPACE or entry.oid != default]
    keys = groups.keys if defer_keys else groups.keys + groups.deferrable
    parts = [part for part in (schemas, others, keys) if part]
    return "".join([await archive.script(part, tablespaces=tablespaces) for part in parts])


async def restore_rest(
    archive: SchemaArchive,
    source: Connection,
    target: str,
    *,
    jobs: int = 2,
    without: Iterable[str] = (),
    trusted_owners: Sequence[str] = (),
    progress: Callable[[RestoreProgress], Awaitable[None]] | None = None,
) -> Restored:
    """Create the objects that restore_definitions() has left, and those that were added to the source since.

    Args:
        target: the connection string. Its role owns the sessions.
        jobs: the number of sessions that build indexes and foreign keys.
        without: names of publications that are not created.
        trusted_owners: roles whose code may have all rights of the target's sessions.
        progress: called after each object.

    Returns:
        The number of objects that were created, and those that the role may not create.

    Raises:
        ServerError: a statement failed for another reason. Its context names the object. Other objects are kept.
        ConnectionLost: the target was lost. The next call continues.

    Cancellation: the statement in progress is rolled back, and the next call continues.
    """
    missing, tablespaces = await _rest(archive, source, target, without)
    steps = ((missing.keys, 1), (missing.deferrable, jobs), (missing.indexes, jobs), (missing.attachments, 1),
             (missing.foreign_keys, jobs), (missing.rest, 1))  # fmt: skip
    total = sum(len(entries) for entries, _ in steps)
    owners = CodeOwners(archive.code, trusted_owners)
    restorer = _Restorer(archive, target, owners, tablespaces=tablespaces, total=total, progress=progress)
    for entries, sessions in steps:
        await restorer.restore(entries, sessions)
    async with target_session(target) as connection:
        for (statement,) in await source.fetch(_INDEX_MARKS):
            await connection.execute(statement)
    return Restored(restorer.done, tuple(restorer.left_out))


async def rest_script(
    archive: SchemaArchive, source: Connection, target: str, *, without: Iterable[str] = ()
) -> list[str]:
    """Return the statements that restore_rest() would execute now, one text for each group of objects."""
    missing, tablespaces = await _rest(archive, source, target, without)
    groups = (missing.deferrable, missing.indexes, missing.attachments, missing.foreign_keys, missing.rest)
    return [statements_of(await archive.script(group, tablespaces=tablespaces)) for group in groups if group]


async def _rest(
    archive: SchemaArchive, source: Connection, target: str, without: Iterable[str]
) -> tuple[_Groups, bool]:
    """Return the entries that restore_rest() executes, and whether the target has the tablespaces of the source."""
    async with target_session(target) as connection:
        existing = await _objects(connection, _CATALOGS)
        tablespaces = await _has_tablespaces(source, connection)
    groups = await _grouped(archive, source, without=frozenset(without))
    missing = _Groups(
        await _missing(source, groups.keys, existing),
        await _missing(source, groups.deferrable, existing),
        await _missing(source, groups.indexes, existing),
        groups.attachments,
        await _missing(source, groups.foreign_keys, existing),
        await _missing(source, groups.rest, existing),
    )
    return missing, tablespaces


@asynccontextmanager
async def target_session(target: str) -> AsyncIterator[Connection]:
    """Open a session of the target for statements that take long and may wait for locks."""
    settings = {**NO_TIMEOUTS, "lock_timeout": LOCK_TIMEOUT}
    connection = await connect(target, application_name=NAME, settings=settings)
    try:
        yield connection
    finally:
        connection.terminate()


class _Restorer:
    def __init__(
        self,
        archive: SchemaArchive,
        target: str,
        owners: CodeOwners,
        *,
        tablespaces: bool,
        total: int,
        progress: Callable[[RestoreProgress], Awaitable[None]] | None,
    ) -> None:
        self._archive = archive
        self._target = target
        self._owners = owners
        self._tablespaces = tablespaces
        self._total = total
        self._progress = progress
        self.done = 0
        self.left_out: list[LeftOut] = []

    async def restore(self, entries: Sequence[ArchiveEntry], sessions: int) -> None:
        """Execute the entries in their order, several at a time."""
        waiting = iter(entries)
        try:
            async with anyio.create_task_group() as group:
                for _ in range(min(sessions, len(entries))):
                    group.start_soon(self._work, waiting)
        except* (asyncpg.PostgresError, asyncpg.InterfaceError, OSError) as errors:
            failure: BaseException = errors
            while isinstance(failure, BaseExceptionGroup):
                failure = failure.exceptions[0]
            error = translate(failure)
            error.context.extend(getattr(failure, "__notes__", []))
            raise error from failure

    async def _work(self, waiting: Iterable[ArchiveEntry]) -> None:
        async with target_session(self._target) as connection:
            for entry in waiting:
                script = await self._archive.script([entry], tablespaces=self._tablespaces)
                try:
                    await _execute(connection, entry, script, self._owners)
                except (asyncpg.InsufficientPrivilegeError, asyncpg.UndefinedObjectError, StatementError) as error:
                    # Privileges of a role that the target could not create.
                    if isinstance(error, asyncpg.UndefinedObjectError) and not entry.text.startswith("ACL "):
                        raise
                    reason = error.message if isinstance(error, asyncpg.PostgresError) else str(error)
                    self.left_out.append(LeftOut("definition", entry.about, reason, statements_of(script)))
                    continue
                self.done += 1
                if self._progress is not None:
                    await self._progress(RestoreProgress(self.done, self._total, entry.about))


async def _execute(connection: Connection, entry: ArchiveEntry, script: str, owners: CodeOwners) -> None:
    for attempt in range(1, ATTEMPTS + 1):
        try:
            async with connection.transaction():
                await _run(connection, await owners.role(connection, entry.key, entry.about), script)
        except (asyncpg.DeadlockDetectedError, asyncpg.LockNotAvailableError) as error:
            if attempt == ATTEMPTS:
                error.add_note(f"creation of {entry.about}")
                raise
            telemetry.log(
                telemetry.LOG,
                f"creation of {entry.about} is repeated: {error}, attempt {attempt} of {ATTEMPTS}",
                event="migrate.lock_wait",
            )
            await anyio.sleep(attempt * 0.1)
        except asyncpg.PostgresError as error:
            error.add_note(f"creation of {entry.about}")
            raise
        else:
            return


async def _run(connection: Connection, role: str | None, script: str) -> None:
    """Execute statements as a role. None: the session's own role."""
    if role is None:
        await connection.execute(script)
    else:
        await run_restricted(connection, role, script)


# --- groups ---------------------------------------------------------------------------------------


async def _grouped(archive: SchemaArchive, source: Connection, *, without: frozenset[str] = frozenset()) -> _Groups:
    details = {(row[0], row[1]): tuple(row)[2:] for row in await source.fetch(_KEYS)}
    attached_keys = {text.replace("\n", " ").replace("\r", " ") for (text,) in await source.fetch(_ATTACHED_KEYS)}
    skipped = set()
    for catalog, function in (("pg_trigger", "tgfoid"), ("pg_event_trigger", "evtfoid")):
        extension_objects = await source.fetch(_OWN_TRIGGERS.format(catalog=catalog, function=function), OWN_SCHEMA)
        skipped |= {tuple(row) for row in extension_objects}
    skipped |= {tuple(row) for row in await source.fetch(_PUBLICATIONS, list(without))}
    groups, sizes = _Groups(rest=[entry for entry in archive.pre_data if _is_of_system(entry)]), {}
    for entry in archive.post_data:
        key = entry.catalog, entry.oid
        if key in skipped:
            continue
        relkind, contype, is_key, is_deferrable, size = details.get(key, (None, None, False, False, 0))
        sizes[entry] = size
        is_index = relkind in _TABLE and (contype is None or contype in _CONSTRAINT_KINDS)
        if entry.text.startswith("INDEX ATTACH "):
            (groups.keys if entry.text in attached_keys else groups.attachments).append(entry)
        elif is_index:
            keys = groups.deferrable if is_deferrable else groups.keys
            (keys if is_key else groups.indexes).append(entry)
        elif contype == _FOREIGN_KEY:
            groups.foreign_keys.append(entry)
        else:
            groups.rest.append(entry)
    for entries in (groups.deferrable, groups.indexes, groups.foreign_keys):
        entries.sort(key=lambda entry: -sizes[entry])
    return groups


def _is_of_system(entry: ArchiveEntry) -> bool:
    """Return True for privileges on an object of pg_catalog, which no definition needs and only superusers give."""
    return entry.text.startswith("ACL pg_catalog ")


_PUBLICATIONS = """
SELECT 'pg_catalog.pg_publication'::pg_catalog.regclass::oid::bigint, oid::bigint
  FROM pg_catalog.pg_publication WHERE pubname = ANY ($1::text[])
UNION ALL
SELECT 'pg_catalog.pg_publication_rel'::pg_catalog.regclass::oid::bigint, r.oid::bigint
  FROM pg_catalog.pg_publication_rel r JOIN pg_catalog.pg_publication p ON p.oid = r.prpubid
 WHERE p.pubname = ANY ($1::text[])
"""


async def _missing(
    source: Connection, entries: Sequence[ArchiveEntry], existing: set[tuple[str, str]]
) -> list[ArchiveEntry]:
    """Return the entries whose object the target lacks, and those about no object of their own."""
    identities = await _identities(source, entries)
    return [entry for entry in entries if not _exists(identities.get((entry.catalog, entry.oid)), existing)]


def _exists(identity: tuple[str, str] | None, existing: set[tuple[str, str]]) -> bool:
    # The rule _RETURN of a view exists with the view. pg_dump replaces the view of a circular dependency by it.
    return identity is not None and identity in existing and not identity[1].startswith('"_RETURN" on ')


async def _identities(source: Connection, entries: Sequence[ArchiveEntry]) -> dict[tuple[int, int], tuple[str, str]]:
    chosen = [entry for entry in entries if entry.catalog]
    rows = await source.fetch(_IDENTITY, [entry.catalog for entry in chosen], [entry.oid for entry in chosen])
    return {(row[0], row[1]): (row[2], row[3]) for row in rows}


async def _objects(target: Connection, catalogs: Iterable[str]) -> set[tuple[str, str]]:
    """Return type and identity of each object in these catalogs of the target."""
    there = {
        name
        for (name,) in await target.fetch(
            "SELECT relname::text FROM pg_catalog.pg_class WHERE relnamespace = 'pg_catalog'::pg_catalog.regnamespace"
        )
    }
    names: set[tuple[str, str]] = set()
    for catalog in catalogs:
        if catalog in there:
            names |= {(row[0], row[1]) for row in await target.fetch(_OBJECTS.format(catalog=catalog))}
    return names


async def _has_tablespaces(source: Connection, target: Connection) -> bool:
    """Return True if the target has a tablespace of each name of the source."""
    wanted = {name for (name,) in await source.fetch(_TABLESPACES)}
    return wanted <= {name for (name,) in await target.fetch(_TABLESPACES)}
