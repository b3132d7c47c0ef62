"""A consumer to be killed.

    python -m tests.change_stream.victim_process DSN SLOT FILE {once,again} [UNTIL]

Writes a line for each transaction, `end_lsn xid number,number,…`, in one call, and then acknowledges it. `once` starts
after the last line of the file; `again` starts at the slot's position.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import anyio

from subscriber import Insert, Lsn, stream


def last_position(path: Path) -> Lsn:
    """Return the position of the last complete line. An incomplete line behind it is removed."""
    if not path.exists():
        return Lsn(0)
    written = path.read_bytes()
    whole = written[: written.rfind(b"\n") + 1]
    os.truncate(path, len(whole))
    return Lsn.parse(whole.splitlines()[-1].split()[0].decode()) if whole else Lsn(0)


async def main(*arguments: str) -> None:
    dsn, slot, file, how, *until = arguments
    path = Path(file)
    work = [0.0] if until else [0.0, 0.0, 0.005]  # seconds; the last process is not killed
    position = last_position(path)
    out = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    async with stream(
        dsn,
        slot=slot,
        publications=["p"],
        start=position if how == "once" else Lsn(0),
        until=Lsn.parse(until[0]) if until else None,
    ) as changes:
        async for transaction in changes:
            numbers = [str(change.new["number"]) async for change in transaction if isinstance(change, Insert)]
            await anyio.sleep(random.choice(work))  # a transaction confirmed too early would be lost by a kill here
            os.write(out, f"{transaction.end_lsn} {transaction.xid} {','.join(numbers)}\n".encode())
            await anyio.sleep(random.choice(work))
            await transaction.ack()


if __name__ == "__main__":
    anyio.run(main, *sys.argv[1:])
