"""The memory for ten million changes, in a separate process because a peak does not fall.

.venv/bin/pytest -m soak tests/spool
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SPOOLING = """
import anyio, resource, sys
from pathlib import Path
from subscriber.spool.spool import Spool

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

async def main():
    spool = Spool(Path(sys.argv[1]), limit=None)
    await spool.open()
    transaction, message, before, count = spool.start(1000, first=True), b"I" + bytes(40), peak(), 0
    for number in range(10_000_000):
        if transaction.append(1001 + number // 2, message):
            await transaction.write()
    await transaction.pause()
    async for records in transaction.read():
        count += len(records)
    last = 1001 + number // 2
    for subxid in (*range(last, last - 1000, -1), last - 2_000_000, 1002, 1001):
        assert await transaction.rollback(subxid) is not None
    print(count, transaction.changes, peak() - before)
    await spool.close()

anyio.run(main)
"""


@pytest.mark.soak
def test_ten_million_changes_of_five_million_subtransactions_take_little_memory(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SPOOLING, str(tmp_path / "spool")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    read, left, memory = map(int, done.stdout.split())
    assert (read, left) == (10_000_000, 0)
    assert memory < 24_000_000
