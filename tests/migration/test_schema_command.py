"""`subscriber migrate schema`, and preflight and diff as commands."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from subscriber.demo.servers import embedded_bin
from tests.migration.shop import drop_roles, shop
from tests.plugins.fix_cluster import Database, numbers


@pytest.fixture
async def suffix(source_db: Database, target_db: Database) -> AsyncIterator[str]:
    """A shop in the source, whose roles have this suffix."""
    suffix = f"_{next(numbers)}"
    async with shop(source_db, suffix, target_db.server):
        yield suffix


async def migrate(source: Database, target: Database, command: str, *options: str) -> tuple[int, str, str]:
    """Run the command. Returns the exit status, stdout and stderr."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "subscriber", "migrate", command, *options),
        *("--source", source.dsn(), "--target", target.dsn()),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


async def test_definitions_are_copied_and_compared_by_command(
    source_db: Database, target_db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for name in ("killed", "locked", "other"):
        directory = tmp_path / (f"subscriber-schema-{name}" if name != "other" else name)
        directory.mkdir()
        (directory / "schema.dump").touch()
        os.utime(directory, (0, 0))
    locked = os.open(tmp_path / "subscriber-schema-locked", os.O_RDONLY)
    fcntl.flock(locked, fcntl.LOCK_EX)
    await source_db.execute("CREATE TABLE a (id int PRIMARY KEY, text text)", "CREATE INDEX a_text ON a (text)")
    status, output, errors = await migrate(source_db, target_db, "schema", "--programs", str(embedded_bin()))
    assert (status, errors) == (0, "")
    os.close(locked)
    assert {path.name for path in tmp_path.iterdir()} == {"subscriber-schema-locked", "other"}
    status, output, errors = await migrate(source_db, target_db, "diff")
    assert (status, errors) == (1, "")
    create = "CREATE INDEX a_text ON public.a USING btree (text);"
    assert output == f"index public.a_text is missing on the target\n    {create}\n1 difference\n"
    status, output, errors = await migrate(source_db, target_db, "preflight", "--waive", "setting:TimeZon")
    assert (status, output) == (3, "")
    assert 'there is no finding "setting:TimeZon" to waive' in errors


@pytest.mark.soak
async def test_a_shop_is_moved_by_command(source_db: Database, target_db: Database, suffix: str) -> None:
    programs = ("--programs", str(embedded_bin()))
    status, output, errors = await migrate(source_db, target_db, "schema", "--dry-run", *programs)
    assert (status, errors) == (0, "")
    assert f'CREATE ROLE "app{suffix}"' in output
    assert "CREATE TABLE shop.customer" in output
    assert "SCRAM-SHA-256" not in output
    assert await target_db.value("SELECT to_regclass('shop.customer') IS NULL")

    status, output, errors = await migrate(source_db, target_db, "schema", *programs)
    assert (status, errors) == (0, "")
    status, output, errors = await migrate(source_db, target_db, "diff", "--json")
    assert status == 1
    assert "index" in {difference["kind"] for difference in json.loads(output)}
    status, output, errors = await migrate(
        source_db, target_db, "schema", "--after-copy", "--large-objects", "--jobs", "3", *programs
    )
    assert (status, errors) == (0, "")
    assert "2 of 2 large objects copied" in output
    assert await migrate(source_db, target_db, "diff") == (0, "0 differences\n", "")

    status, output, errors = await migrate(source_db, target_db, "preflight", "--waive", "unlogged:shop.nothing")
    assert status == 3
    assert "Perhaps you mean unlogged:shop.cache." in errors
    status, output, errors = await migrate(
        *(source_db, target_db, "preflight", "--waive", "unlogged:shop.cache", "--json", "--large-objects", *programs)
    )
    assert status == 1  # one table has no replica identity
    document = {finding["name"]: finding for finding in json.loads(output)}
    assert document["unlogged:shop.cache"]["waived"]
    assert document["identity:shop.keyless"]["fix"] == 'ALTER TABLE "shop"."keyless" REPLICA IDENTITY FULL;'
    await drop_roles(suffix, target_db.server)


@pytest.mark.soak
async def test_kills_at_any_object(source_db: Database, target_db: Database, suffix: str) -> None:
    """The command is killed again and again while it creates objects, and each run continues."""
    programs = ("--programs", str(embedded_bin()))
    await source_db.execute(*(f"CREATE INDEX log_{n} ON shop.log (line, at) WHERE line > '{n}'" for n in range(20)))
    assert (await migrate(source_db, target_db, "schema", *programs))[0] == 0
    kills = 0
    for _ in range(100):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "subscriber", "migrate", "schema", "--after-copy", *programs),
            *("--source", source_db.dsn(), "--target", target_db.dsn()),
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        for _ in range(3 + kills):
            if not await process.stdout.readline():
                break
        else:
            process.kill()
            kills += 1
        await process.communicate()
        if process.returncode == 0:
            break
    assert kills > 5
    assert await migrate(source_db, target_db, "diff") == (0, "0 differences\n", "")
    await drop_roles(suffix, target_db.server)
