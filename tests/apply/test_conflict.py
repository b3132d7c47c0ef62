"""Conflicts in the words of PostgreSQL 18."""

from __future__ import annotations

from subscriber.apply.conflict import ConflictType, missing
from subscriber.apply.relation_map import Partition, map_relation
from subscriber.protocol.messages import Delete, OldPart, ReplicaIdentity, Update
from tests.apply.build import UNSENT, column, local, remote, row

KEYED = map_relation(remote("a*", "b"), local("b", "x", "a", identity=("a",)))
FULL = map_relation(remote("a", "b", replica_identity=ReplicaIdentity.FULL), local("b", "x", "a"))


def test_the_types_are_those_of_pg_stat_subscription_stats() -> None:
    assert {type.value for type in ConflictType} == {
        "insert_exists",
        "update_origin_differs",
        "update_exists",
        "update_missing",
        "delete_origin_differs",
        "delete_missing",
        "multiple_unique_conflicts",
    }


def test_a_missing_row_of_an_update() -> None:
    found = missing(KEYED, Update(None, 1, None, None, row("1", "y")))
    assert found.type is ConflictType.UPDATE_MISSING
    assert found.message == 'conflict detected on relation "s.t": conflict=update_missing'
    assert found.detail == "Could not find the row to be updated."
    # All columns of the target's table in its order; what was not sent is null.
    assert found.rows[0] == "Remote row (y, null, 1); replica identity (a)=(1)."


def test_a_changed_key_is_looked_for_by_the_old_one() -> None:
    found = missing(KEYED, Update(None, 1, OldPart.KEY, row("1", None), row("2", "y")))
    assert found.rows[0] == "Remote row (y, null, 2); replica identity (a)=(1)."


def test_a_missing_row_of_a_delete() -> None:
    found = missing(KEYED, Delete(None, 1, OldPart.KEY, row("1", None)))
    assert found.type is ConflictType.DELETE_MISSING
    assert found.message == 'conflict detected on relation "s.t": conflict=delete_missing'
    assert found.detail == "Could not find the row to be deleted."
    assert found.rows[0] == "Replica identity (a)=(1)."


def test_whole_rows() -> None:
    found = missing(FULL, Delete(None, 1, OldPart.ROW, row("1", None)))
    assert found.rows[0] == "Replica identity full (null, null, 1)."
    found = missing(FULL, Update(None, 1, OldPart.ROW, row("1", "x"), row("1", UNSENT)))
    assert found.rows[0] == "Remote row (null, null, 1); replica identity full (x, null, 1)."


def test_several_key_columns_and_a_name_that_needs_quotes() -> None:
    mapping = map_relation(remote("a*", 'B "x"*'), local("a", 'B "x"', identity=('B "x"', "a")))
    found = missing(mapping, Delete(None, 1, OldPart.KEY, row("1", "2")))
    assert found.rows[0] == 'Replica identity ("B ""x""", a)=(2, 1).'


def test_a_partition_is_named_itself_and_its_columns_are_in_its_own_order() -> None:
    leaf = Partition("s.t_2024", "", ("a", "b", "x"))
    found = missing(KEYED, Update(None, 1, None, None, row("1", "y")), leaf)
    assert found.message == 'conflict detected on relation "s.t_2024": conflict=update_missing'
    assert found.rows[0] == "Remote row (1, y, null); replica identity (a)=(1)."


def test_values_of_rows_are_cut_at_64_bytes_and_those_of_keys_are_not() -> None:
    long = "é" * 50  # 100 bytes
    found = missing(KEYED, Update(None, 1, None, None, row(long, "y" * 64)))
    assert found.rows[0] == f"Remote row ({'y' * 64}, null, {'é' * 32}...); replica identity (a)=({long})."
    found = missing(KEYED, Update(None, 1, None, None, row("1", "x" + long)))
    assert found.rows[0] == f"Remote row (x{'é' * 31}..., null, 1); replica identity (a)=(1)."


def test_binary_values_are_shown_as_bytes() -> None:
    found = missing(KEYED, Update(None, 1, None, None, row(b"\x00\x01", b"\xff" * 65)))
    assert found.rows[0] == f"Remote row (\\x{'ff' * 64}..., null, \\x0001); replica identity (a)=(\\x0001)."


def test_a_generated_column_is_null() -> None:
    mapping = map_relation(remote("a*"), local("a", column("g", generated=True), identity=("a",)))
    found = missing(mapping, Update(None, 1, None, None, row("1")))
    assert found.rows[0] == "Remote row (1, null); replica identity (a)=(1)."
