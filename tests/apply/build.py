"""Helpers that build relations, columns and rows for tests."""

from __future__ import annotations

from subscriber.apply.relation_map import LocalColumn, LocalRelation
from subscriber.protocol.messages import Relation, RelationColumn, ReplicaIdentity
from subscriber.protocol.tuple_data import TupleData

EQUAL = "OPERATOR(pg_catalog.=)"


def column(
    name: str,
    type_name: str = "integer",
    *,
    equality: str | None = EQUAL,
    search_cast: str | None = None,
    generated: bool = False,
    identity_always: bool = False,
    base_type: str | None = None,
) -> LocalColumn:
    return LocalColumn(
        name=name,
        type_name=type_name,
        search_cast=search_cast,
        equality=equality,
        generated=generated,
        identity_always=identity_always,
        base_type=base_type,
    )


def local(
    *columns: LocalColumn | str,
    identity: tuple[str, ...] = (),
    name: str = "t",
    schema: str = "s",
    partitioned: bool = False,
) -> LocalRelation:
    """Return a table of the target. A column given by its name is an integer."""
    return LocalRelation(
        oid=4711,
        schema=schema,
        name=name,
        partitioned=partitioned,
        owner="o",
        columns=tuple(column(c) if isinstance(c, str) else c for c in columns),
        identity=identity,
        shape="",
    )


def remote(
    *columns: str,
    replica_identity: ReplicaIdentity = ReplicaIdentity.DEFAULT,
    relid: int = 16384,
    namespace: str = "s",
    name: str = "t",
) -> Relation:
    """Return a published table. A name with a star is part of its key, and so is every column of a FULL one."""
    full = replica_identity is ReplicaIdentity.FULL
    described = tuple(RelationColumn(full or c.endswith("*"), c.rstrip("*"), 23, -1) for c in columns)
    return Relation(None, relid, namespace, name, replica_identity, described)


UNSENT = object()  # an unchanged TOAST value


def row(*values: str | bytes | object | None) -> TupleData:
    """Text values; None is NULL, bytes are binary, UNSENT was not sent."""
    status, given = bytearray(), list[bytes | None]()
    for value in values:
        if isinstance(value, str):
            status += b"t"
            given.append(value.encode())
        elif isinstance(value, bytes):
            status += b"b"
            given.append(value)
        else:
            status += b"u" if value is UNSENT else b"n"
            given.append(None)
    return TupleData.join(bytes(status), given)
