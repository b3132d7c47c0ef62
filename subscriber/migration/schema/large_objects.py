"""Large objects, which logical replication does not publish.

copy_large_objects() makes the large objects of the target equal to the source's: content, owner, privileges and
comment. It compares checksums, so a second call copies only the objects that have changed. Call it once while the
source is in use, and once more when the source accepts no writes. Only the second result is exact.

Both sides read all objects for the checksums. Each changed object is replaced in a transaction of its own, so a killed
process leaves each object either old or new.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from subscriber.catalog.connection import Connection
from subscriber.catalog.own_large_objects import IS_OWN
from subscriber.quoting import identifier, literal

# Each large object of schema "subscriber" belongs to one server. A move neither copies nor removes them.
IS_OF_USERS = f"NOT {IS_OWN}"
PIECE = 1024 * 1024  # bytes that a server sends at a time

# The checksum of an object is one of the checksums of its pieces, so that no server needs memory for a whole object.
_OBJECTS = f"""
SELECT m.oid, pg_catalog.pg_get_userbyid(m.lomowner)::text, pg_catalog.obj_description(m.oid, 'pg_largeobject'),
       (SELECT pg_catalog.array_agg(pg_catalog.concat_ws(' ', a.privilege_type, a.is_grantable,
                 CASE a.grantee WHEN 0 THEN '' ELSE pg_catalog.pg_get_userbyid(a.grantee)::text END) ORDER BY 1)
          FROM pg_catalog.aclexplode(m.lomacl) a WHERE a.grantee <> m.lomowner),
       l.size,
       (SELECT pg_catalog.md5(coalesce(pg_catalog.string_agg(
                 pg_catalog.md5(pg_catalog.lo_get(m.oid, piece, {PIECE})), '' ORDER BY piece), ''))
          FROM pg_catalog.generate_series(0, l.size - 1, {PIECE}) piece)
  FROM pg_catalog.pg_largeobject_metadata m,
       LATERAL (SELECT pg_catalog.lo_lseek64(pg_catalog.lo_open(m.oid, 262144), 0, 2) AS size) l
 WHERE {IS_OF_USERS}
 ORDER BY m.oid
"""


@dataclass(frozen=True, slots=True)
class LargeObjectsCopied:
    """The result of one call. All counts but `total` are 0 if the target was equal."""

    total: int  # on the source
    copied: int  # new or different content
    removed: int  # only on the target before
    bytes: int  # copied


async def count_large_objects(connection: Connection) -> int:
    """Return the number of large objects of a database, without those of schema "subscriber"."""
    query = f"SELECT count(*) FROM pg_catalog.pg_largeobject_metadata m WHERE {IS_OF_USERS}"
    return int(await connection.fetchval(query))


async def copy_large_objects(source: Connection, target: Connection) -> LargeObjectsCopied:
    """Make the large objects of the target equal to the source's. Others of the target are removed.

    Raises:
        asyncpg.InsufficientPrivilegeError: a role may not read or create an object.
    """
    async with source.transaction(isolation="repeatable_read", readonly=True):
        wanted = await _read(source)
        async with target.transaction(readonly=True):
            existing = await _read(target)
        copied = size = 0
        for oid, there in wanted.items():
            here = existing.get(oid)
            if here is None or here[-2:] != there[-2:]:
                await _copy(source, target, oid, there)
                copied, size = copied + 1, size + there[-2]
            elif here != there:
                async with target.transaction():
                    await _describe(target, oid, there)
    removed = existing.keys() - wanted.keys()
    for oid in removed:
        await target.execute(f"SELECT pg_catalog.lo_unlink({oid})")
    return LargeObjectsCopied(len(wanted), copied, len(removed), size)


async def _read(connection: Connection) -> dict[int, tuple[Any, ...]]:
    return {row[0]: tuple(row)[1:] for row in await connection.fetch(_OBJECTS)}


async def _copy(source: Connection, target: Connection, oid: int, there: tuple[Any, ...]) -> None:
    async with target.transaction():
        await target.execute(
            f"SELECT pg_catalog.lo_unlink(oid) FROM pg_catalog.pg_largeobject_metadata WHERE oid = {oid}"
        )
        await target.execute(f"SELECT pg_catalog.lo_create({oid})")
        for start in range(0, there[-2], PIECE):
            piece = await source.fetchval("SELECT pg_catalog.lo_get($1::oid, $2::bigint, $3::int)", oid, start, PIECE)
            await target.execute("SELECT pg_catalog.lo_put($1::oid, $2::bigint, $3::bytea)", oid, start, piece)
        await _describe(target, oid, there)


async def _describe(target: Connection, oid: int, there: tuple[Any, ...]) -> None:
    """Set owner, comment and privileges of an object."""
    owner, comment, privileges, *_ = there
    name = f"LARGE OBJECT {oid}"
    await target.execute(f"REVOKE ALL ON {name} FROM PUBLIC")
    for grantee in await target.fetch(
        "SELECT DISTINCT pg_catalog.pg_get_userbyid(a.grantee)::text FROM pg_catalog.pg_largeobject_metadata m,"
        " pg_catalog.aclexplode(m.lomacl) a WHERE m.oid = $1 AND a.grantee NOT IN (0, m.lomowner)",
        oid,
    ):
        await target.execute(f"REVOKE ALL ON {name} FROM {identifier(grantee[0])}")
    await target.execute(f"ALTER {name} OWNER TO {identifier(owner)}")
    await target.execute(f"COMMENT ON {name} IS {'NULL' if comment is None else literal(comment)}")
    for privilege, grantable, role in (text.split(" ", 2) for text in privileges or ()):
        to = identifier(role) if role else "PUBLIC"
        await target.execute(f"GRANT {privilege} ON {name} TO {to}{' WITH GRANT OPTION' if grantable == 't' else ''}")
