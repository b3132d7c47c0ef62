"""A mirror is killed with SIGKILL at random while the server is busy.

Triggers of the target record each written row. Every row that was committed on the publisher occurs once, in these
records as well: nothing was applied again.
"""

from __future__ import annotations

import random
import sqlite3
import sys
from pathlib import Path

import anyio
import pytest

from subscriber.demo.processes import Process
from tests.mirror.conftest import Mirror
from tests.plugins.fix_cluster import Database

TABLES = """
CREATE TABLE log (id INTEGER PRIMARY KEY, note TEXT);
CREATE TABLE written (id INTEGER, note TEXT);
CREATE TRIGGER i AFTER INSERT ON log BEGIN INSERT INTO written VALUES (new.id, new.note); END;
CREATE TRIGGER u AFTER UPDATE ON log BEGIN INSERT INTO written VALUES (new.id, new.note); END;
"""


async def keep_writing(db: Database, stop: anyio.Event, chance: random.Random) -> None:
    """Write transactions, mostly of one row, some of a thousand, which are sent in blocks. Some are rolled back."""
    connection = await db.connect()
    while not stop.is_set():
        transaction = connection.transaction()
        await transaction.start()
        count = chance.choice([1, 1, 1, 1, 1, 2, 5, 20, 1000])
        await connection.execute("INSERT INTO log SELECT nextval('ids'), 'new' FROM generate_series(1, $1::int)", count)
        await connection.execute("UPDATE log SET note = 'old' WHERE id = currval('ids')")
        await (transaction.rollback() if chance.random() < 0.1 else transaction.commit())
        await anyio.sleep(0.01)


@pytest.mark.parametrize("times", [2, pytest.param(60, marks=[pytest.mark.soak, pytest.mark.timeout(600)])])
async def test_a_mirror_is_killed(mirror: Mirror, tmp_path: Path, times: int) -> None:
    seed = random.randrange(10_000)
    print(f"seed {seed}")
    chance = random.Random(seed)
    await mirror.source.execute(
        "CREATE TABLE log (id int PRIMARY KEY, note text)",
        "CREATE SEQUENCE ids",
        "INSERT INTO log SELECT nextval('ids'), 'copied' FROM generate_series(1, 5000)",
    )
    mirror.execute(TABLES)
    dsn = mirror.source.dsn(options="-c logical_decoding_work_mem=64kB")
    command = [sys.executable, "-m", "tests.mirror.victim_process", dsn, mirror.url]
    process = Process("mirror", command, tmp_path)
    stop = anyio.Event()
    positions = set()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keep_writing, mirror.source, stop, chance)
        for number in range(times):
            before = position(mirror)
            process.start()
            if number == 0:  # in the copy: its slot is there, and nothing else
                await mirror.source.wait_for("SELECT count(*) FROM pg_replication_slots WHERE slot_name = 'm'", 1)
            else:
                with anyio.fail_after(20):
                    while position(mirror) == before:
                        await anyio.sleep(0.01)
                await anyio.sleep(chance.uniform(0.0, 0.3))
            assert process.pid is not None, process.last_lines()
            await process.kill9()
            positions.add(position(mirror))
        stop.set()
    await mirror.run()
    assert len(positions) > times // 2
    assert mirror.rows("SELECT id, note FROM log ORDER BY id") == await mirror.source.rows(
        "SELECT id, note FROM log ORDER BY id"
    )
    assert mirror.rows("SELECT id, note FROM written GROUP BY id, note HAVING count(*) > 1") == []
    assert mirror.rows("SELECT count(*) FROM written WHERE note = 'copied'") == [(5000,)]


def position(mirror: Mirror) -> str | None:
    """Which the mirror has stored."""
    try:
        return next((lsn for (lsn,) in mirror.rows("SELECT lsn FROM subscriber_mirror")), None)
    except sqlite3.OperationalError:  # it has not begun, or is just writing
        return None
