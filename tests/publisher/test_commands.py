"""The exact commands for servers of each version."""

from __future__ import annotations

import pytest

from subscriber import quoting
from subscriber.lsn import Lsn
from subscriber.publisher import commands
from subscriber.publisher.commands import StreamOptions
from subscriber.publisher.tables import PublishedColumn, PublishedTable, copies_binary, copy_statement


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (180000, "CREATE_REPLICATION_SLOT \"s\" LOGICAL pgoutput (TWO_PHASE, FAILOVER, SNAPSHOT 'use')"),
        (150000, "CREATE_REPLICATION_SLOT \"s\" LOGICAL pgoutput (TWO_PHASE, FAILOVER, SNAPSHOT 'use')"),
        (140000, 'CREATE_REPLICATION_SLOT "s" LOGICAL pgoutput TWO_PHASE FAILOVER USE_SNAPSHOT'),
    ],
)
def test_a_slot_is_created_in_the_servers_grammar(version: int, expected: str) -> None:
    assert (
        commands.create_slot("s", version, snapshot="use", two_phase=True, failover=True, temporary=False) == expected
    )


def test_a_temporary_slot_is_created_in_the_servers_grammar() -> None:
    made = commands.create_slot("s", 180000, snapshot="export", two_phase=False, failover=False, temporary=True)
    assert made == "CREATE_REPLICATION_SLOT \"s\" TEMPORARY LOGICAL pgoutput (SNAPSHOT 'export')"
    made = commands.create_slot("s", 130000, snapshot="nothing", two_phase=False, failover=False, temporary=True)
    assert made == 'CREATE_REPLICATION_SLOT "s" TEMPORARY LOGICAL pgoutput NOEXPORT_SNAPSHOT'


def test_only_what_changes_is_altered() -> None:
    assert commands.alter_slot("s", failover=True, two_phase=None) == 'ALTER_REPLICATION_SLOT "s" ( FAILOVER true )'
    assert (
        commands.alter_slot("s", failover=False, two_phase=True)
        == 'ALTER_REPLICATION_SLOT "s" ( FAILOVER false, TWO_PHASE true )'
    )


ALL = StreamOptions(("p", 'Odd "name", it\'s'), None, True, "parallel", True, "none", True)
NAMES = 'publication_names \'"p","Odd ""name"", it\'\'s"\''


@pytest.mark.parametrize(
    ("version", "options"),
    [
        (
            180000,
            "proto_version '4', streaming 'parallel', two_phase 'on', origin 'none', "
            + NAMES
            + ", binary 'true', messages 'true'",
        ),
        (
            160000,
            "proto_version '4', streaming 'parallel', two_phase 'on', origin 'none', "
            + NAMES
            + ", binary 'true', messages 'true'",
        ),
        (150000, f"proto_version '3', streaming 'on', two_phase 'on', {NAMES}, binary 'true', messages 'true'"),
        (140000, f"proto_version '2', streaming 'on', {NAMES}, binary 'true', messages 'true'"),
        (130000, f"proto_version '1', {NAMES}"),
    ],
)
def test_a_publisher_is_asked_for_no_more_than_it_knows(version: int, options: str) -> None:
    command = commands.start_replication("s", Lsn.parse("16/B374D848"), ALL, version)
    assert command == f'START_REPLICATION SLOT "s" LOGICAL 16/B374D848 ({options})'


def test_the_least_that_can_be_asked() -> None:
    command = commands.start_replication("s", Lsn(0), StreamOptions(("p",), proto_version=1), 180000)
    assert command == "START_REPLICATION SLOT \"s\" LOGICAL 0/0 (proto_version '1', publication_names '\"p\"')"


def test_literals_survive_any_setting_of_the_server() -> None:
    assert quoting.literal("it's") == "'it''s'"
    assert quoting.literal("back\\slash's") == " E'back\\\\slash''s'"
    assert quoting.identifier('a"b') == '"a""b"'


def table(relkind: str = "r", filters: tuple[str, ...] = (), generated: bool = False) -> PublishedTable:
    columns = (PublishedColumn("a", 23, -1, True, False), PublishedColumn('b"', 25, -1, False, generated))
    return PublishedTable("s", "t", 16384, "d", relkind, columns, filters, 0)


@pytest.mark.parametrize(
    ("published", "expected"),
    [
        (table(), 'COPY "s"."t" ("a", "b""") TO STDOUT'),
        (
            table(filters=("(a > 1)", "(a < 0)")),
            'COPY (SELECT "a", "b""" FROM ONLY "s"."t" WHERE (a > 1) OR (a < 0)) TO STDOUT',
        ),
        (table(generated=True), 'COPY (SELECT "a", "b""" FROM ONLY "s"."t") TO STDOUT'),
        (table("p"), 'COPY (SELECT "a", "b""" FROM "s"."t") TO STDOUT'),
        (PublishedTable("s", "t", 1, "d", "r", (), (), 0), 'COPY "s"."t" TO STDOUT'),
    ],
)
def test_the_copy_fits_the_table(published: PublishedTable, expected: str) -> None:
    assert copy_statement(published, binary=False) == expected


def test_binary_copies_are_for_publishers_from_16_on() -> None:
    assert copy_statement(table(), binary=True).endswith(" TO STDOUT WITH (FORMAT binary)")
    assert (copies_binary(True, 160000), copies_binary(True, 150000), copies_binary(False, 160000)) == (
        True,
        False,
        False,
    )
