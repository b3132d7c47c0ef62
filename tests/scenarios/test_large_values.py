"""A large value is in the worker's memory at most twice, on its way from the publisher to the target's table.

So are two values from a file, when the second is read while the first is applied.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Program, Subscriptions

MIB = 48  # of the value
COPIES = 2
BESIDE = 32  # MiB: read-ahead, and the memory of an idle worker

VALUE = f"repeat('0123456789abcdef', {MIB} * 65536)"
DIGEST = "SELECT id, length(v), md5(v) FROM t ORDER BY id"

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to see the memory")


def memory(program: Program, name: str) -> int:
    """Return MiB: VmRSS is the program's current memory, VmHWM its peak."""
    match = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{program.pid}/status").read_text())
    assert match is not None
    return int(match[1]) // 1024


async def assert_bounded(
    program: Program, before: int, source: Database, target: Database, *, at_once: int = 1
) -> None:
    """Check the peak memory. `at_once`: number of values in memory together."""
    assert await target.rows(DIGEST) == await source.rows(DIGEST)
    assert memory(program, "VmHWM") - before <= at_once * COPIES * MIB + BESIDE


@pytest.mark.parametrize(
    "streaming", [*(pytest.param(mode, marks=pytest.mark.soak) for mode in ("off", "on")), "parallel"]
)
async def test_large_values_in_changes_take_limited_memory(
    streaming: str, source_db: Database, target_db: Database, subscriptions: Subscriptions, program: Program
) -> None:
    if streaming != "off":
        await source_db.stream_everything()
    for database in (source_db, target_db):
        await database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    await source_db.execute("CREATE PUBLICATION p FOR TABLE t")
    await subscriptions.create(source_db, "p", streaming=streaming)
    await program.start()
    await subscriptions.wait_for_ready(source_db)
    before = memory(program, "VmRSS")
    await source_db.execute(f"INSERT INTO t VALUES (1, {VALUE})")
    await source_db.wait_for_catchup("s")
    await source_db.execute("UPDATE t SET v = 'u' || v")
    await source_db.wait_for_catchup("s")
    await assert_bounded(program, before, source_db, target_db)
    await source_db.execute(
        f"INSERT INTO t SELECT i, {VALUE} FROM generate_series(2, 3) i", "UPDATE t SET v = 'u' || v WHERE id = 1"
    )
    await source_db.wait_for_catchup("s")
    await assert_bounded(program, before, source_db, target_db, at_once=1 if streaming == "off" else 2)


async def test_large_values_in_the_initial_copy_take_limited_memory(
    source_db: Database, target_db: Database, subscriptions: Subscriptions, program: Program
) -> None:
    for database in (source_db, target_db):
        await database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    await source_db.execute(
        "CREATE PUBLICATION p FOR TABLE t", f"INSERT INTO t SELECT i, {VALUE} FROM generate_series(1, 3) i"
    )
    await program.start()
    before = memory(program, "VmRSS")
    await subscriptions.create(source_db, "p")
    await subscriptions.wait_for_ready(source_db)
    await assert_bounded(program, before, source_db, target_db)
