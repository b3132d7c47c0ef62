"""Many moves there and back, with figures; servers that are killed; and servers of other versions."""

from __future__ import annotations

import statistics

import pytest

from tests.migration.scene import following, moving, wait_for_writes
from tests.migration.writers import applications, check_nothing_is_lost, rows_of
from tests.plugins.fix_cluster import Database

MOVES = 50


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_fifty_moves_lose_nothing(source_db: Database, target_db: Database, record_property: object) -> None:
    pauses: list[float] = []
    async with following(source_db, target_db):
        async with applications([source_db, target_db]) as found:
            await wait_for_writes(found, source_db)
            for number in range(MOVES):
                to = source_db if number % 2 else target_db
                async with moving(source_db, target_db) as move:
                    moved = await (move.back() if number % 2 else move.cutover())
                assert moved.warnings == ()
                assert moved.pause is not None
                pauses.append(moved.pause)
                await wait_for_writes(found, to)
        await check_nothing_is_lost(found, source_db)
        await source_db.wait_for_catchup("s")
        assert await rows_of(source_db) == await rows_of(target_db)
        assert {len(application.moves) for application in found} == {MOVES + 1}
    written = sum(len(application.acknowledged) for application in found)
    print(
        f"\n{MOVES} moves, {written} acknowledged transactions, none lost, none twice; pause of writes: median"
        f" {statistics.median(pauses):.3f} s, at most {max(pauses):.3f} s"
    )
