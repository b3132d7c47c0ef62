"""The claims of changes: values that the target considers equal are equal, in text and in binary."""

from __future__ import annotations

import struct

import pytest

from subscriber.apply.held_rows import Claims, HeldRows
from subscriber.catalog.store.row_dependencies import ColumnType, ForeignKey, RowDependencies, UniqueColumns
from subscriber.lsn import Lsn
from subscriber.protocol.messages import Delete, Insert, OldPart, Relation, RelationColumn, ReplicaIdentity, Update
from subscriber.protocol.tuple_data import BINARY, NULL, TEXT, TupleData
from subscriber.targets.base import map_same_columns
from subscriber.worker.apply.quarantine_claims import ClaimedTable, claimed_table

PARENT, CHILD = 1, 2
LINK = ForeignKey(CHILD, PARENT, ("parent",), ("id",))


def table(
    root: int, columns: dict[str, int], *uniques: tuple[str, ...], links: tuple[ForeignKey, ...] = ()
) -> ClaimedTable:
    """A table whose first column is the key."""
    described = tuple(RelationColumn(at == 0, name, oid, -1) for at, (name, oid) in enumerate(columns.items()))
    relation = Relation(None, root, "public", f"t{root}", ReplicaIdentity.DEFAULT, described)
    types = {name: ColumnType(oid, -1, "b", is_deterministic=True) for name, oid in columns.items()}
    dependencies = RowDependencies(
        root, f"public.t{root}", tuple(UniqueColumns(unique, nulls_are_equal=False) for unique in uniques), links, types
    )
    return claimed_table(relation, map_same_columns(relation).local, (0,), dependencies)


def row(*values: bytes | None, kind: int = TEXT) -> TupleData:
    return TupleData.join(bytes(NULL if value is None else kind for value in values), values)


def claims(of: ClaimedTable, change: Insert | Update | Delete) -> Claims:
    claimed = Claims()
    of.change(claimed, change)
    return claimed


def meets(held: Claims, later: Claims) -> bool:
    rows = HeldRows()
    rows.add(Lsn(1), held)
    met = rows.find(later) == {Lsn(1)}
    rows.remove(Lsn(1))
    assert not rows.find(later)
    assert rows.size == 0
    return met


@pytest.mark.parametrize(
    ("oid", "one", "other"),
    [
        (1700, (b"1.0", TEXT), (b"1.00", TEXT)),
        (1700, (b"-0.50", TEXT), (struct.pack(">HhHHH", 1, -1, 0x4000, 1, 5000), BINARY)),
        (701, (b"-0", TEXT), (b"0", TEXT)),
        (701, (b"NaN", TEXT), (struct.pack(">d", float("nan")), BINARY)),
        (23, (b"-7", TEXT), (struct.pack(">i", -7), BINARY)),
        (1042, (b"a  ", TEXT), (b"a", TEXT)),
        (1184, (b"2026-01-01 12:00:00+00", TEXT), (b"2026-01-01 13:00:00+01", TEXT)),
    ],
)
def test_values_that_the_target_considers_equal_have_one_claim(
    oid: int, one: tuple[bytes, int], other: tuple[bytes, int]
) -> None:
    described = table(PARENT, {"id": oid})
    first, second = (claims(described, Insert(None, PARENT, row(value, kind=kind))) for value, kind in (one, other))
    assert not described.is_whole
    assert first.rows == second.rows
    assert meets(first, second)


@pytest.mark.parametrize("oid", [1186, 3802, 869, 16400])
def test_a_key_of_another_type_claims_the_table(oid: int) -> None:
    described = table(PARENT, {"id": oid})
    assert described.is_whole
    assert meets(*(claims(described, Insert(None, PARENT, row(value))) for value in (b"1", b"2")))


def test_unique_values_and_nulls() -> None:
    described = table(PARENT, {"id": 23, "code": 25}, ("code",))
    held = claims(described, Insert(None, PARENT, row(b"1", b"x")))
    assert meets(held, claims(described, Update(None, PARENT, None, None, row(b"2", b"x"))))
    assert not meets(held, claims(described, Insert(None, PARENT, row(b"2", b"y"))))
    no_code = claims(described, Insert(None, PARENT, row(b"3", None)))
    assert not meets(no_code, claims(described, Insert(None, PARENT, row(b"4", None))))
    moved = claims(described, Update(None, PARENT, OldPart.KEY, row(b"1", None), row(b"5", b"z")))
    assert meets(held, moved)
    assert meets(moved, claims(described, Delete(None, PARENT, OldPart.KEY, row(b"5", None))))


def test_foreign_keys_claim_the_rows_that_they_reference() -> None:
    parent = table(PARENT, {"id": 23, "v": 25}, links=(LINK,))
    child = table(CHILD, {"id": 23, "parent": 20}, links=(LINK,))
    new_parent = claims(parent, Insert(None, PARENT, row(b"1", b"")))
    new_child = claims(child, Insert(None, CHILD, row(struct.pack(">i", 1), struct.pack(">q", 1), kind=BINARY)))
    other_child = claims(child, Insert(None, CHILD, row(b"2", b"1")))
    gone_parent = claims(parent, Delete(None, PARENT, OldPart.KEY, row(b"1", None)))
    gone_child = claims(child, Delete(None, CHILD, OldPart.KEY, row(b"1", None)))
    changed_parent = claims(parent, Update(None, PARENT, None, None, row(b"1", b"new")))
    assert meets(new_parent, other_child)
    assert meets(other_child, gone_parent)
    assert meets(new_parent, new_child)
    assert not meets(other_child, new_child)
    assert not meets(changed_parent, other_child)
    assert not meets(other_child, changed_parent)
    # The reference that a DELETE ends is not in the stream.
    assert meets(gone_child, gone_parent)
    assert not meets(gone_child, other_child)
