"""A process that spools ten million changes of five million subtransactions, and reads them.

    python -m tests.spool.spooling DIRECTORY

It prints the number of changes it has read, the number that is left after the rollback of some subtransactions, and the
bytes of memory that the spool has taken.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import anyio

from subscriber.spool.spool import Spool

CHANGES = 10_000_000


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


async def main(directory: Path) -> None:
    spool = Spool(directory, limit=None)
    await spool.open()
    transaction, message, before, count = spool.start(1000, first=True), b"I" + bytes(40), peak(), 0
    for number in range(CHANGES):
        if transaction.append(1001 + number // 2, message):
            await transaction.write()
    await transaction.end_block()
    async for records in transaction.read():
        count += len(records)
    last = 1001 + (CHANGES - 1) // 2
    for subxid in (*range(last, last - 1000, -1), last - 2_000_000, 1002, 1001):
        assert await transaction.rollback(subxid) is not None
    print(count, transaction.changes, peak() - before)
    await spool.close()


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]))
