"""A watcher of both servers of a move: never are both writable at the same time.

An ordinary role tries a write on each server, again and again. A statement passes the fence before RETURNING is
evaluated. So its clock_timestamp() is a moment at which the server was writable, by the clock that both servers share.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import asyncpg

from tests.migration.scene import moving
from tests.migration.writers import REFUSED
from tests.plugins.fix_cluster import Database

PROBE = """
UPDATE account SET items = items WHERE application = 9 RETURNING extract(epoch FROM clock_timestamp())::float8
"""
PAUSE = 0.02  # seconds between two writes on one server, each of which is replicated
REFUSED_PAUSE = 0.02  # seconds between two connections to a server that refuses them


@dataclass
class Watcher:
    """The moments at which each server has committed a write: (seconds by the servers' clock, side)."""

    pause: float = PAUSE
    writes: list[tuple[float, str]] = field(default_factory=list)
    refused: int = 0

    async def watch(self, side: str, database: Database, role: str) -> None:
        """Try to write until canceled."""
        connection: asyncpg.Connection[asyncpg.Record] | None = None
        try:
            while True:
                try:
                    async with asyncio.timeout(20):
                        if connection is None:
                            connection = await asyncpg.connect(database.dsn(user=role))
                        at = await connection.fetchval(PROBE)
                except (*REFUSED, TimeoutError):
                    self.refused += 1
                    if connection is not None:
                        connection.terminate()
                    connection = None
                    await asyncio.sleep(REFUSED_PAUSE)
                    continue
                self.writes.append((at, side))
                await asyncio.sleep(self.pause)
        finally:
            if connection is not None:
                connection.terminate()

    def intervals(self) -> list[tuple[str, float, float]]:
        """Return the periods in which one server alone has committed writes: side, first and last moment."""
        return [
            (side, writes[0][0], writes[-1][0])
            for side, group in itertools.groupby(sorted(self.writes), key=lambda write: write[1])
            if (writes := list(group))
        ]

    def check(self, expected: Sequence[str]) -> float:
        """Check that the writes are on these sides, in this order, each after the last write of the side before.

        If both servers were writable at the same time, their writes would alternate.

        Returns:
            The shortest time in seconds between the last write on a server and the first one on the other.
        """
        intervals = self.intervals()
        assert [side for side, _, _ in intervals] == list(expected), intervals[:20]
        return min((after[1] - before[2] for before, after in itertools.pairwise(intervals)), default=0.0)


@asynccontextmanager
async def watched(
    sides: Mapping[str, Database], role: str, *, fenced: bool = False, pause: float = PAUSE
) -> AsyncIterator[Watcher]:
    """Watch both servers during the block. A rehearsal fences the target before, if it is not `fenced` yet."""
    if not fenced:
        async with moving(sides["source"], sides["target"]) as move:
            await move.rehearse()
    watcher = Watcher(pause)
    tasks = [asyncio.create_task(watcher.watch(side, database, role)) for side, database in sides.items()]
    try:
        yield watcher
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
