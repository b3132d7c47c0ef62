"""Mistakes of an operator that could open two servers, or leave rows behind: each is refused before any change."""

from __future__ import annotations

import os
from unittest import mock

import pytest

from subscriber.errors import StatementError
from subscriber.migration.migration import move_database
from subscriber.migration.preflight.preflight import run_preflight
from subscriber.migration.preflight.rules import UNPUBLISHED
from tests.migration.scene import QUICK, Command, following, moving
from tests.plugins.fix_cluster import Database

pytestmark = pytest.mark.usefixtures("with_schema")


async def fences(source_db: Database, target_db: Database) -> list[str]:
    async with moving(source_db, target_db) as move:
        return [server.fence for server in (await move.status()).servers]


@pytest.mark.timeout(180)
async def test_exchanged_servers_and_other_names_are_refused(source_db: Database, target_db: Database) -> None:
    """`abort` would open the new server, and `finish` the old one, while applications write to the other."""
    async with following(source_db, target_db):
        for number, fenced in enumerate((["open", "closed"], ["closed", "open"])):
            async with moving(source_db, target_db) as move:
                await (move.cutover() if number else move.rehearse())
            for command, source, target, name, said in (
                ("abort", target_db, source_db, "s", "the source of this command is the target of the move s"),
                ("finish", target_db, source_db, "s", "Exchange --source and --target."),
                ("report", target_db, source_db, "s", "the source of this command is the target of the move s"),
                ("abort", source_db, target_db, "t", 'the source is part of another move, "s"'),
                ("finish", source_db, target_db, "t", "See: subscriber migrate status s"),
                ("finish", target_db, source_db, "t", 'the source is part of another move, "s"'),
            )[: 3 if number else None]:  # other names are refused in the same way later
                status, output = await Command(source, target, name).run(command)
                assert status != 0, (command, output)
                assert said in output, (command, output)
            assert await fences(source_db, target_db) == fenced


async def test_an_unknown_move_is_neither_undone_nor_finished(source_db: Database, target_db: Database) -> None:
    for command in ("abort", "finish"):
        status, output = await Command(source_db, target_db).run(command)
        assert status != 0, output
        assert 'subscription "s" does not exist on the target' in output
        assert "Begin a move: subscriber migrate start s" in output
    for name in ("My move", "x" * 60):  # with "_back", the latter is too long
        status, output = await Command(source_db, target_db, name).run("start")
        assert status != 0, output
        assert "replication slot name" in output
    for database in (source_db, target_db):
        assert await database.value("SELECT count(*) FROM subscriber.migration") == 0


async def test_a_move_of_a_database_to_itself_is_refused(source_db: Database) -> None:
    for command in ("start", "abort", "preflight", "diff", "schema"):
        same = Command(source_db, source_db, "s" if command in ("start", "abort") else "")
        status, output = await same.run(command)
        assert status != 0, (command, output)
        assert "source and target are the same database" in output, (command, output)
    assert await source_db.value("SELECT to_regnamespace('subscriber') IS NULL")


@pytest.mark.timeout(120)
async def test_a_table_without_publication_is_not_left_behind_silently(
    source_db: Database, target_db: Database
) -> None:
    """A role that is no superuser publishes the tables that exist at `start`. Later ones are refused by name."""
    late = "CREATE TABLE late (id int PRIMARY KEY)"
    async with following(source_db, target_db):
        await source_db.execute(
            late,
            "DROP PUBLICATION p",
            "CREATE PUBLICATION p FOR TABLE item, account, part",
            "CREATE PUBLICATION rooted FOR TABLE item, account, part WITH (publish_via_partition_root = true)",
        )
        for publication in ("p", "rooted"):
            assert await source_db.rows(UNPUBLISHED, [publication]) == [("public", "late")]
        preflight = await run_preflight(source_db.dsn(), target_db.dsn(), schema=False, slots=["s"], publication="p")
        assert [error.name for error in preflight.errors] == ["unpublished:public.late"]
        async with moving(source_db, target_db) as move:
            with pytest.raises(StatementError) as refused:
                await move.cutover()
        assert "Table public.late of the source is not published, and would stay behind." in str(refused.value.detail)
        async with moving(source_db, target_db, waive=("unpublished:public.late",)) as move:
            assert (await move.rehearse()).estimate < QUICK.max_pause


async def test_an_invalid_setting_of_the_environment_is_no_traceback(source_db: Database, target_db: Database) -> None:
    command = Command(source_db, target_db)
    with mock.patch.dict(os.environ, {"SUBSCRIBER_MAX_SYNC_WORKERS": "many"}):
        for name in ("start", "verify", "rehearse", "cutover", "back"):
            status, output = await command.run(name)
            assert status == 2, (name, output)
            assert "environment variable SUBSCRIBER_MAX_SYNC_WORKERS" in output
            assert "Traceback" not in output
        with pytest.raises(ValueError, match="environment variable SUBSCRIBER_MAX_SYNC_WORKERS"):
            async with move_database(source_db.dsn(), target_db.dsn(), "s"):
                pass
