"""Conflict messages in PostgreSQL 18's words."""

from __future__ import annotations

import pytest

from subscriber.apply.conflicts.types import ConflictType, LocalRow, RowWriter, differs, is_ours, missing, unique
from subscriber.apply.relation_map import Partition, map_relation
from subscriber.lsn import Lsn
from subscriber.protocol.messages import Delete, Insert, OldPart, ReplicaIdentity, Update
from subscriber.server_version import Wording
from tests.apply.build import UNSENT, column, local, remote, row

WORDS = Wording.POSTGRESQL_18
KEYED = map_relation(remote("a*", "b"), local("b", "x", "a", identity=("a",)))
FULL = map_relation(remote("a", "b", replica_identity=ReplicaIdentity.FULL), local("b", "x", "a"))


def test_the_types_are_those_of_pg_stat_subscription_stats() -> None:
    assert {type.value for type in ConflictType} == {
        "insert_exists",
        "update_origin_differs",
        "update_exists",
        "update_deleted",
        "update_missing",
        "delete_origin_differs",
        "delete_missing",
        "multiple_unique_conflicts",
    }


def test_a_missing_row_of_an_update() -> None:
    conflict = missing(KEYED, Update(None, 1, None, None, row("1", "y")), WORDS)
    assert conflict.type is ConflictType.UPDATE_MISSING
    assert conflict.message == 'conflict detected on relation "s.t": conflict=update_missing'
    assert conflict.detail == "Could not find the row to be updated."
    # All columns of the target's table in its order. Unsent values are null.
    assert conflict.rows[0] == "Remote row (y, null, 1); replica identity (a)=(1)."


def test_the_message_about_a_changed_key_has_the_old_key() -> None:
    conflict = missing(KEYED, Update(None, 1, OldPart.KEY, row("1", None), row("2", "y")), WORDS)
    assert conflict.rows[0] == "Remote row (y, null, 2); replica identity (a)=(1)."


def test_a_missing_row_of_a_delete() -> None:
    conflict = missing(KEYED, Delete(None, 1, OldPart.KEY, row("1", None)), WORDS)
    assert conflict.type is ConflictType.DELETE_MISSING
    assert conflict.message == 'conflict detected on relation "s.t": conflict=delete_missing'
    assert conflict.detail == "Could not find the row to be deleted."
    assert conflict.rows[0] == "Replica identity (a)=(1)."


def test_a_message_about_a_missing_row_has_the_whole_row_under_replica_identity_full() -> None:
    conflict = missing(FULL, Delete(None, 1, OldPart.ROW, row("1", None)), WORDS)
    assert conflict.rows[0] == "Replica identity full (null, null, 1)."
    conflict = missing(FULL, Update(None, 1, OldPart.ROW, row("1", "x"), row("1", UNSENT)), WORDS)
    assert conflict.rows[0] == "Remote row (null, null, 1); replica identity full (x, null, 1)."


def test_several_key_columns_and_a_name_that_needs_quotes() -> None:
    mapping = map_relation(remote("a*", 'B "x"*'), local("a", 'B "x"', identity=('B "x"', "a")))
    conflict = missing(mapping, Delete(None, 1, OldPart.KEY, row("1", "2")), WORDS)
    assert conflict.rows[0] == 'Replica identity ("B ""x""", a)=(2, 1).'


def test_a_partition_is_named_itself_and_its_columns_are_in_its_own_order() -> None:
    leaf = Partition("s.t_2024", "", ("a", "b", "x"))
    conflict = missing(KEYED, Update(None, 1, None, None, row("1", "y")), WORDS, leaf)
    assert conflict.message == 'conflict detected on relation "s.t_2024": conflict=update_missing'
    assert conflict.rows[0] == "Remote row (1, y, null); replica identity (a)=(1)."


def test_values_of_rows_are_cut_at_64_bytes_and_those_of_keys_are_not() -> None:
    long = "é" * 50  # 100 bytes
    conflict = missing(KEYED, Update(None, 1, None, None, row(long, "y" * 64)), WORDS)
    assert conflict.rows[0] == f"Remote row ({'y' * 64}, null, {'é' * 32}...); replica identity (a)=({long})."
    conflict = missing(KEYED, Update(None, 1, None, None, row("1", "x" + long)), WORDS)
    assert conflict.rows[0] == f"Remote row (x{'é' * 31}..., null, 1); replica identity (a)=(1)."


def test_binary_values_are_shown_as_bytes() -> None:
    conflict = missing(KEYED, Update(None, 1, None, None, row(b"\x00\x01", b"\xff" * 65)), WORDS)
    assert conflict.rows[0] == f"Remote row (\\x{'ff' * 64}..., null, \\x0001); replica identity (a)=(\\x0001)."


def test_a_generated_column_is_null() -> None:
    mapping = map_relation(remote("a*"), local("a", column("g", generated=True), identity=("a",)))
    conflict = missing(mapping, Update(None, 1, None, None, row("1")), WORDS)
    assert conflict.rows[0] == "Remote row (1, null); replica identity (a)=(1)."


# --- unique violations, rows written by another origin ---------------------------------------------

AT = "2024-05-01 12:00:00.5+00"
LOCAL = RowWriter("750", AT, False, None)


@pytest.mark.parametrize(
    ("writer", "words"),
    [
        (LOCAL, f"modified locally in transaction 750 at {AT}."),
        (RowWriter("750", AT, True, "pg_1"), f'modified by origin "pg_1" in transaction 750 at {AT}.'),
        (RowWriter("750", AT, True, None), f"modified by a non-existent origin in transaction 750 at {AT}."),
        (RowWriter("750", None, False, None), "modified in transaction 750."),
    ],
)
def test_a_unique_violation_names_the_index_and_the_existing_row(writer: RowWriter, words: str) -> None:
    row_there = LocalRow("t_pkey", ("a",), writer, {"b": None, "x": "5", "a": "1"})
    conflict = unique(KEYED, Insert(None, 1, row("1", "y")), "s.t", ("b", "x", "a"), [row_there], WORDS)
    assert conflict.type is ConflictType.INSERT_EXISTS
    assert conflict.message == 'conflict detected on relation "s.t": conflict=insert_exists'
    assert conflict.detail == f'Key already exists in unique index "t_pkey", {words}'
    assert conflict.exact_detail == (
        f"{conflict.detail}\nKey (a)=(1); existing local row (null, 5, 1); remote row (y, null, 1)."
    )


def test_a_unique_violation_of_several_indexes_names_all_existing_rows() -> None:
    there = [
        LocalRow("t_pkey", ("a",), LOCAL, {"b": "x" * 70, "x": None, "a": "2"}),
        LocalRow("t_b_X", ("b", "X"), LOCAL, {"b": "y" * 70, "X": "6", "a": "3"}),
    ]
    update = Update(None, 1, OldPart.KEY, row("1", None), row("2", "y" * 70))
    one = unique(KEYED, update, "s.t_1", ("a", "b"), there[:1], WORDS)
    assert one.type is ConflictType.UPDATE_EXISTS
    assert one.rows == (
        f"Key (a)=(2); existing local row ({'x' * 64}..., null, 2); remote row (2, {'y' * 64}...);"
        " replica identity (a)=(1).",
    )
    both = unique(KEYED, update, "s.t_1", ("a", "b"), there, WORDS)
    assert both.type is ConflictType.MULTIPLE_UNIQUE_CONFLICTS
    assert both.message == 'conflict detected on relation "s.t_1": conflict=multiple_unique_conflicts'
    assert both.rows[1].startswith(
        f'Key (b, "X")=({"y" * 70}, 6); existing local row ({"y" * 64}..., 6, 3); remote row'
    )
    assert both.exact_detail.count("\n") == 3


@pytest.mark.parametrize(
    ("writer", "words"),
    [
        (LOCAL, f"modified locally in transaction 750 at {AT}."),
        (RowWriter("750", AT, True, "pg_1"), f'modified by a different origin "pg_1" in transaction 750 at {AT}.'),
        (RowWriter("750", AT, True, None), f"modified by a non-existent origin in transaction 750 at {AT}."),
    ],
)
def test_a_row_that_somebody_else_wrote(writer: RowWriter, words: str) -> None:
    conflict = differs(KEYED, Update(None, 1, None, None, row("1", UNSENT)), writer, ["old", None, "1"], WORDS)
    assert conflict.type is ConflictType.UPDATE_ORIGIN_DIFFERS
    assert conflict.exact_detail == (
        f"Updating the row that was {words}\n"
        "Existing local row (old, null, 1); remote row (null, null, 1); replica identity (a)=(1)."
    )
    conflict = differs(KEYED, Delete(None, 1, OldPart.KEY, row("1", None)), writer, ["old", None, "1"], WORDS)
    assert conflict.type is ConflictType.DELETE_ORIGIN_DIFFERS
    assert conflict.exact_detail == (
        f"Deleting the row that was {words}\nExisting local row (old, null, 1); replica identity (a)=(1)."
    )


def test_a_row_of_another_origin_is_shown_in_the_column_order_of_its_partition() -> None:
    leaf = Partition("s.t_2024", "", ("a", "b", "x"))
    change = Delete(None, 1, OldPart.KEY, row("1", None))
    conflict = differs(KEYED, change, LOCAL, ["old", None, "1"], WORDS, leaf)
    assert conflict.message == 'conflict detected on relation "s.t_2024": conflict=delete_origin_differs'
    assert conflict.rows == ("Existing local row (1, old, null); replica identity (a)=(1).",)


def test_a_table_that_has_just_got_a_column() -> None:
    """Only the check that follows finds that out: nothing may fail before."""
    change = Delete(None, 1, OldPart.KEY, row("1", None))
    assert (
        differs(KEYED, change, LOCAL, ["old", None, "1", "new column"], WORDS)
        .rows[0]
        .startswith("Existing local row (old,")
    )


def test_a_value_that_is_no_utf8() -> None:
    """A server with encoding SQL_ASCII sends unchecked bytes."""
    change = Delete(None, 1, OldPart.KEY, row("1", None))
    conflict = differs(KEYED, change, LOCAL, ["caf\udce9", None, "1"], WORDS)
    assert conflict.rows[0].startswith("Existing local row (caf\\xe9, null, 1)")


@pytest.mark.parametrize(
    ("origin", "ours", "expected"),
    [
        ("pg_3500000000", "pg_3500000000", True),
        ("pg_3500000000_1", "pg_3500000000", True),  # a parallel worker
        ("pg_3500000000", "pg_3500000000_2", True),
        ("pg_3500000000_2", "pg_3500000000_1", True),
        ("pg_3500000000_16384", "pg_3500000000", False),  # the origin with which a table was copied
        ("pg_3500000000_16384", "pg_3500000000_16384", True),
        ("pg_3500000001", "pg_3500000000", False),
        ("pg_3500000001_1", "pg_3500000000_1", False),
        ("other", "pg_3500000000", False),
        (None, "pg_3500000000", False),
    ],
)
def test_rows_of_parallel_workers_are_our_own(origin: str | None, ours: str, expected: bool) -> None:
    assert is_ours(origin, ours) is expected


# --- the words of PostgreSQL 19 -----------------------------------------------------------------------


def test_messages_for_19_have_the_words_of_postgresql_19() -> None:
    """A target of that version has them in its log; source: errdetail_apply_conflict()."""
    wording = Wording.POSTGRESQL_19
    mapping = map_relation(remote("a*", "b"), local("a", "b", identity=("a",)))
    writer = RowWriter("712", "2026-11-23 10:00:00+00", False, None)
    taken = LocalRow("t_pkey", ("a",), writer, {"a": "1", "b": "old"})
    update = Update(None, 1, None, None, row("1", "new"))
    assert [
        unique(mapping, Insert(None, 1, row("1", "new")), "public.t", ("a", "b"), [taken], wording).exact_detail,
        differs(mapping, update, writer, ["1", "old"], wording).exact_detail,
        missing(mapping, update, wording).exact_detail,
        missing(mapping, Delete(None, 1, OldPart.KEY, row("1", None)), wording).exact_detail,
        wording.position(Lsn.parse("0/376E860")),
    ] == [
        "Could not apply remote change: remote row (1, new).\n"
        'Key already exists in unique index "t_pkey", modified locally in transaction 712 at 2026-11-23 10:00:00+00:'
        " key (a)=(1), local row (1, old).",
        "Updating the row that was modified locally in transaction 712 at 2026-11-23 10:00:00+00:"
        " local row (1, old), remote row (1, new), replica identity (a)=(1).",
        "Could not find the row to be updated: remote row (1, new), replica identity (a)=(1).",
        "Could not find the row to be deleted: replica identity (a)=(1).",
        "0/0376E860",
    ]
    assert Wording.POSTGRESQL_18.position(Lsn.parse("0/0376E860")) == "0/376E860"
